"""Several calls of one converted model at once, in threads and within each other: each has the grid of its own picture."""

import threading
from copy import deepcopy

import pytest
import torch

import polymix
from polymix.mixers.fold import Folded
from tests.convert.checks import identical, near, stirred
from tests.convert.timm_hosts import timm, vit

WIDE, HIGH = (torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(0)) for size in ((16, 64), (64, 16)))


def converted():
    """A ViT for pictures of any size, whose mixer weighs its tokens by their places in the grid."""
    return stirred(
        polymix.convert(vit(dynamic_img_size=True, global_pool="avg"), "padre:kernel_size=3").model, 0.5
    ).eval()


def swin():
    model = timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=32, window_size=2, embed_dim=16, depths=(2,), num_heads=(2,),
        num_classes=3, strict_img_size=False,
    )  # fmt: skip
    return stirred(
        polymix.convert(model, "padre:kernel_size=3", windows="merge", drop=("position_bias",)).model, 0.5
    ).eval()


@pytest.mark.parametrize(("build", "part"), [(converted, "pos_drop"), (swin, "patch_embed")])
def test_threads_with_pictures_of_other_sizes_get_their_own_answers(build, part):
    model, pictures = build(), (WIDE, HIGH)
    answers, failures = {}, []
    with torch.no_grad():
        alone = [model(picture) for picture in pictures]
    assert not torch.allclose(*alone)
    meeting = threading.Barrier(2, timeout=600)

    def meet(*_):
        meeting.wait()  # both have noted their grid

    model.get_submodule(part).register_forward_hook(meet)

    def serve(place):
        try:
            with torch.no_grad():
                answers[place] = model(pictures[place])
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=serve, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    near([answers[0], answers[1]], alone)


@pytest.mark.parametrize("fails", [False, True])
def test_a_call_within_a_call_leaves_the_outer_one_its_grid(fails):
    model = converted()
    with torch.no_grad():
        alone, inner = model(WIDE), []

        def look_again(*_):
            if not inner:
                inner.append(HIGH)
                try:
                    inner.append(model(HIGH if not fails else HIGH.double()))
                except RuntimeError as error:
                    inner.append(error)

        model.blocks[0].register_forward_hook(look_again)
        identical([model(WIDE)], [alone])
    assert isinstance(inner[1], RuntimeError) == fails


def test_a_call_that_fails_behind_its_patches_leaves_the_outer_one_its_grid():
    model = converted()
    with torch.no_grad():
        alone, inner = model(WIDE), []

        def fail(*_):
            if inner == [1]:
                raise ValueError("within the inner call")

        def look_again(*_):
            if not inner:
                inner.append(1)
                with pytest.raises(ValueError, match="within"):
                    model(HIGH)
                inner.append(2)

        model.blocks[1].register_forward_pre_hook(fail)
        model.blocks[0].register_forward_hook(look_again)
        identical([model(WIDE)], [alone])
    assert inner == [1, 2]


def test_another_thread_runs_checkpointed_blocks_on_the_latest_grid():
    """As autograd's threads do on a GPU: they run a block again, but not the patches before it."""
    model, answers = converted(), []
    tokens = []
    handle = model.blocks[0].register_forward_pre_hook(lambda _, args: tokens.append(args[0]))
    with torch.no_grad():
        model(HIGH)
        handle.remove()
        here = model.blocks[0](tokens[0])
        thread = threading.Thread(target=lambda: answers.append(model.blocks[0](tokens[0]).detach()))
        thread.start()
        thread.join()
    near(answers, [here])


def test_a_copy_has_running_calls_of_its_own():
    model = converted()
    twin = deepcopy(model)
    assert twin.blocks[0].attn.running is not model.blocks[0].attn.running
    with torch.no_grad():
        identical([twin(HIGH)], [model(HIGH)])


def test_a_thread_that_merges_maps_again_is_not_overtaken_by_one_that_reads_the_old():
    weight, folded = torch.nn.Parameter(torch.ones(1)), Folded()
    merging, resume, answers = threading.Event(), threading.Event(), {}

    def merge():
        value = weight.detach().clone()
        if threading.current_thread().name == "slow":
            merging.set()
            resume.wait(600)
        return {"weight": value}

    folded.maps(merge, [weight])
    with torch.no_grad():
        weight.mul_(2)
    slow = threading.Thread(name="slow", target=lambda: answers.update(slow=folded.maps(merge, [weight])))
    slow.start()
    assert merging.wait(600)
    answers["fast"] = folded.maps(merge, [weight])
    resume.set()
    slow.join()
    assert answers["fast"]["weight"].item() == answers["slow"]["weight"].item() == 2
