"""DETR against arrays of its authors' code: outputs, loss and gradients from the backbone's maps on, and fresh weights."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from polymix.compat import cure_torchvision
from polymix.domains.detect.recipe import DetectRecipe
from polymix.domains.detect.task import DetectTask
from polymix.errors import OptionError
from polymix.train.data.sampling import seed_all
from tests.helpers import GOLDEN, close, published_host

cure_torchvision()
pytest.importorskip("transformers", reason="untested: DETR")
pytest.importorskip("timm", reason="untested: DETR")

PARTS, OPTIONS = published_host("detr")


def built(mixer="softmax", host="detr", **sizes):
    recipe = DetectRecipe.paper().changed(host=host, mixer=mixer, backbone="test_resnet", image_size=128, **sizes)
    seed_all(0)
    return DetectTask(recipe).build(SimpleNamespace(classes=range(OPTIONS["classes"])))


class Maps(nn.Module):
    """The published maps in place of the backbone's."""

    def forward(self, pixels, mask):
        return [(PARTS["in"]["features"], PARTS["in"]["valid"].bool())]


@pytest.fixture
def detr():
    names = ("dim", "heads", "depth", "feedforward", "queries")
    model = built(**{name: OPTIONS[name] for name in names}).eval()
    model.model.backbone = Maps()
    model.model.input_projection = nn.Conv2d(OPTIONS["channels"], OPTIONS["dim"], 1)
    model.load_state_dict(PARTS["w"])
    return model


def test_published_weights_find_the_published_boxes(detr):
    inputs, out = PARTS["in"], PARTS["out"]
    labels = [{"class_labels": labels, "boxes": boxes} for labels, boxes in
              zip(inputs["labels"].split([2, 1]), inputs["boxes"].split([2, 1]), strict=True)]  # fmt: skip
    answers = detr(torch.zeros(2, 3, 96, 128), torch.ones(2, 96, 128, dtype=torch.long), labels=labels)
    close(answers.logits, out["logits"], 1e-4)
    close(answers.pred_boxes, out["boxes"], 1e-4)
    close(answers.loss, out["loss"], 1e-4)
    answers.loss.backward()
    named = dict(detr.named_parameters())
    for name, gradient in PARTS["grad"].items():
        close(named[name].grad, gradient, 1e-3)


def test_fresh_weights_are_published():
    """transformers starts all of them at a deviation of 0.02, the queries too."""
    model = built(depth=1)
    published = json.loads((GOLDEN / "hosts" / "detr.json").read_text())["fresh_deviations_of_256_channels"]
    encoder, decoder = model.model.encoder.layers[0], model.model.decoder.layers[0]
    pairs = {
        "encoder.layers.0.self_attn.in_proj_weight": encoder.self_attn.mixer.qkv.qkv,
        "encoder.layers.0.self_attn.out_proj.weight": encoder.self_attn.mixer.proj,
        "encoder.layers.0.linear1.weight": encoder.mlp.fc1, "encoder.layers.0.linear2.weight": encoder.mlp.fc2,
        "decoder.layers.0.self_attn.in_proj_weight": decoder.self_attn.k_proj,
        "decoder.layers.0.multihead_attn.in_proj_weight": decoder.encoder_attn.v_proj,
        "decoder.layers.0.multihead_attn.out_proj.weight": decoder.encoder_attn.o_proj,
        "decoder.layers.0.linear1.weight": decoder.mlp.fc1,
    }  # fmt: skip
    for name, layer in pairs.items():
        assert layer.weight.std().item() == pytest.approx(published[name], rel=0.02), name
        bias = published["biases"][name.replace("_weight", "_bias").replace(".weight", ".bias")]
        assert layer.bias.std().item() == pytest.approx(bias, rel=0.1), name
    assert model.model.query_position_embeddings.weight.std().item() == pytest.approx(1, rel=0.02)
    assert model.class_labels_classifier.weight.std().item() == pytest.approx(1 / math.sqrt(3 * 256), rel=0.1)


def test_mixers_start_their_own_way_and_conditional_detr_at_its_points():
    """A mixer took its weights over from attention of a deviation of 0.02."""
    plain = built("pom", dim=32, depth=1, heads=2)
    mixer = plain.model.encoder.layers[0].self_attn.mixer
    seed_all(0)
    own = type(mixer)(mixer.config, 32)
    for name, value in own.named_parameters():
        if value.ndim > 1 and value.std() > 0:
            assert dict(mixer.named_parameters())[name].std().item() == pytest.approx(value.std().item(), rel=0.2), name
    conditional = built(host="conditional_detr", dim=32, depth=1, heads=2)
    probability = conditional.class_labels_classifier.bias.sigmoid()
    torch.testing.assert_close(probability, torch.full_like(probability, 0.01))
    assert not conditional.bbox_predictor.layers[-1].weight.any()
    with pytest.raises(OptionError, match="host_init"):
        DetectRecipe(host_init="published")
