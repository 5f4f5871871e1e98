"""Hosts of timm in the classify task: trained by every published recipe, matched, checked before data is read."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from polymix import load_pretrained, save_pretrained
from polymix.compat import cure_torchvision
from polymix.domains.classify import data
from polymix.domains.classify.recipe import ClassifyRecipe
from polymix.domains.classify.task import ClassifyTask
from polymix.errors import DataError, OptionError
from polymix.mixers import TokenMixer
from polymix.train.initial import load_weights
from polymix.train.run import train
from polymix.train.saved import SavedRun

cure_torchvision()
pytest.importorskip("timm", reason="untested: hosts of timm")
from polymix.timm import create  # noqa: E402

CLASSES = ("n01440764", "n01443537", "n02119789")


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory):
    """Three classes in ImageNet's layout, of pictures of other sizes, one of them turned by EXIF."""
    folder = tmp_path_factory.mktemp("imagenet")
    for part, count in (("train", 4), ("val", 2)):
        for place, name in enumerate(reversed(CLASSES)):
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                draw = np.random.default_rng(100 * place + 10 * number + count)
                pixels = draw.integers(0, 256, (40 + number, 60, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{number}.JPEG")
    return folder


SMALL = {"image_size": 32, "batch_size": 8, "steps": 2, "evaluate_every": 2, "checkpoint_every": 2}
CASES = {
    "deit": {"mixer": "padre", "host_depth": 1},
    "xcit": {"mixer": "poly_sa", "host_depth": 1},
    "xcit_cifar": {"mixer": "keep", "host_depth": 1},
    "swin": {},
    "metaformer": {"image_size": 64},
    "cvt": {},
    "efficientvit": {"host": "efficientvit_b0", "sizes": (32, 64), "norm_images": 12},
    "resnet50": {},
}


@pytest.mark.parametrize("name", [
    "deit", *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name != "deit"),
])  # fmt: skip
@pytest.mark.draws
def test_every_published_recipe_trains_and_measures(imagenet, tmp_path, name):
    recipe = ClassifyRecipe().preset(name).changed(**{**SMALL, "epochs": None, "data": str(imagenet), **CASES[name]})
    last = train(recipe, tmp_path / "run")
    (row,) = json.loads((tmp_path / "run" / "results.json").read_text())["rows"]
    assert row["host"] == recipe.host and 0 <= row["metrics"]["accuracy"] <= 1 and np.isfinite(last["val_loss"])
    scope = {}
    exec("\n".join(ClassifyTask(recipe).usage(data.load(recipe), tmp_path / "run")), scope)
    assert scope["model"](torch.zeros(2, 3, 32, 32)).shape == (2, 3)
    run = SavedRun.of(tmp_path / "run")
    assert run.measure()["metrics"]["accuracy"] == pytest.approx(last["accuracy"])
    file = imagenet / "val" / CLASSES[0] / "0.JPEG"
    (said,) = run.predict([file], tmp_path / "seen")
    shares = [entry["probability"] for entry in said["top"]]
    assert said["label"] in CLASSES and said["probability"] == max(shares) and sum(shares) == pytest.approx(1, abs=1e-5)
    assert said["picture"] != f"{file.stem}.png", "beside the picture it might take its place"
    with Image.open(tmp_path / "seen" / said["picture"]) as picture:
        assert picture.size[0] >= 60
    with torch.no_grad():
        inputs = data.load(recipe)
        images, labels = next(inputs.test.batches(8))
        expected = run.load()(inputs.normalise(images[:1])).softmax(1)[0].max()
    assert labels[0] == 0 and said["probability"] == pytest.approx(expected.item(), abs=1e-6)


def test_a_registered_name_brings_its_mixer():
    recipe = ClassifyRecipe().changed(host="qt_vit_b1")
    assert (recipe.host, recipe.mixer, recipe.match_parameters) == ("efficientvit_b1", "qt", False)
    matched = ClassifyRecipe().changed(host="pom_deit_tiny_patch16_224_matched")
    assert (matched.host, matched.mixer, matched.match_parameters) == ("deit_tiny_patch16_224", "pom", True)
    assert recipe.changed(mixer="linear_floor").host == "efficientvit_b1"
    assert ClassifyRecipe(host="qt_vit_b1") == recipe
    with pytest.raises(OptionError, match="'padre' with host=qt_vit_b1"):
        ClassifyRecipe(host="qt_vit_b1", mixer="padre")
    with pytest.raises(OptionError, match="'padre' with host=qt_vit_b1"):
        ClassifyRecipe().changed(host="qt_vit_b1", mixer="padre")


def count(recipe):
    model = ClassifyTask(recipe).build(data.from_summary(recipe, {"classes": ["a", "b"], "channels": 3, "bytes": True, "name": "",
                                                     "mean": [0.0] * 3, "std": [1.0] * 3}))  # fmt: skip
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("options", [{"host": "deit_tiny_patch16_224", "host_depth": 1, "image_size": 32}, {"dim": 64}])
def test_parameters_are_matched_in_a_host_and_in_our_own_model(options):
    attention = count(ClassifyRecipe(**options, mixer="softmax"))
    assert count(ClassifyRecipe(**options, mixer="pom", match_parameters=True)) == pytest.approx(attention, rel=0.01)
    assert count(ClassifyRecipe(**options, mixer="pom")) != pytest.approx(attention, rel=0.02)


@pytest.mark.parametrize("options", [
    {"host": "deit_tiny_patch16_224", "host_depth": 4, "image_size": 32}, {"dim": 16, "depth": 4}
])  # fmt: skip
def test_a_plan_says_which_blocks_get_the_mixer(options, tmp_path):
    recipe = ClassifyRecipe(**options, mixer="pom", plan="1:1")
    summary = {"classes": ["a", "b"], "channels": 1, "bytes": True, "name": "", "mean": [0.0], "std": [1.0]}
    model = ClassifyTask(recipe).build(data.from_summary(recipe, summary))
    places = [getattr(block, "mixer", None) or getattr(block.attn, "mixer", None) for block in model.blocks]
    assert [place.name if place is not None else "softmax" for place in places] == ["pom", "softmax"] * 2
    if "host" not in options:
        save_pretrained(model, tmp_path / "saved")
        again = load_pretrained(tmp_path / "saved")
        assert torch.equal(again(torch.ones(1, 1, 16, 16)), model.eval()(torch.ones(1, 1, 16, 16)))


@pytest.mark.parametrize("options", [{"host": "deit_tiny_patch16_224", "mixer": "keep"}, {"host": "resnet50"}, {}])
def test_a_plan_that_means_nothing_is_refused(options, tmp_path):
    plan = "1:1" if options else "blocks.9=pom"
    with pytest.raises(OptionError) as caught:
        train(ClassifyRecipe(data=str(tmp_path / "none"), image_size=32, plan=plan, **options), tmp_path / "run")
    assert caught.value.argument == "plan"


@pytest.mark.parametrize(("options", "named"), [
    ({"drop_path": 0.1}, "drop_path"), ({"mixer": "keep"}, "mixer"), ({"host_depth": 2}, "host_depth"),
    ({"host": "efficientvit_b0", "depth": 3}, "depth"), ({"host": "efficientvit_b0", "class_token": True}, "class_token"),
    ({"sizes": (32,)}, "sizes"), ({"norm_images": 4}, "norm_images"), ({"auto_augment": "rand-m9"}, "auto_augment"),
    ({"schedule": "steps"}, "milestones"), ({"milestones": (0.5,)}, "milestones"), ({"milestones": (2,)}, "milestones"),
    ({"augment": True, "stream": False}, "stream"), ({"mixup": 0.8, "batch_size": 3}, "batch_size"),
    ({"crop": 0}, "crop"), ({"repeats": 0}, "repeats"), ({"broken": "ignore"}, "broken"), ({"match_parameters": "depth"}, "match_parameters"),
])  # fmt: skip
def test_no_option_is_ignored(options, named):
    with pytest.raises(OptionError) as caught:
        ClassifyRecipe(**options)
    assert caught.value.argument == named


@pytest.mark.parametrize("options", [
    {"host": "deit_tinny"}, {"host": "efficientvit_b0", "image_size": 40}, {"host": "deit_tiny_patch16_224", "image_size": 40},
    {"host": "deit_tiny_patch16_224", "image_size": 32, "sizes": (48, 32)}, {"host": "resnet50", "host_depth": 3, "image_size": 32},
    {"augment": True, "auto_augment": "random"},
])  # fmt: skip
def test_hosts_and_transforms_are_checked_before_images_are_read(tmp_path, options):
    with pytest.raises(OptionError):
        train(ClassifyRecipe(data=str(tmp_path / "none"), **options), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("host", "mixer"), [
    ("levit_128s", "pom"), ("pvt_v2_b0", "qt"), ("levit_128s", "linear_floor"),
])  # fmt: skip
def test_hosts_whose_attention_is_read_from_a_call(host, mixer):
    """They need numbers, not shapes alone; the second one takes any size, and no option for it."""
    task = ClassifyTask(ClassifyRecipe(host=host, mixer=mixer, image_size=64))
    task.check()
    model = create(mixer, host, img_size=64, num_classes=3).eval()
    assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 3)
    assert mixer in {part.name for part in model.modules() if isinstance(part, TokenMixer)}


@pytest.fixture(scope="module")
def papers_figure(imagenet):
    """The figure of a paper for a recipe, on images that look like a paper's by their layout and classes."""

    def row(benchmark="ImageNet", **options):
        task = ClassifyTask(ClassifyRecipe(data=str(imagenet), image_size=32, **options))
        images = data.load(task.recipe)
        if benchmark == "ImageNet":
            images = replace(images, classes=tuple(f"n{place:08d}" for place in range(1000)))
        elif benchmark is not None:
            images = replace(images, classes=tuple(map(str, range(100))), layout="cifar-100-binary")
        assert data.benchmark(images) == benchmark
        task.data = images
        return (task.published() or {}).get("accuracy")

    return row


def test_the_papers_figures_are_those_of_their_tables(papers_figure):
    assert papers_figure(host="deit_tiny_patch16_224", mixer="padre") == 0.745
    assert papers_figure(host="deit_small_patch16_224", mixer="padre:degree=3") == 0.805
    assert papers_figure(host="deit_base_patch16_224", mixer="padre:degree=3") is None
    assert papers_figure(host="deit_base_patch16_224", mixer="keep") == 0.818, "attention is DeiT's own"
    assert papers_figure(host="xcit_small_12_p16_224", mixer="poly_sa") == 0.8150
    rows = (("swin_tiny_patch4_window7_224", "poly_sa:head_mixing=depthwise", 0.8066), ("cvt_13", "poly_sa", 0.812),
            ("metaformer_s12", "poly_sa:head_mixing=depthwise", 0.7957), ("cvt_13", "keep", 0.823))  # fmt: skip
    assert [papers_figure(host=host, mixer=mixer) for host, mixer, _ in rows] == [figure for *_, figure in rows]
    for size, accuracy in (("nano_12", 0.7127), ("tiny_12", 0.7556), ("small_12", 0.8121), ("medium_24", 0.8070)):
        six = {"host": f"xcit_{size}_p16_224", "mixer": "poly_sa", "host_depth": 6}
        assert papers_figure("CIFAR-100", **six) == accuracy and papers_figure(**six) is None
    assert papers_figure(host="resnet50", mixer="poly_nl:reduction=4") == 0.7630
    assert papers_figure(host="resnet50", mixer="poly_nl:preset=paper") == 0.7630
    assert papers_figure(host="resnet50", mixer="poly_nl") is None, "the block without a bottleneck"
    assert papers_figure(host="resnet50", mixer="padre") is None


@pytest.mark.parametrize("options", [
    {"benchmark": None, "host": "resnet50", "mixer": "poly_nl:reduction=4"}, {"host": "deit_tiny_patch16_224", "mixer": "padre", "host_depth": 4},
    {"host": "deit_tiny_patch16_224", "mixer": "padre", "plan": "1:1"},
    {"host": "deit_tiny_patch16_224", "mixer": "pom", "match_parameters": True}, {"mixer": "padre"},
])  # fmt: skip
def test_a_papers_figure_stands_beside_its_own_data_and_host_alone(papers_figure, options):
    assert papers_figure(**options) is None


def test_a_checkpoint_with_another_number_of_classes_gets_a_fresh_head(imagenet, tmp_path):
    recipe = ClassifyRecipe(data=str(imagenet), image_size=32, patch_size=16, dim=8, depth=1)
    sets = data.load(recipe)
    summary = sets.summary() | {"classes": list(CLASSES[:2])}
    fewer = ClassifyTask(recipe).build(data.from_summary(recipe, summary))
    torch.save(fewer.state_dict(), tmp_path / "model.pt")
    model, said = ClassifyTask(recipe).build(sets), []
    load_weights(model, tmp_path, ClassifyTask.fresh, said.append)
    assert said == [f"Fresh weights for head.weight, head.bias: the shapes in {tmp_path} differ, or it has none"]
    assert torch.equal(model.state_dict()["embed.weight"], fewer.state_dict()["embed.weight"])
    for stream in (True, False):
        with pytest.raises(DataError, match=f"'{CLASSES[2]}'"):
            ClassifyTask(recipe.changed(stream=stream)).for_evaluation(summary, False, None)


def test_streamed_pictures_are_evaluated_whole_or_in_part(imagenet):
    recipe = ClassifyRecipe(data=str(imagenet), image_size=32, stream=True)
    summary = data.load(recipe).summary() | {"classes": ["other", *CLASSES]}
    task = ClassifyTask(recipe)
    assert task.for_evaluation(summary, True, None).counts[1] == 18
    limited = task.for_evaluation(summary, False, 4)
    assert limited.counts[1] == 4 and limited.classes[0] == "other" and limited.test.labels.min() >= 1
