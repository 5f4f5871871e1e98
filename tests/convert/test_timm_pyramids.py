"""timm's XCiT, MetaFormer and EfficientViT converted: attention between channels and on feature maps."""

import pytest
import torch

import polymix
from polymix.mixers import config_class
from tests.convert.checks import (
    MIXERS,
    converts,
    identical,
    near,
    same_as_host,
    stirred,
)  # fmt: skip
from tests.convert.timm_hosts import XCIT_IMAGES, caformer, efficientvit, inside, timm, xcit


def test_xca_is_xcit_and_class_attention_is_left():
    report = same_as_host(xcit(), XCIT_IMAGES, plan="xca")
    assert [layer.name for layer in report.layers] == ["blocks.0.attn", "blocks.1.attn"]
    assert not any(layer.fresh or layer.dropped for layer in report.layers)
    assert report.layers[0].flops[0] == report.layers[0].flops[1], "XCA was counted as softmax attention"
    assert [name.partition(" ")[0] for name in report.left_out] == ["cls_attn_blocks.0.attn", "cls_attn_blocks.1.attn"]
    same_as_host(xcit(), XCIT_IMAGES, plan="xca", input=XCIT_IMAGES)


@pytest.mark.parametrize("mixer", MIXERS)
def test_xcit_learns(mixer):
    report = converts(xcit(), mixer, XCIT_IMAGES)
    assert report.adapters["blocks.0.attn"].prefix == 0, "the class token joins later"
    if mixer == "padre":
        model = report.model.eval()
        wide = torch.randn(1, 3, 32, 96)
        tokens, given = inside(model, "blocks.1.attn", wide)
        identical([given], [model.blocks[1].attn.mixer(tokens, grid=(2, 6))])


@pytest.mark.parametrize("eps", [1e-5, 1e-2])
def test_relu_linear_is_litemla(eps):
    model = efficientvit(norm_layer=lambda num_features, **kw: torch.nn.BatchNorm2d(num_features, eps=eps, **kw))
    report = same_as_host(model, XCIT_IMAGES, plan="relu_linear", input=XCIT_IMAGES)
    assert not any(layer.fresh or layer.dropped for layer in report.layers)
    assert {layer.flops[0] - layer.flops[1] for layer in report.layers} == {0}
    other = polymix.convert(model, config_class("relu_linear")(scales=(3,)), copy=True, input=XCIT_IMAGES)
    assert other.layers[0].fresh and not other.layers[0].inherited, "weights went to other scales"


@pytest.mark.parametrize("mixer", MIXERS)
def test_efficientvit_learns(mixer):
    report = converts(efficientvit(), mixer, XCIT_IMAGES, input=XCIT_IMAGES)
    assert "proj.conv.weight[smoothed]" in report.layers[0].dropped
    if mixer == "qt":
        assert report.layers[0].inherited["qkv.qkv.weight"] == tuple(
            f"qkv.conv.weight[{part}]" for part in ("query", "key", "value")
        )
        assert report.layers[0].error < 1.0


def test_what_qt_takes_of_litemla_are_its_own_projections():
    model = stirred(efficientvit(), 0.3).eval()
    layer = dict(model.named_modules())["stages.2.blocks.1.context_module.main"]
    x = torch.randn(2, 16, 3, 5)
    with torch.no_grad():
        q, k, v = layer.qkv(x).reshape(2, 2, 24, 15).transpose(2, 3).chunk(3, dim=-1)
        values = v.transpose(2, 3).reshape(2, 16, 3, 5)
        plain = layer.proj(torch.cat((values, torch.zeros_like(values)), dim=1))
        mixer = polymix.convert(model, "qt", input=None).adapters["stages.2.blocks.1.context_module.main"].mixer
        mine = mixer.qkv(tokens := x.flatten(2).transpose(1, 2), tokens)
        near([part.transpose(1, 2) for part in mine], [q, k, v])
        near([mixer.proj(mine[2].flatten(2))], [plain.flatten(2).transpose(1, 2)])


def test_pyramids_of_any_size():
    for model, layer, images in (
        (caformer(), "stages.1.blocks.1.token_mixer", torch.randn(1, 3, 24, 56)),
        (efficientvit(), "stages.2.blocks.1.context_module.main", torch.randn(1, 3, 48, 96)),
    ):
        report = polymix.convert(stirred(model).eval(), "padre", input=torch.randn(1, 3, 64, 64))
        x, given = inside(report.model, layer, images)
        grid = (3, 7) if x.ndim == 3 else tuple(x.shape[2:])
        mixed = report.adapters[layer].mixer(x if x.ndim == 3 else x.flatten(2).transpose(1, 2), grid=grid)
        identical([given], [mixed if x.ndim == 3 else mixed.transpose(1, 2).reshape(x.shape)])


def test_the_grid_of_a_stage_comes_from_what_timm_says():
    report = polymix.convert(
        timm.create_model("efficientvit_b0", num_classes=3), {"stages.2.blocks.1.context_module.main": "padre"}
    )
    assert report.adapters["stages.2.blocks.1.context_module.main"].mixer.config.grid == (14, 14)
