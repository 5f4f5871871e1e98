"""EfficientViT and EfficientViT-Seg against arrays of their authors' code: logits, gradients, rates of dropped branches."""

import json

import pytest
import torch

from polymix.compat import cure_torchvision
from polymix.domains.classify.recipe import ClassifyRecipe
from polymix.domains.classify.task import ClassifyTask
from polymix.domains.segment import hosts
from polymix.domains.segment.recipe import SegmentRecipe
from tests.helpers import GOLDEN, close, published_host

cure_torchvision()
timm = pytest.importorskip("timm", reason="untested: EfficientViT")

PARTS, OPTIONS = published_host("efficientvit")
PUBLISHED = json.loads((GOLDEN / "hosts" / "efficientvit.json").read_text("utf-8"))
SIZES = {name: tuple(OPTIONS[name]) for name in ("widths", "depths")} | {"head_dim": OPTIONS["head_dim"]}


def loaded(model, weights):
    model.load_state_dict(weights | {k: v for k, v in model.state_dict().items() if k.endswith("num_batches_tracked")})
    for part in model.modules():
        if type(part).__name__ == "LiteMLA":
            assert part.eps == 1e-5, "all that timm's network has of its own"
            part.eps = 1e-15
    return model.double().eval()


def test_the_host_is_the_published_network():
    import polymix.timm as ours

    widths = tuple(OPTIONS["head_widths"])
    model = ours.create("keep", "efficientvit_b0", head_widths=widths, num_classes=OPTIONS["classes"], **SIZES)
    model = loaded(model, PARTS["backbone"] | PARTS["cls"])
    logits = model(PARTS["in"]["images"].double())
    close(logits, PARTS["out"]["cls"], 1e-6)
    logits.square().mean().backward()
    named = dict(model.named_parameters())
    for name, gradient in PARTS["cls_grad"].items():
        close(named[name].grad, gradient, 1e-5)


@pytest.mark.parametrize(("data", "widen"), [("cityscapes", 4), ("ade20k", None)])
def test_the_segmenter_is_the_published_network(monkeypatch, data, widen):
    """Maps and logits are enlarged bicubically; on ADE20K no layer widens the head before the classes."""
    backbone = timm.create_model("efficientvit_b0", features_only=True, out_indices=(1, 2, 3), **SIZES)
    monkeypatch.setattr(hosts, "_backbone", lambda name: (backbone, backbone.feature_info.channels()))
    sizes = {name: OPTIONS[name] for name in ("head_width", "head_depth", "head_expand")}
    recipe = SegmentRecipe(host="efficientvit", mixer="keep", crop=64, head_widen=widen, **sizes)
    model, names = hosts.build(recipe, OPTIONS["classes"]), [f"backbone.{name}" for name in backbone.state_dict()]
    weights = {f"backbone.{name.replace('stages.', 'stages_').replace('stem.', 'stem_')}": value
               for name, value in PARTS["backbone"].items()}  # fmt: skip
    assert set(weights) <= set(names)
    model = loaded(model, weights | {f"head.{name}": value for name, value in PARTS[data].items()})
    images = PARTS["in"]["images"].double()
    logits = model.head(model.backbone(images))
    close(logits, PARTS["out"][data], 1e-6)
    close(model(images)[:, :, ::4, ::4], PARTS["out"][f"{data}_whole"], 1e-6)
    logits.square().mean().backward()
    named = dict(model.head.named_parameters())
    for name, gradient in PARTS[f"{data}_grad"].items():
        close(named[name].grad, gradient, 1e-5)


def test_branches_are_dropped_at_the_published_rates():
    """Those of the stages; the stem's is never dropped."""
    import polymix.timm as ours

    rates = PUBLISHED["drop_path_of_b1"]
    with torch.device("meta"):
        model = ours.create("keep", "efficientvit_b1", drop_path_rate=0.05)
    hooks = [hook.drop_prob for part in model.modules() for hook in part._forward_hooks.values()]
    assert hooks == pytest.approx(rates)


def test_the_rates_rise_from_nothing_after_the_warm_up_as_published():
    """RunConfig.progress of the authors' code, with which each rate is multiplied."""
    import polymix.timm as ours

    recipe = ClassifyRecipe().preset("efficientvit").changed(steps=320)
    task = ClassifyTask(recipe)
    with torch.device("meta"):
        model = ours.create("keep", "efficientvit_b1", drop_path_rate=recipe.drop_path)
    drops = ours.dropping(model)
    for step, share in PUBLISHED["progress_after_epochs"].items():
        task.advance(model, int(step))
        rates = [share * rate for rate in PUBLISHED["drop_path_of_b1"]]
        assert [drop.drop_prob for drop in drops] == pytest.approx(rates)


def test_a_run_that_ends_with_its_warm_up_drops_no_branch():
    """Nothing is left of it in which the rates could rise."""
    import polymix.timm as ours

    task = ClassifyTask(ClassifyRecipe().preset("efficientvit").changed(steps=4, warmup=0.9))
    with torch.device("meta"):
        model = ours.create("keep", "efficientvit_b1", drop_path_rate=0.05)
    task.advance(model, 3)
    assert {drop.drop_prob for drop in ours.dropping(model)} == {0.0}
