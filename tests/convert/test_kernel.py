"""Attention without an adapter of its own: a user's, or timm's. A mixer answers in the place of softmax attention."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import polymix
from polymix.errors import CapabilityError, MaskError, OptionError
from tests.contracts.library_cases import imported
from tests.convert.checks import accounts, answer, converts, identical, near, refuses, same_as_host, stirred, undoes

X = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(0))
BIAS = ("position_bias",)
MIXERS = ("qt", "linear", "pom", "padre", "poly_nl")


class Own(nn.Module):
    """What people write: maps of any names, norms of queries, and PyTorch's kernel."""

    def __init__(self, dim=16, heads=2, causal=False):
        super().__init__()
        self.h, self.causal = heads, causal
        self.wq, self.kv_map = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim, bias=False)
        self.norm, self.last = nn.LayerNorm(dim // heads), nn.Linear(dim, dim)

    def heads(self, x):
        q, k, v = (
            part.unflatten(-1, (self.h, -1)).transpose(1, 2) for part in (self.wq(x), *self.kv_map(x).chunk(2, -1))
        )
        return self.norm(q), k, v

    def forward(self, x, padding=None):
        mask = None if padding is None else padding[:, None, None]
        y = F.scaled_dot_product_attention(*self.heads(x), attn_mask=mask, is_causal=self.causal)
        return self.last(y.transpose(1, 2).flatten(2))


class DefinedAttention(Own):
    """The same by its definition, as in many a tutorial."""

    def forward(self, x, padding=None):
        q, k, v = self.heads(x)
        logits = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
        if padding is not None:
            logits = logits.masked_fill(~padding[:, None, None], -torch.inf)
        y = F.dropout(F.softmax(logits, dim=-1), 0.0) @ v
        return self.last(y.transpose(1, 2).reshape(*x.shape))


class Model(nn.Module):
    def __init__(self, kind=Own, **options):
        super().__init__()
        self.layers = nn.ModuleList(kind(**options) for _ in range(2))

    def forward(self, x, padding=None):
        for layer in self.layers:
            x = x + layer(x, padding)
        return x


def padded():
    padding = torch.ones(2, 9, dtype=torch.bool)
    padding[1, 6:] = False
    return {"x": X, "padding": padding}


KINDS = [Own, DefinedAttention]


@pytest.mark.parametrize("kind", KINDS)
def test_softmax_is_the_layer_with_its_masks(kind):
    inputs = padded()
    same_as_host(Model(kind), inputs, input=inputs, of=lambda y: y[inputs["padding"]])
    same_as_host(Model(kind), X, input=X)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mixer", MIXERS)
def test_mixers_take_its_place(kind, mixer):
    converts(Model(kind), mixer, X, input=X)
    undoes(Model(kind), mixer, X, input=X)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mixer", ["qt", "pom"])
def test_padding_plays_no_part(kind, mixer):
    model, given = Model(kind).eval(), padded()
    polymix.convert(model, mixer, input=given)
    other = {**given, "x": X.masked_fill(~given["padding"][..., None], 7.0)}
    real = lambda inputs: answer(model, inputs)[0][given["padding"]]  # noqa: E731
    near([real(other)], [real(given)])


def test_causal_order_is_the_call_s():
    model = Model(causal=True).eval()
    same_as_host(model, X, input=X)
    for mixer in ("qt", "pom"):
        report = polymix.convert(model, mixer, input=X, copy=True)
        assert all(adapter.causal for adapter in report.adapters.values())
        changed = torch.cat((X[:, :-1], X[:, -1:] + 3), dim=1)
        near([answer(report.model, changed)[0][:, :-1]], [answer(report.model, X)[0][:, :-1]])
    refuses(model, "sima", CapabilityError, "causal order", input=X)


class BiasedAttention(Own):
    """Biases between pairs of tokens, in the kernel's mask."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(2, 9, 9))

    def forward(self, x, padding=None):
        y = F.scaled_dot_product_attention(*self.heads(x), attn_mask=self.bias[None])
        return self.last(y.transpose(1, 2).flatten(2))


class PartlyBiasedAttention(BiasedAttention):
    """The same by definition: a part of the logits is changed where it stands, and others in another shape."""

    def forward(self, x, padding=None):
        q, k, v = self.heads(x)
        logits = q @ k.transpose(-2, -1)
        logits[:, :, 1:, 1:] = logits[:, :, 1:, 1:] + self.bias[:, 1:, 1:]
        logits = (logits.view(1, *logits.shape) + self.bias[0]).view(*logits.shape) * 0.5
        return self.last((logits.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kind", [BiasedAttention, PartlyBiasedAttention])
def test_a_biased_host_says_what_it_loses(kind):
    model = Model(kind)
    expected = answer(model, X)
    error = refuses(model, "qt", OptionError, "position_bias", input=X)
    assert "--drop position_bias" in error.cure
    report = polymix.convert(model, "qt", input=X, drop=BIAS)
    assert "logits" in report.layers[0].dropped["position_bias"]
    report.undo()
    report = polymix.convert(model, "softmax", input=X)
    near(answer(model, X), expected)
    assert not report.layers[0].dropped  # softmax keeps the bias


def test_a_bias_that_is_zero_so_far_is_a_bias():
    model = Model(BiasedAttention)
    for layer in model.layers:
        nn.init.zeros_(layer.bias)
    refuses(model.requires_grad_(False), "qt", OptionError, "position_bias", input=X)
    polymix.convert(model, "softmax", input=X)
    for layer in model.layers:
        nn.init.ones_(layer.layer.bias[..., 0])
    one = Model(BiasedAttention)
    one.load_state_dict({name.replace(".layer.", "."): value for name, value in model.state_dict().items()})
    near(answer(model, X), answer(one, X))


def test_softmax_with_a_bias_sees_no_padding():
    layer, padding = Model(BiasedAttention).eval(), padded()["padding"]
    layer = polymix.convert(layer, "softmax", input=X).model.layers[0]
    other = X.masked_fill(~padding[..., None], 7.0)
    one, two = (layer.answered((x,), {}, padding)[padding] for x in (X, other))
    near([one], [two])


class SwitchedAttention(Own):
    """A host that can be told to use another kernel than PyTorch's."""

    kernel = "torch"

    def forward(self, x, padding=None):
        if self.kernel == "torch":
            return super().forward(x, padding)
        q, k, v = self.heads(x)
        y = ((q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5).softmax(-1) @ v
        return self.last(y.transpose(1, 2).flatten(2))


def test_a_layer_that_no_longer_asks_does_not_run_attention_in_silence():
    model = polymix.convert(Model(SwitchedAttention).eval(), "qt", input=X).model
    model.layers[0].layer.kernel = "own"
    with pytest.raises(CapabilityError, match="asks for attention 0 times in this call"):
        model(X)


class DroppingAttention(Own):
    """Weights are dropped at a rate whose name says nothing."""

    def forward(self, x, padding=None):
        y = F.scaled_dot_product_attention(*self.heads(x), dropout_p=0.3 if self.training else 0.0)
        return self.last(y.transpose(1, 2).flatten(2))


class DefinedDroppingAttention(Own):
    """The same by definition."""

    def forward(self, x, padding=None):
        q, k, v = self.heads(x)
        weights = F.dropout((q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1), 0.3, self.training)
        return self.last((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("kind", "lost"), [(DroppingAttention, True), (DefinedDroppingAttention, True), (Own, False)])
def test_dropped_weights_are_seen_in_training(kind, lost):
    report = polymix.convert(Model(kind).eval(), "qt", input=X)
    assert ("dropout" in report.layers[0].dropped) == lost


class GatedAttention(DefinedAttention):
    """A product with a vector comes before that of queries and keys."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.randn(16))

    def forward(self, x, padding=None):
        return super().forward(x * (x @ self.gate).sigmoid()[..., None], padding)


def test_other_products_before_attention_are_passed_over():
    model = Model(GatedAttention).eval()
    expected = answer(model, X)
    polymix.convert(model, "softmax", input=X)
    near(answer(model, X), expected)


def test_a_plan_by_layer_is_saved_and_loaded(tmp_path):
    report = polymix.convert(Model().eval(), {"layers.0": "pom", "layers.1": "qt"}, input=X)
    accounts(report)
    expected = answer(report.model, X)
    polymix.save_pretrained(report.model, tmp_path, host={"call": "tests.convert.test_kernel:Model"})
    identical(answer(polymix.load_pretrained(tmp_path, trust=True), X), expected)


class TalkingAttention(DefinedAttention):
    """Heads talk, by a product that is not read as a map across heads."""

    def forward(self, x, padding=None):
        q, k, v = self.heads(x)
        logits = (q @ k.transpose(-2, -1)).permute(0, 2, 3, 1) @ torch.ones(2, 2)
        return self.last((logits.permute(0, 3, 1, 2).softmax(-1) @ v).transpose(1, 2).flatten(2))


class HalvedAttention(DefinedAttention):
    """A softmax of half the heads' size, which no reading by its parts shows."""

    def forward(self, x, padding=None):
        q, k, v = self.heads(x)
        weights = (q @ k.transpose(-2, -1)).softmax(-1)
        return self.last(((weights + weights.transpose(-2, -1)) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (TalkingAttention, "passes its logits to"),
        (HalvedAttention, "adds something else than a tensor"),
    ],
)
def test_what_is_not_softmax_attention_is_refused_by_name(kind, match):
    refuses(Model(kind), "qt", CapabilityError, rf"layers.0 \({kind.__name__}\).*{match}", input=X)


class TwiceAttention(Own):
    """Differences of two answers, as differential attention has them."""

    def forward(self, x, padding=None):
        q, k, v = self.heads(x)
        y = F.scaled_dot_product_attention(q, k, v) - 0.5 * F.scaled_dot_product_attention(k, q, v)
        return self.last(y.transpose(1, 2).flatten(2))


class CascadedAttention(DefinedAttention):
    """One head after the other, each by definition: what one reads is what the one before answers."""

    def forward(self, x, padding=None):
        last, heads = 0, []
        for q, k, v in zip(*(part.unbind(1) for part in self.heads(x)), strict=True):
            weights = (q @ k.transpose(-2, -1) * 0.3).softmax(-1)
            last = ((v + last).transpose(-2, -1) @ weights.transpose(-2, -1)).transpose(-2, -1)
            heads.append(last)
        return self.last(torch.cat(heads, -1))


class UnequalAttention(Own):
    def forward(self, x, padding=None):
        q, k, v = self.heads(x)
        y = F.scaled_dot_product_attention(q, k, v) + F.scaled_dot_product_attention(q, k[:, :, :4], v[:, :, :4])
        return self.last(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("kind", "heads", "times"), [(TwiceAttention, 2, 2), (CascadedAttention, 8, 8)])
def test_a_layer_that_attends_several_times_gets_an_answer_to_each(kind, heads, times):
    """None of them stays beside the mixer."""
    same_as_host(Model(kind, heads=heads), X, input=X)
    report = converts(Model(kind, heads=heads), "qt", X, input=X)
    assert [adapter.asks for adapter in report.adapters.values()] == [times] * 2
    undoes(Model(kind, heads=heads), "qt", X, input=X)
    refuses(Model(kind, heads=heads), "pom", CapabilityError, f"asks for attention {times} times in a call", input=X)


def test_a_layer_that_attends_in_several_shapes_is_refused():
    refuses(Model(UnequalAttention), "qt", CapabilityError, "in several shapes", input=X)


def test_without_an_input_nothing_can_be_read():
    refuses(Model(), "qt", OptionError, "Pass input=")


@pytest.mark.parametrize("mixer", ["softmax", "qt", "linear"])
def test_other_heads_than_the_layer_s_are_refused(mixer):
    """The mixer gets the layer's: qt would fail at them, and softmax would report heads that it does not have."""
    refuses(Model(), f"{mixer}:heads=4", OptionError, "heads.: expected the 2 of the layer", input=X)


def test_masks_that_differ_between_heads_are_errors():
    model = polymix.convert(Model().eval(), "qt", input=padded()).model
    layer = model.layers[0]
    q = torch.randn(2, 2, 9, 8)
    mask = torch.rand(2, 2, 9, 9) > 0.5
    from polymix.convert.adapters.kernel.question import Question, in_heads

    with pytest.raises(MaskError, match="between heads"):
        in_heads(Question(q, q, q, mask), layer.head_axis, False)


# timm's classes of attention without an adapter of their own

MAP, TOKENS = (2, 16, 4, 4), (2, 16, 16)
LAYERS = {
    "timm.layers:Attention2d": ({"dim": 16, "num_heads": 2}, MAP),
    "timm.layers:MultiQueryAttention2d": ({"dim": 16, "num_heads": 2, "key_dim": 8, "value_dim": 8}, MAP),
    "timm.layers:AttentionPoolLatent": ({"in_features": 16, "num_heads": 2}, TOKENS),
    "timm.layers:DiffAttention": ({"dim": 16, "num_heads": 2}, TOKENS),
    "timm.layers:NonLocalAttn": ({"in_channels": 16}, MAP),
    "timm.layers.bottleneck_attn:BottleneckAttn": ({"dim": 16, "feat_size": (4, 4), "num_heads": 2}, MAP),
    "timm.layers.halo_attn:HaloAttn": ({"dim": 16, "num_heads": 2, "block_size": 2, "halo_size": 1}, MAP),
    "timm.models.cait:ClassAttn": ({"dim": 16, "num_heads": 2}, TOKENS),
    "timm.models.cait:TalkingHeadAttn": ({"dim": 16, "num_heads": 2}, TOKENS),
    "timm.models.convit:MHSA": ({"dim": 16, "num_heads": 2}, TOKENS),
    "timm.models.crossvit:CrossAttention": ({"dim": 16, "num_heads": 2}, TOKENS),
    "timm.models.davit:WindowAttention": ({"dim": 16, "num_heads": 2, "window_size": (4, 4)}, TOKENS),
    "timm.models.efficientformer_v2:Attention2d": (
        {"dim": 16, "key_dim": 8, "num_heads": 2, "attn_ratio": 1, "resolution": 4}, MAP),
    "timm.models.efficientformer_v2:Attention2dDownsample": (
        {"dim": 16, "key_dim": 8, "num_heads": 2, "attn_ratio": 1, "resolution": 4}, MAP),
    "timm.models.efficientvit_msra:CascadedGroupAttention": (
        {"dim": 16, "key_dim": 8, "num_heads": 2, "attn_ratio": 1, "resolution": 4}, MAP),
    "timm.models.levit:Attention": ({"dim": 16, "key_dim": 8, "num_heads": 2, "attn_ratio": 1.0, "resolution": 4}, TOKENS),
    "timm.models.maxxvit:AttentionCl": ({"dim": 16, "dim_head": 8}, (2, 4, 4, 16)),
    "timm.models.shvit:SHSA": ({"dim": 16, "qk_dim": 8, "pdim": 8}, MAP),
    "timm.models.tnt:Attention": ({"dim": 16, "hidden_dim": 16, "num_heads": 2}, TOKENS),
    "timm.models.visformer:Attention": ({"dim": 16, "num_heads": 2, "head_dim_ratio": 1.0}, MAP),
    "timm.models.vision_transformer_relpos:RelPosAttention": ({"dim": 16, "num_heads": 2}, TOKENS),
    "timm.models.volo:ClassAttention": ({"dim": 16, "num_heads": 2}, TOKENS),
}  # fmt: skip


TALKING = ("talking_heads",)
LOST = {"levit:Attention": BIAS, "cait:Talking": TALKING, "Attention2dDown": BIAS, "efficientformer_v2": (*BIAS, *TALKING), "msra": BIAS,
        "BottleneckAttn": BIAS, "HaloAttn": BIAS}  # fmt: skip


def timm_layer(name):
    imported("timm")
    module, _, kind = name.partition(":")
    options, shape = LAYERS[name]
    layer = getattr(__import__(module, fromlist=[kind]), kind)(**options)
    return stirred(nn.Sequential(layer)).eval(), torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_timm_convert_and_come_back(name):
    model, x = timm_layer(name)
    expected = answer(model, x)
    lost = next((lost for part, lost in LOST.items() if part in name), ())
    for part in lost:
        refuses(model, "qt", OptionError, part, input=x)
    for mixer in ("softmax", "qt"):
        report = polymix.convert(model, mixer, input=x, drop=lost)
        if mixer == "softmax":
            near(answer(model, x), expected)
        report.model.train()(x).sum().backward()
        assert all(part.mixer.scale.grad.any() for part in report.adapters.values() if mixer == "qt")
        report.undo()
        identical(answer(model, x), expected)


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("timm.models.davit:ChannelAttention", {"dim": 16, "num_heads": 2}, "mixes channels, not tokens"),
    ],
)
def test_layers_of_timm_that_are_no_softmax_attention_over_tokens_are_refused(name, options, match):
    imported("timm")
    module, _, kind = name.partition(":")
    layer = getattr(__import__(module, fromlist=[kind]), kind)(**options)
    refuses(nn.Sequential(layer), "qt", (CapabilityError, OptionError), match, input=X[:, :9])


@pytest.mark.parametrize("mixer", ["qt", "pom"])
def test_parts_keep_the_modes_that_they_had(mixer):
    """A norm that its owner froze stays frozen beside the mixer, through the former model and after undo."""
    model = Model().train()
    model.layers[0].norm.eval()
    modes = lambda: {name: part.training for name, part in model.named_modules() if "norm" in name}  # noqa: E731
    before = modes()
    report = polymix.convert(model, mixer, input=X)
    after = {name.replace(".layer.", "."): training for name, training in modes().items()}
    assert after.items() <= before.items(), "a conversion changed the mode of a part"
    assert model.layers[0].mixer.training, "what is new is in the mode of its layer"
    model.eval()
    with report.former():
        pass
    model.train()
    assert report.undo() is model
    assert modes() == before, "undo changed the mode of a part"


class Moody(Own):
    """A layer that cannot be called in training mode."""

    def forward(self, x, padding=None):
        if self.training:
            raise ValueError("not today")
        return super().forward(x, padding)


def test_dropout_that_could_not_be_looked_for_is_no_dropout_that_is_absent():
    report = polymix.convert(Model(Moody), "qt", input=X)
    assert "not today" in report.layers[0].dropped["dropout"]


def test_what_fails_in_a_mixer_is_not_blamed_on_its_widths(monkeypatch):
    """Heads of two widths are named where the mixer needs one; any other error is raised as it is."""

    class TwoWidths(Own):
        def heads(self, x):
            q, k, v = super().heads(x)
            return q[..., :4], k[..., :4], v

    model = Model(TwoWidths)
    refuses(model, "hydra", CapabilityError, "heads of two widths", input=X)
    polymix.convert(model, "linear", input=X)

    def breaks(*args, **kwargs):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(model.layers[0].mixer, "attend", breaks)
    with pytest.raises(RuntimeError, match="out of luck"):
        model(X)
