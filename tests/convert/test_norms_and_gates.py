"""Norms of queries and keys, gates, grouped heads and rotary angles: a mixer keeps them, or they are lost by name alone."""

import pytest
import torch
from torch import nn

import polymix
from polymix.errors import CapabilityError, OptionError
from polymix.mixers.registry import config_class
from tests.convert.checks import accounts, answer, identical, refuses, same_as_host, stirred, survives, trains, undoes
from tests.convert.test_families import language
from tests.convert.timm_hosts import IMAGES, eva, timm, vit
from tests.helpers import tokens

ATTENDING = [
    name for name in polymix.list_mixers() if config_class(name)().attends and not config_class(name)().causal_by_build
]
STARTING = ("focused", "castling", "knn", "poly_sa", "softmax:heads=4")  # from the layer's queries and keys
X = tokens(2, 9, 16, dtype=torch.float32)
REAL = (torch.arange(9) < torch.tensor([[9], [6]]))[:, None, None]


def attention(kind="Attention", **options):
    return getattr(timm.layers, kind)(16, 2, qkv_bias=True, norm_layer=nn.LayerNorm, **options)


HOSTS = {
    "norms of queries and keys": lambda: vit(qk_norm=True),
    "a norm before the output map": lambda: vit(scale_attn_norm=True),
    "rotary angles": lambda: eva(use_rot_pos_emb=True),
    "rotary angles, three maps": lambda: eva(use_rot_pos_emb=True, qkv_fused=False),
    "rotary angles and norms, the other class": lambda: eva(use_rot_pos_emb=True, qk_norm=True, attn_type="rope"),
}
LAYERS = {
    "a gate": lambda: attention(gated=True, qk_norm=True),
    "narrow heads": lambda: attention(attn_head_dim=4),
    "grouped heads": lambda: timm.layers.AttentionRope(16, 4, num_kv_heads=2, qkv_fused=False),
}


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("name", HOSTS)
def test_softmax_is_the_host(name, given):
    """Whether or not there is an input that would show a difference."""
    same_as_host(HOSTS[name](), IMAGES, **({"input": IMAGES} if given else {}))


@pytest.mark.parametrize("name", LAYERS)
def test_softmax_is_the_layer_under_masks(name):
    for call in ((X,), (X, REAL)) if name != "grouped heads" else ((X,), (X, None, REAL)):
        same_as_host(LAYERS[name](), call)
    layer = stirred(LAYERS[name]()).eval()
    report = polymix.convert(layer, "softmax", copy=True)
    with torch.no_grad():
        torch.testing.assert_close(report.model(X, is_causal=True), layer(X, is_causal=True))


@pytest.mark.parametrize("mixer", ATTENDING)
def test_every_mixer_of_queries_keys_and_values_keeps_them(mixer):
    model = stirred(vit(qk_norm=True, scale_attn_norm=True))
    report = polymix.convert(model, mixer)
    weights = dict(report.model.blocks[0].attn.named_parameters())
    assert {"layer.q_norm.weight", "layer.k_norm.bias", "layer.norm.weight"} <= set(weights)
    assert not report.layers[0].dropped
    accounts(report)
    trains(report, IMAGES)


def test_local_attention_keeps_them_where_the_layer_is_causal():
    layer = stirred(attention(qk_norm=True)).eval()
    refuses(layer, "local:window=64", CapabilityError, "or use softmax")  # not an option that it does not have
    report = polymix.convert(layer, "local:window=64", causal=True, copy=True)
    with torch.no_grad():
        torch.testing.assert_close(report.model(X, is_causal=True), layer(X, is_causal=True))


def test_angles_reach_a_mixer_that_can_have_them():
    """Where the angles did nothing, a model that turns nothing would give the same."""
    torch.manual_seed(0)
    model = polymix.convert(stirred(eva(use_rot_pos_emb=True)), "qt").model.eval()
    turned = answer(model, IMAGES)[0]
    model.rope = None
    assert not torch.allclose(answer(model, IMAGES)[0], turned, atol=1e-4)


@pytest.mark.slow
def test_it_is_saved_undone_copied_and_exported(tmp_path):
    model = polymix.convert(stirred(vit(qk_norm=True)), "qt").model.eval()
    polymix.save_pretrained(model, tmp_path)
    identical(answer(polymix.load_pretrained(tmp_path), IMAGES), answer(model, IMAGES))
    undoes(vit(qk_norm=True), "qt", IMAGES)
    survives(model, IMAGES)
    exported = torch.export.export(model, (IMAGES,)).module()
    torch.testing.assert_close(exported(IMAGES), model(IMAGES))


@pytest.mark.parametrize("mixer", STARTING)
def test_a_mixer_that_starts_from_the_maps_loses_them_by_name(mixer):
    refuses(vit(qk_norm=True), mixer, OptionError, r"--drop qk_norm")
    refuses(vit(scale_attn_norm=True), mixer, OptionError, r"--drop gate")
    report = polymix.convert(vit(qk_norm=True), mixer, drop=("qk_norm",))
    assert "qk_norm" in report.layers[0].dropped
    assert not polymix.convert(vit(), mixer).layers[0].dropped


@pytest.mark.parametrize(("mixer", "options"), [("pom", {}), ("relu_linear", {}), ("softmax", {"init": "fresh"})])
def test_a_mixer_that_does_not_start_from_them_loses_nothing_more(mixer, options):
    report = polymix.convert(vit(qk_norm=True), mixer, **options)
    assert "qk_norm" in report.layers[0].dropped


def test_a_name_for_what_is_kept_is_a_mistake():
    refuses(vit(qk_norm=True), "qt", OptionError, "no converted layer has", drop=("qk_norm",))


@pytest.mark.parametrize("kind", ["qwen3", "olmo2"])
def test_families_of_transformers_likewise(kind):
    """With other heads than the layer's the mixer projects itself: without the norms its logits would be others."""
    refuses(language(kind), "qt:heads=2", OptionError, r"--drop qk_norm")
    report = polymix.convert(language(kind), "qt:heads=2", drop=("qk_norm",))
    assert "qk_norm" in report.layers[0].dropped
    assert "qk_norm" not in polymix.convert(language(kind), "qt").layers[0].dropped
