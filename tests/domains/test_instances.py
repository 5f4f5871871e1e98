"""Instance segmentation: Mask R-CNN with a mixer in its backbone, from data to masks."""

import io
import json
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from polymix.compat import cure_torchvision
from polymix.domains.instances import task
from polymix.domains.instances.recipe import InstancesRecipe
from polymix.domains.instances.task import InstancesTask
from polymix.errors import DataError, OptionError, ResultsError
from polymix.train.data.boxes.masks import decode
from polymix.train.initial import load_weights
from polymix.train.run import train
from polymix.train.saved import SavedRun
from tests.domains.box_files import entry, write_coco

cure_torchvision()
torchvision = pytest.importorskip(
    "torchvision", reason="untested: Mask R-CNN, for which torchvision is needed (the detection extra)"
)


def build(recipe, classes):
    return InstancesTask(recipe).build(SimpleNamespace(classes=range(classes)))


def load(recipe, folder):
    return InstancesTask(recipe).load(folder)


def check(source, layout=None):
    return InstancesTask(InstancesRecipe(data=str(source), layout=layout)).problems(str(source))


@pytest.mark.slow
def test_a_run_measures_masks_and_predicts_them(tmp_path):
    train(InstancesRecipe.tiny().changed(control=False), tmp_path / "run")
    row = json.loads((tmp_path / "run" / "results.json").read_text())["rows"][0]
    assert row["task"] == "instances" and row["mixer"] == "poly_nl:reduction=4"
    assert {"mask_AP", "AP"} <= set(row["metrics"]) and (tmp_path / "run" / "samples.png").exists()
    saved = SavedRun.of(tmp_path / "run")
    loaded = saved.load()
    assert "backbone.body.layer3.1.inserted_before" in "".join(loaded.state_dict())
    picture = next((tmp_path / "run" / "data").glob("digits-*/val/*.png"))
    predictions = saved.changed(["threshold=0"]).predict([picture], tmp_path)
    assert (tmp_path / predictions[0]["picture"]).exists()
    assert all(decode(thing["mask"], 64, 64).shape == (64, 64) for thing in predictions[0]["objects"])


def test_objects_without_a_mask_are_named(tmp_path):
    folder = write_coco(tmp_path, annotations=entry(0))
    with pytest.raises(DataError, match=r"b.png: 1 of 2 objects: has no segmentation"):
        load(InstancesRecipe(data=str(folder), image_size=64), tmp_path)
    data = load(InstancesRecipe(data=str(folder), image_size=64, broken="skip"), tmp_path)
    assert data.train[1][1]["masks"].shape == (1, 64, 64)


def test_the_preset_of_the_paper_is_torchvisions_reference(monkeypatch):
    recipe = InstancesRecipe.paper().changed(data="coco")
    assert (recipe.batch_size, recipe.learning_rate, recipe.weight_decay, recipe.epochs) == (16, 0.02, 1e-4, 26)
    assert (recipe.decay, recipe.clip, recipe.ema, recipe.optimizer) == ("all", None, 0.0, "sgd")
    assert recipe.sizes == {"size": 1344, "short": 800, "long": 1333} and recipe.flip and not recipe.crops
    with torch.device("meta"):
        ours = build(recipe.changed(mixer="none"), 90)
        theirs = torchvision.models.detection.maskrcnn_resnet50_fpn(weights=None, weights_backbone=None)
        frozen = build(recipe.changed(init="run", mixer="none"), 90)
    shapes = [{name: value.shape for name, value in m.state_dict().items()} for m in (ours, theirs)]
    assert shapes[0] == shapes[1]
    settings = [
        {f"{part}.{name}": value for part in ("rpn", "roi_heads") for name, value in vars(getattr(m, part)).items()
         if isinstance(value, (int, float, dict)) and not name.startswith("_")} for m in (ours, theirs)
    ]  # fmt: skip
    assert settings[0] == settings[1]
    assert vars(ours.roi_heads.fg_bg_sampler) == vars(theirs.roi_heads.fg_bg_sampler)
    assert ours.rpn._pre_nms_top_n == theirs.rpn._pre_nms_top_n
    assert ours.rpn._post_nms_top_n == theirs.rpn._post_nms_top_n
    assert ours.rpn.anchor_generator.sizes == theirs.rpn.anchor_generator.sizes
    learns = [name for name, value in frozen.backbone.body.named_parameters() if value.requires_grad]
    assert learns and all(name.startswith(("layer2", "layer3", "layer4")) for name in learns)
    assert InstancesTask(recipe).published() is None, "no folder of COCO"
    monkeypatch.setattr(task, "is_coco_2017", lambda folder: folder is not None)
    assert InstancesTask(recipe).published()["AP"] == 0.392 and InstancesTask(InstancesRecipe()).published() is None
    assert InstancesTask(recipe.changed(backbone="resnet18")).published() is None


def test_rates_of_the_preset_rise_and_fall_twice():
    trained = InstancesTask(InstancesRecipe.paper().changed(steps=26, warmup=2 / 26))
    optimizer, rates = trained.optimizer(torch.nn.Linear(2, 2)), []
    schedule = trained.schedule(optimizer)
    for _ in range(26):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert type(optimizer).__name__ == "SGD" and optimizer.defaults["momentum"] == 0.9
    assert rates == pytest.approx([0.01, *[0.02] * 15, *[0.002] * 6, *[0.0002] * 4])
    with pytest.raises(OptionError, match="milestones"):
        InstancesRecipe(milestones=(2,))
    with pytest.raises(OptionError, match="rising"):
        InstancesRecipe(milestones=(0.8, 0.6))


def test_a_run_starts_from_a_detector_of_other_classes_without_a_block(tmp_path):
    def small(classes, **options):
        return build(InstancesRecipe(image_size=32, **options), classes)

    torch.manual_seed(0)
    before = small(3, mixer="none")
    torch.save(before.state_dict(), tmp_path / "model.pt")
    after, said = small(1, init=str(tmp_path)), []
    load_weights(after, tmp_path, InstancesTask.fresh, said.append)
    theirs, ours = before.state_dict(), after.state_dict()
    shared = [name for name in ours if name in theirs and not name.startswith(InstancesTask.fresh)]
    assert len(shared) > 100 and all(torch.equal(theirs[name], ours[name]) for name in shared)
    fresh = {name for name in ours if name not in shared}
    assert fresh and all(name.startswith(InstancesTask.fresh) for name in fresh) and "inserted" in said[0]
    with pytest.raises(ResultsError, match="init"):
        load_weights(small(1, backbone="resnet50"), tmp_path, InstancesTask.fresh)


@pytest.mark.parametrize(("options", "mixer"), [
    ({"backbone": "qt_vit_b0"}, "QtMixer"), ({"backbone": "efficientvit_b0", "mixer": "linear_floor"}, "LinearFloorMixer"),
    ({"backbone": "efficientvit_b0", "mixer": "none"}, None), ({"backbone": "convnext_atto", "mixer": "none"}, None),
])  # fmt: skip
def test_a_backbone_of_timm_has_the_mixer_in_attentions_place_and_learns(options, mixer):
    pytest.importorskip("timm", reason="untested: backbones of timm")
    recipe = InstancesRecipe.tiny().changed(image_size=64, layers=(1, 2, 3, 4), **options)
    trained = InstancesTask(recipe)
    model = build(recipe, 2)
    kinds = {type(part).__name__ for part in model.backbone.body.modules() if "Mixer" in type(part).__name__}
    assert kinds == ({mixer} if mixer else set()) and not any("inserted" in n for n, _ in model.named_parameters())
    target = {"boxes": torch.tensor([[4.0, 8, 24, 32]]), "labels": torch.tensor([1]), "iscrowd": torch.tensor([False]),
              "masks": torch.ones(1, 64, 64, dtype=torch.bool)}  # fmt: skip
    images = torch.randint(0, 255, (2, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    trained.loss(model, (images, [target, target])).backward()
    still = [name for name, value in model.backbone.body.named_parameters() if value.grad is None]
    assert not still, "a part of the backbone that no map reads"
    assert trained.host_name(model) == f"Mask R-CNN, {recipe.backbone}" and trained.published() is None


def test_with_weights_the_start_and_the_norms_of_a_backbone_of_timm_are_frozen():
    pytest.importorskip("timm", reason="untested: backbones of timm")
    for layers in ((1, 2, 3, 4), (2, 3)):
        model = build(InstancesRecipe(backbone="qt_vit_b0", init="run", layers=layers), 2)
        learns = {name.split(".")[0]: value.requires_grad for name, value in model.backbone.body.named_parameters()}
        assert learns == {"stem_in_conv": False, "stem_res0": False, "stages_0": False, "stages_1": True,
                          "stages_2": True, **({"stages_3": True} if 4 in layers else {})}  # fmt: skip
    assert not any(isinstance(part, torch.nn.BatchNorm2d) for part in model.backbone.body.modules())


@pytest.mark.parametrize(("mixer", "sees"), [("none", False), ("linear_floor", False), ("poly_nl:reduction=4", True)])
def test_only_a_mixer_shows_the_digits_the_bar(mixer, sees):
    """By default convolutions alone reach the bar with less than a hundredth of what they see of their surroundings."""
    torch.manual_seed(0)
    recipe = InstancesRecipe(mixer=mixer)
    side, maps = recipe.image_size, build(recipe, 2).backbone.eval()
    image = torch.randn(1, 3, side, side, requires_grad=True)
    levels = [level for name, level in maps(image).items() if name != "pool"]
    torch.stack([level[..., 3 * level.shape[-1] // 4 :].square().sum() for level in levels]).sum().backward()
    bar, surroundings = (
        image.grad[..., columns].abs().mean().item() for columns in (slice(side // 8), slice(-40, None))
    )
    assert (bar > 0.01 * surroundings) is sees, (bar, surroundings)


@pytest.mark.parametrize("mixer", ["poly_nl:reduction=4", "gc", "se"])
def test_a_block_adds_nothing_at_first_to_trained_weights_and_something_to_fresh_ones(mixer):
    factors = {}
    for init in (None, "run"):
        block = build(InstancesRecipe(mixer=mixer, image_size=64, init=init), 2).backbone.body.layer3[1].inserted_before
        factors[init] = block.mixer.beta.item() if "poly_nl" in mixer else getattr(block.scale, "item", lambda: None)()
    assert factors == ({None: None, "run": None} if mixer == "se" else {None: 1, "run": 0}), "s; a gate has none"


def test_layers_and_channels_are_those_of_the_pyramid_and_the_heads():
    model = build(InstancesRecipe(layers=(2, 3), channels=16, image_size=64), 2).eval()
    maps = model.backbone(torch.zeros(1, 3, 64, 64))
    assert [(name, *level.shape[1:]) for name, level in maps.items()] == [
        ("1", 16, 8, 8),
        ("2", 16, 4, 4),
        ("pool", 16, 2, 2),
    ]
    assert model.roi_heads.box_head.fc6.in_features == 49 * 16 and not hasattr(model.backbone.body, "layer4")
    with pytest.raises(OptionError, match="1,2,3,4 or 2,3"):
        InstancesRecipe(layers=(3,))
    with pytest.raises(OptionError, match="no effect"):
        InstancesRecipe(detector="published", channels=32)


def test_a_backbone_that_does_not_fit_is_refused_before_data_are_read():
    pytest.importorskip("timm", reason="untested: backbones of timm")
    for options, argument, words in (
        ({"backbone": "resnet999"}, "backbone", "name of a model"),
        ({"backbone": "deit_tiny_patch16_224", "mixer": "none"}, "backbone", "strides 16, 16, 16"),
        ({"backbone": "qt_vit_b0", "mixer": "pom"}, "mixer", "qt"),
        ({"backbone": "test_resnet", "mixer": "pom"}, "model", "attention"),
    ):
        with pytest.raises(OptionError, match=words) as caught:
            InstancesTask(InstancesRecipe().changed(**options)).check()
        assert caught.value.argument.strip("`") == argument


def write_nuclei(path, labels, size=(128, 128)):
    """A wheel with stardist's two pictures."""
    with zipfile.ZipFile(path, "w") as wheel:
        for name, values in (("img2d.tif", (labels > 0) * 180 + 8), ("mask2d.tif", labels)):
            file = io.BytesIO()
            Image.frombytes("I;16", size, values.astype("<u2").tobytes()).save(file, "TIFF")
            wheel.writestr(f"stardist/data/images/{name}", file.getvalue())
    return path


def test_nuclei_of_a_wheel_are_crops_left_and_right(tmp_path):
    labels = np.zeros((128, 128), int)
    labels[4:14, 4:12], labels[40:52, 100:112], labels[70:74, 94:98] = 7, 9, 11  # the last is cut into two columns
    wheel = write_nuclei(tmp_path / "stardist.whl", labels)
    recipe = InstancesRecipe(data=str(wheel), image_size=32)
    loaded = load(recipe, tmp_path / "crops")
    assert loaded.classes == ("nucleus",) and loaded.name == "the nuclei of stardist.whl"
    assert (len(loaded.train), len(loaded.test)) == (13 * 9, 4)
    assert [len(picture.objects) for picture in loaded.test.pictures.pictures] == [0, 1, 0, 0]
    assert loaded.test[1][1]["masks"].sum() == 144 and loaded.test[1][1]["boxes"].tolist() == [[4, 8, 16, 20]]
    assert loaded.train[0][1]["masks"].sum() == 80 and loaded.train[0][0].max() > 2 * loaded.train[0][0].float().mean()
    again = InstancesTask(recipe).for_evaluation(loaded.summary(), False, None)
    assert again.test[1][1]["masks"].sum() == 144
    assert check(wheel) == [] == check(str(wheel), "nuclei")
    with pytest.raises(DataError, match="at most 32"):
        load(InstancesRecipe(data=str(wheel), image_size=48), tmp_path / "crops")


def test_mistakes_in_the_wheel_are_named(tmp_path):
    empty = write_nuclei(tmp_path / "empty.whl", np.zeros((128, 128), int))
    assert check(empty) == [f"{empty}: mask2d.tif without a nucleus"]
    other = tmp_path / "other.whl"
    with zipfile.ZipFile(other, "w") as wheel:
        wheel.writestr("code.py", "")
    (tmp_path / "no.whl").write_text("no wheel")
    for path in (other, tmp_path / "no.whl", tmp_path / "missing.whl"):
        (line,) = check(path)
        assert line.startswith(f"{path}, whose img2d.tif cannot be read (")
    with pytest.raises(DataError, match="pip download stardist --no-deps"):
        load(InstancesRecipe(data=str(other)), tmp_path)
