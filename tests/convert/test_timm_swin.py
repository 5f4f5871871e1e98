"""timm's Swin converted: windows kept, with their shift and padding, or merged into the feature map."""

from copy import deepcopy

import pytest
import torch

import polymix
from polymix.compat import cure_torchvision
from polymix.errors import CapabilityError, MaskError, OptionError
from polymix.mixers import config_class
from tests.convert.checks import (
    MIXERS,
    checkpoints,
    converts,
    identical,
    near,
    refuses,
    same_as_host,
    stirred,
    survives,
    undoes,
)  # fmt: skip

pytestmark = pytest.mark.slow  # real hosts by the dozen: minutes together

cure_torchvision()
timm = pytest.importorskip("timm", reason="untested: models of timm (the extra vision)")

BIAS = ("position_bias",)
SIZES = [(32, 32), (36, 44), (60, 28)]  # 8 × 8 patches, and numbers that windows of 4 × 4 do not fill


def images(*size):
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))


def swin(**options):
    small = {"img_size": 32, "patch_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 2), "window_size": 4}
    return timm.create_model(
        "swin_tiny_patch4_window7_224", pretrained=False, num_classes=3, drop_path_rate=0.0, **{**small, **options}
    )


def block(size=(6, 7), **options):
    """A shifted block, and a feature map (B, H, W, C) that fills its windows of 4 × 4 up with zeros."""
    from timm.models.swin_transformer import SwinTransformerBlock

    options = {"window_size": 4, "shift_size": 2, **options}
    return SwinTransformerBlock(16, size, num_heads=2, **options), torch.randn(2, *size, 16)


# windows kept


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({}, (32, 32)),
        ({"img_size": 40}, (40, 40)),  # 10 × 10, filled up to 12 × 12
        ({"img_size": (24, 64), "window_size": (2, 4)}, (24, 64)),
        ({"always_partition": True, "window_size": 5}, (32, 32)),
        *(({"dynamic_img_size": True}, size) for size in SIZES),
    ],
)
def test_softmax_in_windows_is_the_host(options, size):
    same_as_host(swin(**options), images(*size), input=images(*size))
    same_as_host(swin(**options), images(*size))


@pytest.mark.parametrize("mixer", ["pom", "knn", "prodpoly"])
def test_mixers_with_segments_keep_windows(mixer):
    report = converts(swin(), mixer, images(32, 32), input=images(32, 32), drop=BIAS)
    assert {layer.tokens for layer in report.layers} == {16}


@pytest.mark.parametrize("mixer", ["pom", "knn", "prodpoly", config_class("pom")(rotary="2d")])
def test_regions_of_a_shifted_window_do_not_see_each_other(mixer):
    layer, _ = block()
    adapter = polymix.convert(stirred(layer).eval(), mixer, drop=BIAS).adapters["attn"]
    mask = layer.get_attn_mask()
    windows = torch.randn(2 * 4, 16, 16)
    before = adapter(windows, mask)
    for last in range(2):
        changed = windows.clone()
        changed[4 * last + 3, 15] += 1.0  # the lower right corner of the last window, a region by itself
        moved = (adapter(changed, mask) - before).abs().amax(-1)
        own = torch.zeros(8, 16, dtype=torch.bool)
        own[4 * last + 3] = mask[3, 15] == 0
        assert bool((moved[~own] == 0).all()), "another region, window or image saw it"
        assert bool((moved[own] > 0).any())


@pytest.mark.parametrize("mixer", ["padre", "qt", "poly_sa", "poly_nl"])
def test_others_mix_each_region_alone(mixer):
    report = converts(swin(), mixer, images(32, 32), input=images(32, 32), drop=BIAS)
    assert report.adapters["layers.0.blocks.1.attn"].alone and report.layers[1].tokens == 16
    if mixer == "padre":
        assert report.adapters["layers.0.blocks.0.attn"].mixer.config.grid == (4, 4)


def test_a_mask_that_is_no_partition_is_an_error():
    layer, _ = block()
    adapter = polymix.convert(layer, "pom", drop=BIAS).adapters["attn"]
    mask = torch.zeros(4, 16, 16).masked_fill(torch.ones(16, 16, dtype=torch.bool).triu(1), -100.0)
    with pytest.raises(MaskError, match="does not split the window"):
        adapter(torch.randn(8, 16, 16), mask)


# windows merged


@pytest.mark.parametrize("mixer", MIXERS)
def test_every_mixer_learns_on_the_whole_map(mixer):
    report = converts(swin(), mixer, images(32, 32), windows="merge", input=images(32, 32), drop=BIAS)
    assert [layer.tokens for layer in report.layers] == [64, 64, 16, 16]
    assert set(report.layers[0].dropped) >= {"relative_position_bias_table"}
    assert all(layer.error is not None for layer in report.layers)


@pytest.mark.parametrize("size", [(8, 8), (6, 7), (9, 5), (3, 12)])
@pytest.mark.parametrize("shift", [0, 2])
def test_the_mixer_sees_the_map_without_shift_and_padding(size, shift):
    layer, x = block(size, shift_size=shift)
    report = polymix.convert(stirred(layer).eval(), "padre:kernel_size=3", windows="merge", drop=BIAS)
    mixed = layer_output(report.model, x)
    identical([mixed], [report.adapters["attn"].mixer(x.flatten(1, 2), grid=size).unflatten(1, size)])


def layer_output(model, x):
    """What a block's attention, with all that the block does around it, makes of x."""
    model.norm1 = Passing()
    model.norm1.register_forward_hook(model.attn.note_grid)
    return model._attn(model.norm1(x))


class Passing(torch.nn.Module):
    def forward(self, x):
        return x


@pytest.mark.parametrize("size", SIZES)
def test_maps_of_any_size(size):
    report = polymix.convert(
        stirred(swin(dynamic_img_size=True)).eval(), "padre:kernel_size=3", windows="merge", drop=BIAS
    )
    model = deepcopy(report.model)  # with hooks of its own
    seen = {}
    for name in report.adapters:
        part = model.get_submodule(name.removesuffix(".attn"))
        part.norm1.register_forward_hook(lambda module, args, output, name=name: seen.update({name: output}))
        part.drop_path1.register_forward_hook(
            lambda module, args, output, name=name: seen.update({f"{name}'s": output})
        )
    model(images(*size))
    for name in report.adapters:
        x, adapter = seen[name], model.get_submodule(name)
        near([seen[f"{name}'s"]], [adapter.mixer(x.flatten(1, 2), grid=x.shape[1:3]).unflatten(1, x.shape[1:3])])
        assert adapter.current_grid == tuple(x.shape[1:3]) and report.adapters[name].current_grid is None


def test_a_map_of_another_size_than_built_for_is_calibrated():
    report = polymix.convert(swin(dynamic_img_size=True), "pom", windows="merge", input=images(36, 44), drop=BIAS)
    assert all(layer.error < 10 for layer in report.layers)


def test_a_mixer_tied_to_a_size_on_maps_that_vary():
    whole = {"layers.0.blocks.0.attn": polymix.PadreConfig(weight="full", grid=(8, 8))}
    refuses(
        swin(dynamic_img_size=True), whole, CapabilityError, "since the host's inputs vary", windows="merge", drop=BIAS
    )
    converts(swin(), whole, images(32, 32), windows="merge", drop=BIAS)


def test_windows_count_as_the_host_counts_them():
    report = polymix.convert(swin(), "linear_floor", windows="merge", drop=BIAS)
    assert report.layers[0].flops[0] == 2 * 64 * 4 * 16**2 + 4 * 64 * 16 * 16, "attention in windows counted as global"


# what cannot be


def test_what_is_changed_after_the_conversion_is_an_error():
    for windows in ("keep", "merge"):
        model = polymix.convert(swin(), "pom", windows=windows, drop=BIAS).model
        with pytest.raises(OptionError, match=r"window_size.*convert it again"):
            model.set_input_size((64, 64))
        same = polymix.convert(swin(), "pom", windows=windows, drop=BIAS).model
        same.set_input_size((48, 48), window_size=4)  # shifts the second stage, too, from now on
        if windows == "merge":
            with pytest.raises(OptionError, match=r"shift_size.*convert it again"):
                same(images(48, 48))
        else:
            same(images(48, 48))


def test_a_window_attention_alone():
    from timm.models.swin_transformer import WindowAttention

    layer = WindowAttention(16, 2, window_size=4)
    same_as_host(layer, torch.randn(3, 16, 16))
    refuses(layer, "pom", OptionError, "not in timm's block", windows="merge", drop=BIAS)
    refuses(layer, "padre", OptionError, "the window", grid=(2, 8), drop=BIAS)


# what holds for both


@pytest.mark.parametrize(("mixer", "windows"), [("pom", "keep"), ("softmax", "keep"), ("padre", "merge")])
def test_copies_bfloat16_compile_and_undo(mixer, windows):
    layer, x = block()
    survives(polymix.convert(stirred(layer), mixer, windows=windows, copy=True, input=x, drop=BIAS).model, x)
    undoes(layer, mixer, x, windows=windows, input=x, drop=BIAS)
    assert not any(part._forward_hooks for part in layer.modules()), "undo left hooks behind"


@pytest.mark.parametrize(("mixer", "windows"), [("pom", "keep"), ("padre", "merge")])
def test_checkpointing(mixer, windows):
    report = polymix.convert(stirred(swin(dynamic_img_size=True)), mixer, windows=windows, drop=BIAS)
    for size in SIZES[:2]:
        checkpoints(report, images(*size), lambda model: model.set_grad_checkpointing(True))
        report.model.set_grad_checkpointing(False)


def test_a_backward_after_maps_of_another_form_is_right_under_checkpointing():
    model = polymix.convert(stirred(swin(dynamic_img_size=True)), "padre", windows="merge", drop=BIAS).model

    def together(enable):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        (model(images(32, 64)).sum() + model(images(64, 32)).sum()).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    near(together(True), together(False))
