"""polymix.timm: models with mixers in timm's registry."""

import copy
import re
from pathlib import Path

import pytest
import torch

import polymix
from polymix.compat import cure_torchvision
from polymix.errors import OptionError

cure_torchvision()
import timm  # noqa: E402

import polymix.timm as ours  # noqa: E402

SMALL = {"embed_dim": 32, "depth": 2, "num_heads": 2}  # of vision transformers
TINY = {"widths": (8, 16, 16, 32, 32), "depths": (1, 1, 1, 1, 1), "head_dim": 8, "head_widths": (32, 32)}


def test_names_follow_the_rule():
    names = ours.names()
    assert names["padre2_deit_tiny_patch16_224"] == ("padre-2", "deit_tiny_patch16_224", False)
    assert names["padre3_deit_small_patch16_224"] == ("padre-3", "deit_small_patch16_224", False)
    assert names["qt_vit_b1"] == ("qt", "efficientvit_b1", False)
    assert names["poly_sa_xcit_small_12"] == ("poly_sa", "xcit_small_12_p16_224", False)
    assert names["pom_deit_tiny_patch16_224_matched"] == ("pom", "deit_tiny_patch16_224", True)
    assert names["poly_nl_resnet50"] == ("poly_nl:reduction=4", "resnet50", False)
    assert all(timm.is_model(host) for _, host, _ in names.values())
    assert set(names) <= set(timm.list_models())
    assert set(timm.list_models("padre*")) == {name for name in names if name.startswith("padre")}
    assert {f"qt_vit_{size}" for size in ("b0", "b1", "b2", "b3", "l1", "l2")} <= set(timm.list_models("qt_vit*"))
    assert not set(names) & set(timm.list_models(pretrained=True))


@pytest.mark.parametrize(("name", "options"), [
    ("padre2_deit_tiny_patch16_224", SMALL), ("pom_deit_tiny_patch16_224_matched", SMALL),
    ("poly_sa_xcit_small_12", SMALL), ("qt_vit_b1", TINY), ("padre3_efficientvit_b0", TINY), ("poly_nl_resnet50", {}),
])  # fmt: skip
def test_timm_creates_models_with_its_own_options(name, options):
    model = timm.create_model(name, num_classes=7, img_size=64, in_chans=1, drop_path_rate=0.5, **options)
    assert model.pretrained_cfg["architecture"] == name
    assert tuple(model.pretrained_cfg["input_size"][1:]) == (64, 64) or "embed_dim" in options
    images = torch.randn(4, 1, 64, 64)
    copied = copy.deepcopy(model)
    torch.manual_seed(0)
    first = model(images)
    assert first.shape == (4, 7)
    branches_start_at_zero = "resnet" in name
    assert branches_start_at_zero or not torch.equal(first, model(images)), "no branch was dropped in training"
    model.eval(), copied.eval()
    assert torch.equal(model(images), model(images))
    copied.load_state_dict(model.state_dict())
    assert timm.data.resolve_data_config({}, model=model)["mean"] == tuple(model.pretrained_cfg["mean"])


@pytest.mark.parametrize(("name", "mixer", "layers"), [("metaformer_s12", "pom", 8), ("cvt_13", "padre", 13)])
def test_hosts_of_our_own_take_timms_options_and_mixers(name, mixer, layers):
    own = timm.create_model(name, num_classes=7, in_chans=1, drop_path_rate=0.5)
    assert own.pretrained_cfg["mean"] == timm.data.IMAGENET_DEFAULT_MEAN and own.pretrained_cfg["architecture"] == name
    model = ours.create(mixer, name, num_classes=7, in_chans=1, img_size=64, drop_path_rate=0.5)
    assert sum(type(part).__name__ == f"{mixer.capitalize()}Mixer" for part in model.modules()) == layers
    images = torch.randn(4, 1, 64, 64)
    for host in (own, model):
        torch.manual_seed(0)
        first = host(images)
        assert first.shape == (4, 7) and not torch.equal(first, host(images)), "no branch was dropped in training"
        assert torch.equal(host.eval()(images), host(images)), "batch norm or dropped branches in use"


def test_a_plan_counts_the_layers_of_cvt_through_its_stages():
    model = ours.create("padre", "cvt_13", plan="1:1", img_size=64)
    kinds = [type(getattr(part, "mixer", part)).__name__ for name, part in model.named_modules()
             if name.endswith(".attention") and name.count(".") == 6]  # fmt: skip
    assert kinds == ["PadreMixer", "CvtAttention"] * 6 + ["PadreMixer"]


@pytest.mark.parametrize("name", ["padre2_deit_tiny_patch16_224", "qt_vit_b0"])
def test_models_are_saved_and_loaded(name, tmp_path):
    """Saved as the host whose layers the recipe replaces: the name's own model has none left to replace."""
    model = timm.create_model(name, **(SMALL if "deit" in name else TINY), num_classes=3).eval()
    polymix.save_pretrained(model, tmp_path / "saved")
    loaded, x = polymix.load_pretrained(tmp_path / "saved").eval(), torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        assert torch.equal(loaded(x), model(x))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # timm leaves its pictures open
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize(("name", "sizes"), [
    ("padre2_deit_tiny_patch16_224", SMALL), ("qt_vit_b1", TINY), ("poly_sa_xcit_small_12", SMALL),
])  # fmt: skip
def test_models_take_the_parts_of_timms_train_and_validate_scripts(name, sizes, tmp_path):
    """In the order of timm's scripts: model, data settings, optimizer, loaders, mixup, schedule, steps, a checkpoint."""
    from PIL import Image
    from timm.data import Mixup, create_dataset, create_loader, resolve_data_config
    from timm.loss import SoftTargetCrossEntropy
    from timm.models import load_checkpoint
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2
    from timm.utils import ModelEmaV3, accuracy

    for part in ("train", "validation"):
        for label in ("n01", "n02"):
            (tmp_path / part / label).mkdir(parents=True)
            for shade in range(2):
                Image.new("RGB", (70, 50), (60 * shade, 90, 20)).save(tmp_path / part / label / f"{shade}.jpg")
    options = {"num_classes": 2, "img_size": 64, "drop_path_rate": 0.1, **sizes}
    model = timm.create_model(name, **options)
    config = resolve_data_config({"input_size": (3, 64, 64)}, model=model)
    shared = {key: config[key] for key in ("input_size", "interpolation", "mean", "std", "crop_pct")}
    loaders = [create_loader(create_dataset("", str(tmp_path), split=part, is_training=training, batch_size=4), batch_size=4,
                             is_training=training, use_prefetcher=False, num_workers=0, **shared,
                             # m9 may draw 10, where timm 1.0.31 asks for pictures of 0 bits, which Pillow 13 refuses
                             **({"auto_augment": "rand-m6-mstd0.5-inc1", "re_prob": 0.25} if training else {}))
               for part, training in (("train", True), ("validation", False))]  # fmt: skip
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    schedule, epochs = create_scheduler_v2(optimizer, num_epochs=2, warmup_epochs=1)
    average, mix = ModelEmaV3(model, decay=0.5), Mixup(0.8, 1.0, num_classes=2)
    before = copy.deepcopy(average.module.state_dict())
    for epoch in range(epochs):
        for images, labels in loaders[0]:
            mixed, targets = mix(images, labels)
            loss = SoftTargetCrossEntropy()(model(mixed), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            average.update(model)
        schedule.step(epoch + 1)
    assert loss.isfinite() and any(
        not torch.equal(before[key], value) for key, value in average.module.state_dict().items()
    )
    torch.save({"state_dict": model.state_dict()}, tmp_path / "last.pth.tar")
    again = timm.create_model(name, **options).eval()
    load_checkpoint(again, str(tmp_path / "last.pth.tar"))
    with torch.no_grad():
        images, labels = next(iter(loaders[1]))
        assert torch.equal(again(images), model.eval()(images)) and 0 <= accuracy(again(images), labels)[0] <= 100


def test_the_rate_of_dropped_branches_rises_from_the_first_branch_to_the_last():
    model = timm.create_model("efficientvit_b0", **TINY)
    expected = sum(isinstance(m, timm.models.efficientvit_mit.ResidualBlock) and m.shortcut is not None
                   for m in model.stages.modules())  # fmt: skip
    model = timm.create_model("qt_vit_b0", drop_path_rate=0.3, **TINY)
    hooks = [hook.drop_prob for m in model.modules() for hook in m._forward_hooks.values()
             if isinstance(hook, ours.StochasticDepth)]  # fmt: skip
    assert hooks == pytest.approx([0.3 * place / expected for place in range(1, expected + 1)])
    module, output = torch.nn.Identity(), torch.ones(2000, 1, 1, 1)
    torch.manual_seed(0)
    dropped = ours.StochasticDepth(0.3)(module, (), output)
    assert sorted(dropped.unique().tolist()) == pytest.approx([0, 1 / 0.7])
    assert (dropped == 0).float().mean() == pytest.approx(0.3, abs=0.04)


def test_matched_models_have_the_parameters_of_attention():
    count = lambda model: sum(p.numel() for p in model.parameters())  # noqa: E731
    sizes = {"embed_dim": 64, "depth": 2, "num_heads": 2, "img_size": 64}
    attention = count(timm.create_model("deit_tiny_patch16_224", **sizes))
    plain = count(timm.create_model("pom_deit_tiny_patch16_224", **sizes))
    by_name = count(timm.create_model("pom_deit_tiny_patch16_224_matched", **sizes))
    by_option = count(timm.create_model("pom_deit_tiny_patch16_224", match="parameters", **sizes))
    assert by_name == by_option == pytest.approx(attention, rel=0.01)
    assert plain != pytest.approx(attention, rel=0.02)


@pytest.mark.parametrize(("name", "options", "argument"), [
    ("qt_vit_b1", {"pretrained": True}, "pretrained"), ("qt_vit_b1", {"img_size": 50}, "img_size"),
    ("poly_nl_resnet50", {"match": "parameters"}, "match"), ("qt_vit_b1", {"match": "depth"}, "match"),
    ("qt_vit_b1", {"drop_path_rate": 1.5}, "drop_path_rate"),
])  # fmt: skip
def test_errors_come_before_the_model(name, options, argument):
    with pytest.raises(OptionError) as caught:
        timm.create_model(name, **options)
    assert caught.value.argument == argument


def test_a_host_that_timm_does_not_know():
    with pytest.raises(OptionError, match="host"):
        ours.create("pom", "deit_tinny")


def test_the_docs_list_every_mixer_and_host():
    text = (Path(__file__).parents[1] / "docs" / "convert" / "timm.md").read_text("utf-8")
    named = set(re.findall(r"`([a-z0-9_]+)`", text))
    assert set(ours.MIXERS) | set(ours.HOSTS) | set(ours.INSERTED) <= named
