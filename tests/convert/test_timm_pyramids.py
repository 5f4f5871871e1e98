"""timm's XCiT, MetaFormer and EfficientViT converted: attention between channels and on feature maps."""

import pytest
import torch

import polymix
from polymix.errors import OptionError
from polymix.mixers import config_class
from tests.convert.checks import (
    MIXERS,
    converts,
    identical,
    near,
    refuses,
    same_as_host,
    stirred,
    survives,
    undoes,
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
    assert set(other.layers[0].inherited) == {"norm.weight", "norm.bias"}, "weights went to other scales"
    assert other.layers[0].fresh


LITE = "stages.2.blocks.1.context_module.main"


@pytest.mark.parametrize("mixer", MIXERS)
def test_efficientvit_learns(mixer):
    report = converts(efficientvit(), mixer, XCIT_IMAGES, input=XCIT_IMAGES)
    layer = report.layers[0]
    assert layer.inherited["norm.weight"] == ("proj.norm.weight",), "the norm is no part of the adapter"
    smoothed = {"proj.conv.weight[smoothed 1]", "aggreg.0.0.weight", "aggreg.0.1.weight"}
    if mixer == "qt":
        assert not layer.dropped and layer.error < 1.0
        assert layer.inherited["qkv.qkv.weight"] == tuple(
            f"qkv.conv.weight[{part}]" for part in ("query", "key", "value")
        )
        assert "starts from proj.norm, qkv.conv[query]" in str(report) and "aggreg.0.0" in str(report)
    else:
        assert set(layer.dropped) >= smoothed
        assert "discards" in str(report)


def quadratic(q, k, v, form):
    """QT written out by pairs, for queries, keys and values (B, h, N, d)."""
    d = q.shape[-1]
    s = q @ k.transpose(-1, -2) / d**0.5
    square = s.square() / 2 if form == "full" else q.square() @ k.square().transpose(-1, -2)
    weight = 1 + (s if form == "full" else 2 * s) + square
    return (weight @ v) / weight.sum(-1, keepdim=True)


@pytest.mark.parametrize("form", ["compact", "full"])
def test_qt_replaces_the_kernel_of_litemla_alone(form):
    """All branches, all heads and the norm are timm's; only the similarity is another."""
    model = stirred(efficientvit(), 0.3).double().eval()
    layer, x = model.get_submodule(LITE), torch.randn(2, 16, 3, 5, dtype=torch.float64)
    report = polymix.convert(model, f"qt:form={form}", copy=True)
    with torch.no_grad():
        qkv = layer.qkv(x)
        every = torch.cat([qkv, *(branch(qkv) for branch in layer.aggreg)], 1)
        q, k, v = every.reshape(2, -1, 24, 15).transpose(-1, -2).chunk(3, dim=-1)
        assert q.shape[1] == 4, "two heads for each of two scales"
        y = quadratic(q, k, v, form).transpose(-1, -2).reshape(2, -1, 3, 5)
        near([report.model.get_submodule(LITE)(x)], [layer.proj(y)], 1e-12)


def test_qt_without_branches_has_the_projections_of_the_plain_tokens():
    model = stirred(efficientvit(), 0.3).double().eval()
    layer, x = model.get_submodule(LITE), torch.randn(2, 16, 3, 5, dtype=torch.float64)
    report = polymix.convert(model, "qt", copy=True, multi_scale=False)
    adapter = report.adapters[LITE]
    assert adapter.mixer.config.scales == () and adapter.mixer.multi_scale is None
    assert set(report.layers[0].dropped) >= {"aggreg.0.0.weight", "proj.conv.weight[smoothed 1]"}
    with torch.no_grad():
        q, k, v = layer.qkv(x).reshape(2, 2, 24, 15).transpose(-1, -2).chunk(3, dim=-1)
        y = quadratic(q, k, v, "compact").transpose(-1, -2).reshape(2, 16, 3, 5)
        near([adapter(x)], [layer.proj(torch.cat((y, torch.zeros_like(y)), 1))], 1e-12)


def test_the_option_multi_scale_where_there_are_no_branches():
    refuses(xcit(), "qt", OptionError, "multi_scale.*no multi-scale branches", multi_scale=False)
    refuses(efficientvit(), "qt:scales=3:impl=native", OptionError, "impl")
    report = polymix.convert(efficientvit(), "relu_linear", multi_scale=False)
    assert report.adapters[LITE].mixer.config.scales == () and report.layers[0].fresh


def test_other_scales_than_the_host_s_are_fresh():
    report = converts(efficientvit(), "qt:scales=3", XCIT_IMAGES, input=XCIT_IMAGES)
    assert any(key.startswith("multi_scale") for key in report.layers[0].fresh)
    assert "aggreg.0.0.weight" in report.layers[0].dropped


@pytest.mark.parametrize("bias", [(True, False), (False, True), (True, True)])
def test_litemla_with_biases(bias):
    from timm.models.efficientvit_mit import LiteMLA

    for norm in (None, torch.nn.BatchNorm2d):
        layer, x = LiteMLA(16, 16, dim=8, use_bias=bias, norm_layer=(None, norm)), torch.randn(2, 16, 4, 5)
        same_as_host(layer, x, plan="relu_linear", input=x)
        report = polymix.convert(stirred(layer), "qt", input=x)
        assert not report.layers[0].dropped


def test_copies_bfloat16_compile_and_undo():
    from timm.models.efficientvit_mit import LiteMLA

    layer, x = stirred(LiteMLA(16, 16, dim=8)), torch.randn(2, 16, 4, 5)
    undoes(layer, "qt:form=full", x, input=x)
    survives(polymix.convert(layer, "qt:form=full", input=x).model, x)


# timm's own count of each size, and how much QT adds: its biases, and α, β, γ of each head
SIZES = {
    "b0": (3410008, 3984), "b1": (9102024, 14608), "b2": (24330712, 31296), "b3": (48646056, 62592),
    "l1": (52654088, 31296), "l2": (63707016, 41728),
}  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
def test_named_sizes_keep_their_parameters(size):
    with torch.device("meta"):
        model = timm.create_model(f"efficientvit_{size}")
        biased = polymix.convert(model, "qt")
        biased.undo()
        report = polymix.convert(model, "qt:bias=false")
    before, after = report.parameters
    heads = sum(part.mixer.scale.numel() for part in report.adapters.values())
    assert before == SIZES[size][0] and after == before + heads, "qt without biases adds α, β, γ alone"
    assert biased.parameters[1] == before + SIZES[size][1]
    assert not any(layer.dropped for layer in report.layers)


def test_pyramids_of_any_size():
    for model, layer, images in (
        (caformer(), "stages.1.blocks.1.token_mixer", torch.randn(1, 3, 24, 56)),
        (efficientvit(), "stages.2.blocks.1.context_module.main", torch.randn(1, 3, 48, 96)),
    ):
        report = polymix.convert(stirred(model).eval(), "padre", input=torch.randn(1, 3, 64, 64))
        x, given = inside(report.model, layer, images)
        grid = (3, 7) if x.ndim == 3 else tuple(x.shape[2:])
        adapter = report.adapters[layer]
        mixed = adapter.mixer(x if x.ndim == 3 else x.flatten(2).transpose(1, 2), grid=grid)
        identical([given], [mixed if x.ndim == 3 else adapter.norm(mixed.transpose(1, 2).reshape(x.shape))])


def test_the_grid_of_a_stage_comes_from_what_timm_says():
    report = polymix.convert(
        timm.create_model("efficientvit_b0", num_classes=3), {"stages.2.blocks.1.context_module.main": "padre"}
    )
    assert report.adapters["stages.2.blocks.1.context_module.main"].mixer.config.grid == (14, 14)
