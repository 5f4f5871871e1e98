"""`polymix.convert` itself, whatever the library: copies, shared layers, weights and their account, undo, errors."""

import importlib
import json
from copy import deepcopy

import pytest
import torch
from torch import nn

import polymix
from polymix.convert import Adapter, AttentionSpec, linear
from polymix.convert.adapter import adapter_for
from polymix.errors import CapabilityError, OptionError, PolymixError
from tests.convert.checks import (
    MIXERS,
    accounts,
    answer,
    converts,
    identical,
    near,
    refuses,
    same_as_host,
    snapshot,
    stirred,
    trains,
    unchanged,
    undoes,
)  # fmt: skip

DIM, HEADS, TOKENS = 16, 2, 9
X = torch.randn(2, TOKENS, DIM, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self, attention=None):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.attn = attention or nn.MultiheadAttention(DIM, HEADS, batch_first=True)

    def forward(self, x):
        y = self.norm(x)
        return x + self.attn(y, y, y)[0]


def model(blocks=3):
    return stirred(nn.Sequential(*(Block() for _ in range(blocks)))).eval()


# In place, or a copy


def test_in_place_the_model_given_is_the_converted_one():
    host = model()
    report = polymix.convert(host, "pom")
    assert report.model is host and all(isinstance(block.attn, Adapter) for block in host)


def test_a_copy_leaves_the_model_alone():
    host = model()
    before, expected = snapshot(host), answer(host, X)
    report = polymix.convert(host, "pom", copy=True, input=X)
    with torch.no_grad():
        for p in report.model.parameters():
            p.zero_()
    unchanged(before, snapshot(host))
    identical(answer(host, X), expected)


def test_what_is_kept_is_the_same_module():
    host = model()
    attention = host[1].attn
    report = polymix.convert(host, "1:1", mixer="pom")
    assert host[1].attn is attention
    assert [layer.now for layer in report.layers] == ["pom", None, "pom"]
    assert set(report.adapters) == set(report.attentions) == {"0.attn", "2.attn"}


@pytest.mark.parametrize("training", [True, False])
def test_mixers_are_in_the_mode_of_the_layers_that_they_replace(training):
    host = model().train(training)
    report = polymix.convert(host, "pom", input=X)
    assert {module.training for module in host.modules()} == {training}
    host.train(not training)
    assert {module.training for module in report.undo().modules()} == {not training}


def test_mixers_stand_where_the_weights_stand_and_in_their_type():
    host = model().double()
    polymix.convert(host, "padre", input=X.double())
    assert {p.dtype for p in host.parameters()} == {torch.float64}


def test_a_shared_layer_is_replaced_once_wherever_it_stands():
    shared = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
    host = nn.Sequential(Block(shared), Block(), Block(shared))
    report = polymix.convert(host, "pom", copy=True)
    assert [layer.name for layer in report.layers] == ["0.attn", "1.attn"]
    assert report.model[0].attn is report.model[2].attn is report.adapters["0.attn"]
    assert report.parameters[1] == sum(p.numel() for p in report.model.parameters()), "counted once"
    undone = report.undo()
    assert undone[0].attn is undone[2].attn
    same_as_host(host, X)
    undoes(host, "pom", X)


def test_the_model_may_be_an_attention_itself():
    host = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
    report = polymix.convert(host, "pom", input=(X, X, X))
    assert isinstance(report.model, Adapter) and report.layers[0].name == ""
    assert report.parameters == tuple(sum(p.numel() for p in part.parameters()) for part in (host, report.model))
    assert "(the model)" in str(report)
    undoes(host, "pom", (X, X, X))


def test_an_adapter_is_not_converted_again():
    host = polymix.convert(model(), "softmax").model
    with pytest.raises(OptionError, match="no attention"):
        polymix.convert(host, "pom")


# Weights


@pytest.mark.parametrize("init", ["inherit", "fresh"])
@pytest.mark.parametrize("mixer", [*MIXERS, "softmax", "linear", "sima"])
def test_every_parameter_is_accounted_for(mixer, init):
    host = model(1)
    report = polymix.convert(host, mixer, init=init, copy=True, grid=(3, 3) if mixer == "poly_sa" else None)
    accounts(report)
    (layer,) = report.layers
    if init == "fresh":
        assert not layer.inherited and set(layer.dropped) == {
            "in_proj_weight[query]", "in_proj_bias[query]", "in_proj_weight[key]", "in_proj_bias[key]",
            "in_proj_weight[value]", "in_proj_bias[value]", "out_proj.weight", "out_proj.bias",
        }  # fmt: skip
    else:
        assert {"in_proj_weight[value]", "out_proj.weight"} <= {
            key for keys in layer.inherited.values() for key in keys
        }


def test_inherited_weights_are_the_attention_s_and_fresh_ones_are_not():
    host = model(1)
    ours = polymix.convert(host, "qt", copy=True).adapters["0.attn"].mixer
    assert torch.equal(ours.qkv.qkv.weight, host[0].attn.in_proj_weight)
    assert torch.equal(ours.proj.bias, host[0].attn.out_proj.bias)
    fresh = polymix.convert(host, "qt", init="fresh", copy=True).adapters["0.attn"].mixer
    assert not torch.equal(fresh.qkv.qkv.weight, host[0].attn.in_proj_weight)


def test_padre_starts_from_the_product_of_value_and_output_map():
    host = model(1)
    attention = host[0].attn
    last = polymix.convert(host, "padre", copy=True).adapters["0.attn"].mixer.B["a"].linear(1)
    value = attention.in_proj_weight[2 * DIM :]
    torch.testing.assert_close(last[0].data, (attention.out_proj.weight @ value).data)
    bias = attention.out_proj.weight @ attention.in_proj_bias[2 * DIM :] + attention.out_proj.bias
    torch.testing.assert_close(last[1].data, bias.data)


@pytest.mark.parametrize("init", ["inherit", "fresh"])
@pytest.mark.parametrize("mixer", ["padre", "pom", "qt", "poly_nl"])
def test_with_an_input_the_output_has_the_size_of_the_attention_s(mixer, init):
    host = model(1)
    report = polymix.convert(host, mixer, init=init, input=X, copy=True)
    (layer,) = report.layers
    assert layer.scale is not None and layer.error < 1.6
    y = host[0].norm(X)
    theirs, ours = host[0].attn(y, y, y)[0], report.model[0].attn(y, y, y)[0]
    assert 0.8 < (ours.square().mean() / theirs.square().mean()).sqrt() < 1.25
    torch.testing.assert_close(layer.error, ((ours - theirs).norm() / theirs.norm()).item(), rtol=1e-4, atol=1e-5)


def test_without_an_input_nothing_is_scaled_and_no_error_is_claimed():
    (layer,) = polymix.convert(model(1), "padre").layers
    assert layer.scale is None and layer.error is None and layer.tokens is None and layer.flops is None


def test_softmax_is_not_scaled_away_from_the_attention_that_it_is():
    host = model(2)
    report = polymix.convert(host, "softmax", input=X, copy=True)
    assert [layer.scale for layer in report.layers] == [None, None]
    assert all(layer.error < 1e-6 for layer in report.layers)
    near(answer(report.model, X), answer(host, X))


def test_frozen_hosts_get_mixers_that_learn():
    report = polymix.convert(model().requires_grad_(False), "pom")
    trains(report, X)
    assert not any(p.requires_grad for p in report.model[0].norm.parameters())


# The report


def test_the_report_counts_what_is_there():
    host = model(2)
    report = polymix.convert(host, {"0.attn": "padre"}, input=X, copy=True)
    count = [sum(p.numel() for p in part.parameters()) for part in (host, report.model)]
    assert report.parameters == tuple(count)
    first, second = report.layers
    mixer = report.adapters["0.attn"].mixer
    assert first.parameters == (4 * DIM * DIM + 4 * DIM, sum(p.numel() for p in mixer.parameters()))
    assert first.tokens == TOKENS and first.options["name"] == "padre" and first.was == "MultiheadAttention"
    assert first.flops == (8 * TOKENS * DIM**2 + 4 * TOKENS**2 * DIM, mixer.cost(TOKENS).flops)
    assert second.now is None and second.parameters == (first.parameters[0],) * 2
    text = str(report)
    assert "0.attn" in text and "kept" in text and f"{count[0]:,} → {count[1]:,}" in text
    assert json.loads(json.dumps(report.to_dict()))["layers"][0]["now"] == "padre"
    report.undo()
    assert report.parameters == tuple(count), "what it said stays true of the conversion"


def test_tokens_are_counted_on_their_own_axis():
    host = nn.MultiheadAttention(DIM, HEADS)  # (N, B, D)
    x = X.transpose(0, 1)
    assert polymix.convert(host, "pom", input=(x, x, x), copy=True).layers[0].tokens == TOKENS
    assert polymix.convert(host, "pom", input=(X[0],) * 3, copy=True).layers[0].tokens == TOKENS


# Undo


@pytest.mark.parametrize("plan", ["padre", "1:1", {"1.attn": "softmax"}], ids=str)
def test_undo_gives_the_same_bits(plan):
    undoes(model(), plan, X)
    undoes(model(), plan, X, input=X, init="fresh")


def test_undo_after_training_the_mixers_alone():
    host = model()
    before, expected = snapshot(host), answer(host, X)
    report = polymix.convert(host, "pom")
    trained = [p for adapter in report.adapters.values() for p in adapter.parameters()]
    host(X).square().sum().backward()
    with torch.no_grad():
        for p in trained:
            p -= 0.1 * p.grad
    identical(answer(report.undo(), X), expected)
    unchanged(before, snapshot(host))


def test_a_second_undo_raises_and_redo_puts_the_same_mixers_in():
    report = polymix.convert(model(), "pom")
    expected = answer(report.model, X)
    report.undo()
    with pytest.raises(OptionError, match="undone already"):
        report.undo()
    identical(answer(report.redo(), X), expected)
    with pytest.raises(OptionError, match="is in place"):
        report.redo()


# An adapter of one's own, in ten lines


class House(nn.Module):
    """Somebody's own attention: one head, channels in front."""

    def __init__(self, dim):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x):
        x = x.transpose(1, 2)
        weights = (self.q(x) @ self.k(x).transpose(1, 2) / x.shape[-1] ** 0.5).softmax(-1)
        return self.o(weights @ self.v(x)).transpose(1, 2)


class Townhouse(House):
    """Has House's forward."""


class Castle(House):
    def forward(self, x):
        return 2 * super().forward(x)


@polymix.register_adapter(House)
class HouseAdapter(Adapter):
    @classmethod
    def describe(cls, module, host):
        query, key, value, out = (linear(module, name) for name in "qkvo")
        return AttentionSpec(dim=module.o.out_features, heads=1, query=query, key=key, value=value, out=out)

    def forward(self, x):
        return self.mix(x.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize("kind", [House, Townhouse])
def test_an_adapter_of_ones_own(kind):
    host, x = nn.Sequential(kind(DIM), nn.Linear(TOKENS, TOKENS)), X.transpose(1, 2)
    same_as_host(host, x)
    for mixer in ("padre", "pom", "qt"):
        converts(host, mixer, x)
    undoes(host, "pom", x)


def test_a_subclass_with_a_forward_of_its_own_is_not_served():
    assert adapter_for(Castle(DIM)) is None
    report = polymix.convert(nn.Sequential(House(DIM), Castle(DIM)), "pom")
    assert [layer.name for layer in report.layers] == ["0"]


def test_a_class_has_one_adapter():
    with pytest.raises(OptionError, match="without an adapter"):
        polymix.register_adapter(House)(HouseAdapter)


# Errors, and what is left out


class Foreign(nn.Module):
    """Attention by the look of it, of a class that nobody registered."""

    num_heads = 2

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)

    def forward(self, x):
        return self.qkv(x).chunk(3, -1)[2]


def test_adapters_are_looked_up_once(monkeypatch):
    """For each of the 252 modules of a ViT once: 3,000 imports a call, of the same files."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 6)
    polymix.convert(deepcopy(model), "qt")
    imported, load = [], importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda *names: imported.append(names[0]) or load(*names))
    polymix.convert(model, "qt")
    assert not [name for name in imported if name.startswith("polymix.convert")]


def test_unknown_attention_is_listed():
    host = nn.Sequential(Block(), Foreign())
    report = polymix.convert(host, "pom")
    assert report.left_out == ("1 (Foreign)",)
    assert "Not converted (no adapter): 1 (Foreign)." in str(report)
    refuses(nn.Sequential(Foreign()), "pom", OptionError, r"no known class: 0 \(Foreign\).*register_adapter")


def test_a_model_without_attention_is_an_error():
    refuses(nn.Sequential(nn.Linear(4, 4)), "pom", OptionError, "Sequential with no attention")


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize(
    ("plan", "options", "kind", "match"),
    [
        ("padr", {}, PolymixError, "padre"),
        ({"7.attn": "pom"}, {}, OptionError, "matches no attention layer"),
        ({"*": "pom", "2.*": "qt"}, {}, OptionError, "both match 2.attn"),
        ("all-but-last-3", {}, OptionError, "all 3 layers"),
        ("poly_nl", {"causal": True}, CapabilityError, r"plan, for 0.attn \(MultiheadAttention\)"),
        ({"0.attn": "pom", "2.attn": "poly_sa"}, {}, OptionError, "plan, for 2.attn .*grid"),
        ({"0.attn": "pom", "2.attn": "qt:heads=3"}, {}, OptionError, "plan, for 2.attn .*heads"),
        ("pom", {"init": "warm"}, OptionError, "init"),
        ("pom", {"windows": "drop"}, OptionError, "windows"),
        ("pom", {"copy": 1}, OptionError, "copy"),
        ("pom", {"input": X[..., :4]}, RuntimeError, "normalized_shape"),
        ("padre", {"grid": (2, 4), "input": X}, PolymixError, "plan, for 0.attn .*tokens"),
    ],
)
def test_errors_come_before_anything_is_changed(plan, options, kind, match, copy):
    refuses(model(), plan, kind, match, **{"copy": copy, **options})


def test_a_model_whose_run_fails_is_left_without_hooks_and_in_its_mode():
    host = model().train()
    refuses(host, "pom", RuntimeError, "normalized_shape", input=X[..., :4])
    assert host.training and not any(module._forward_hooks for module in host.modules())
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_layer_that_the_input_does_not_reach_is_converted_without_calibration():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = Block(), Block()

        def forward(self, x):
            return self.used(x)

    used, idle = polymix.convert(Idle(), "pom", input=X).layers
    assert used.error is not None and idle.error is None and idle.now == "pom"


def test_a_converted_model_is_copied_whole():
    report = polymix.convert(model(), "padre")
    twin = deepcopy(report.model)
    identical(answer(twin, X), answer(report.model, X))
    with torch.no_grad():
        twin[0].attn.mixer.D[0].weight.add_(1.0)
    assert not torch.equal(answer(twin, X)[0], answer(report.model, X)[0])
