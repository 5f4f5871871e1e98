"""SegFormer against arrays of its authors' code: logits, gradients and fresh weights."""

import json

import pytest
from torch.nn.functional import interpolate

from polymix.compat import cure_torchvision
from polymix.domains.segment import hosts
from polymix.domains.segment.recipe import SegmentRecipe
from polymix.errors import OptionError
from polymix.train.data.sampling import seed_all
from tests.helpers import GOLDEN, close, published_host

cure_torchvision()
pytest.importorskip("transformers", reason="untested: SegFormer")

PARTS, OPTIONS = published_host("segformer")


def test_published_weights_give_the_published_logits(monkeypatch):
    sizes = tuple(OPTIONS["channels"]), tuple(OPTIONS["depths"]), OPTIONS["decoder"]
    monkeypatch.setitem(hosts.SIZES, "tiny", sizes)
    model = hosts.build(SegmentRecipe(host="segformer", size="tiny", mixer="keep", crop=64), OPTIONS["classes"]).eval()
    counters = {name: value for name, value in model.state_dict().items() if name.endswith("num_batches_tracked")}
    model.load_state_dict({**counters, **PARTS["w"]})
    logits = model(PARTS["in"]["images"])
    close(logits, interpolate(PARTS["out"]["logits"], (64, 64), mode="bilinear"), 1e-5)
    logits.square().mean().backward()
    named = dict(model.named_parameters())
    for name, gradient in PARTS["grad"].items():
        close(named[name].grad, gradient, 1e-4)


def test_fresh_weights_are_published():
    """transformers starts convolutions and the head at a deviation of 0.02 too."""
    seed_all(0)
    recipe = SegmentRecipe.paper().changed(mixer="keep", crop=32, short_side=32)
    named = dict(hosts.build(recipe, 150).named_parameters())
    published = json.loads((GOLDEN / "hosts" / "segformer.json").read_text())["fresh_deviations_of_b0"]
    assert len(published) > 12
    for name, deviation in published.items():
        assert named[name].std().item() == pytest.approx(deviation, rel=0.06), name
    with pytest.raises(OptionError, match="host_init"):
        SegmentRecipe(host_init="published")
