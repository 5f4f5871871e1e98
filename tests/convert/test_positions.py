"""Positions that a host adds to queries and keys, but not to values, as the official DETR does."""

import pytest
import torch
from torch import nn

import polymix
from polymix.errors import CapabilityError, OptionError
from polymix.models import VisionTransformer
from tests.convert.checks import accounts, answer, ignores, near, refuses, same_as_host, stirred, trains, undoes

DIM, HEADS, N, QUERIES = 16, 2, 12, 5
GENERATOR = torch.Generator().manual_seed(0)
SRC, POS = (torch.randn(2, N, DIM, generator=GENERATOR) for _ in range(2))
HIDDEN = torch.zeros(2, N, dtype=torch.bool)
HIDDEN[0, 9:] = True
OWN = ["softmax", "qt", "qt:form=full", "poly_sa:positions=mean", "linear", "performer", "hydra", "sima", "efficient",
       "knn:k=4", "xca", "castling", "tesa", "focused", "relu_linear", "non_local", "pom"]  # fmt: skip
BY_CHOICE = ["padre", "padre:degree=3", "poly_nl"]
ONE_INPUT = ["se", "gc", "latent_gnn", "prodpoly", "poly_nl:order=2"]


class Layer(nn.Module):
    """A layer of DETR's encoder and one of its decoder, as its authors write them."""

    def __init__(self, batch_first=True, twice=False):
        super().__init__()
        self.batch_first, self.twice, self.grid_size = batch_first, twice, (3, 4)
        self.encoder = nn.MultiheadAttention(DIM, HEADS, batch_first=batch_first)
        self.decoder = nn.Module()
        self.decoder.self_attn = nn.MultiheadAttention(DIM, HEADS, batch_first=batch_first)
        self.decoder.cross_attn = nn.MultiheadAttention(DIM, HEADS, batch_first=batch_first)
        self.queries = nn.Parameter(torch.randn(1, QUERIES, DIM))
        self.norm = nn.LayerNorm(DIM)

    def forward(self, src, pos, padding=None):
        turn = (lambda t: t) if self.batch_first else (lambda t: t.transpose(0, 1))
        src, pos, queries = turn(src), turn(pos), turn(self.queries.expand(len(src), -1, -1))
        placed = src + pos
        keys = src + pos if self.twice else placed  # another tensor with the same values, or the same tensor
        memory = self.norm(src + self.encoder(placed, keys, src, key_padding_mask=padding)[0])
        x = 0.5 * queries.roll(1, -1)
        x = self.norm(x + self.decoder.self_attn(x + queries, x + queries, x)[0])
        context = memory + pos
        x = x + self.decoder.cross_attn(x + queries, context, memory, key_padding_mask=padding)[0]
        return turn(self.norm(x)), turn(memory)


GIVEN = {"src": SRC, "pos": POS, "padding": HIDDEN}


def alone(mixer, **options):
    """Attention converted on a call with separate values, in float64: the adapter, which is the whole model."""
    x, p = SRC.double(), POS.double()
    module = stirred(nn.MultiheadAttention(DIM, HEADS, batch_first=True).double())
    call = {"input": (x + p, x + p, x), "grid": (3, 4), **options}
    return polymix.convert(module, mixer, **call).model.eval(), x, x + p


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("twice", [True, False])
def test_softmax_is_detrs_attention(batch_first, twice):
    model = Layer(batch_first, twice)
    accounts(same_as_host(model, GIVEN))
    report = same_as_host(model, GIVEN, input=GIVEN, positions="values")
    assert [layer.positions for layer in report.layers] == ["values"] * 3
    assert all(layer.error < 1e-5 for layer in report.layers)
    assert "Positions in 3 layers (values): as in the host" in str(report)


@pytest.mark.parametrize("mixer", OWN + BY_CHOICE)
def test_self_attention_reads_what_was_chosen(mixer):
    choice = {"positions": "values"} if mixer in BY_CHOICE else {}
    layer, x, placed = alone(mixer, **choice)
    grid = layer.grid_options(x)
    for key in (placed, placed.clone()):
        torch.testing.assert_close(layer(placed, key, x)[0], layer.mixer(placed, values=x, **grid))
    layer, x, placed = alone(mixer, positions="all")
    torch.testing.assert_close(layer(placed, placed, x)[0], layer.mixer(placed, **grid))
    layer, x, placed = alone(mixer, positions="drop")
    torch.testing.assert_close(layer(placed, placed, x)[0], layer.mixer(x, **grid))


@pytest.mark.parametrize("mixer", [name for name in OWN if polymix.create_mixer(name.partition(":")[0], 8,
                         **({"grid": (2, 2)} if name.startswith(("focused", "poly_sa")) else {})).capabilities.cross])  # fmt: skip
def test_cross_attention_reads_what_was_chosen(mixer):
    queries = torch.randn(2, QUERIES, DIM, dtype=torch.float64)
    x, placed = SRC.double(), SRC.double() + POS.double()
    module = stirred(nn.MultiheadAttention(DIM, HEADS, batch_first=True).double())
    for choice, expected in {
        None: lambda layer: layer.mixer(queries, placed, values=x, mask=~HIDDEN),
        "all": lambda layer: layer.mixer(queries, placed, mask=~HIDDEN),
        "drop": lambda layer: layer.mixer(queries, x, mask=~HIDDEN),
    }.items():
        inputs = (queries, placed, x, HIDDEN)
        report = polymix.convert(module, mixer, copy=True, input=inputs, positions=choice)
        torch.testing.assert_close(report.model(*inputs)[0], expected(report.model))
        assert report.layers[0].positions == (choice or "values")


def test_taylor_attention_by_its_definition():
    """q and k from x + p, v from x, 1 + s + s²/2 for the exponential: in float64, with the attention's own weights."""
    layer, x, placed = alone("qt:form=full", input=None)
    m = layer.mixer.matrices(N)
    q, k, v = ((t @ m[f"W_{c}"] + m[f"b_{c}"]).unflatten(-1, (HEADS, -1)) for t, c in
               ((placed, "q"), (placed, "k"), (x, "v")))  # fmt: skip
    s = torch.einsum("bnhd,bmhd->bhnm", q, k) / (DIM // HEADS) ** 0.5
    weight = 1 + s + s**2 / 2
    y = torch.einsum("bhnm,bmhd->bnhd", weight / weight.sum(-1, keepdim=True), v).flatten(-2) @ m["W_o"] + m["b_o"]
    torch.testing.assert_close(layer(placed, placed, x)[0], y, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("mixer", BY_CHOICE + ONE_INPUT)
def test_a_mixer_with_one_input_has_to_be_told(mixer):
    x, placed = SRC, SRC + POS
    module = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
    words = "'all' or 'drop'" + (" or 'values'" if mixer in BY_CHOICE else "")
    refuses(module, mixer, OptionError, f"positions.*{words}", input=(placed, placed, x), grid=(3, 4))
    layer = polymix.convert(module, mixer, copy=True, grid=(3, 4)).model  # without a call, it is not known yet
    assert layer(x, x, x)[0].shape == x.shape
    with pytest.raises(OptionError, match=words):
        layer(placed, placed, x)


@pytest.mark.parametrize("mixer", ONE_INPUT)
def test_a_mixer_without_a_value_map_cannot_keep_values_apart(mixer):
    module = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
    refuses(module, mixer, CapabilityError, "values from another input", positions="values", grid=(3, 4))


def test_a_choice_without_effect_is_an_error():
    vit = VisionTransformer(polymix.SoftmaxConfig(heads=2), image_size=8, patch_size=2, dim=16, depth=1)
    encoder = nn.TransformerEncoderLayer(DIM, HEADS, 24, batch_first=True)
    for model in (vit, encoder):
        refuses(model, "pom", OptionError, "positions.*None for this model", positions="drop")
    module = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
    refuses(module, "pom", OptionError, "positions.*None for this model", positions="all", input=(SRC, SRC, SRC))
    refuses(module, "pom", OptionError, "positions", positions="none")


@pytest.mark.parametrize("plan", [
    "qt", "pom", {"*": "pom", "encoder": "padre"}, {"*": "qt", "encoder": "poly_nl"},
    {"*": "linear", "encoder": "poly_sa:positions=mean"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("batch_first", [True, False])
def test_detr_converts_trains_and_ignores_padding(plan, batch_first):
    model = Layer(batch_first, twice=True)
    options = {"positions": "values", "input": GIVEN}
    report = polymix.convert(stirred(model), plan, **options)
    trains(report, GIVEN)
    accounts(report)
    broken = {"src": torch.where(HIDDEN[..., None], torch.nan, SRC), "pos": torch.where(HIDDEN[..., None], 1e30, POS)}
    ignores(report.model, GIVEN, {**GIVEN, **broken}, of=lambda y: (y[0], y[1][~HIDDEN]))
    undoes(model, plan, GIVEN, **options)


@pytest.mark.parametrize("mixer", ["padre", "qt", "pom"])
def test_causal_order_with_values_apart(mixer):
    layer, x, placed = alone(mixer, causal=True, positions="values", input=None, grid=(N,))
    later = x.clone()
    later[:, 7:] += 1
    mask = {"attn_mask": nn.Transformer.generate_square_subsequent_mask(N), "is_causal": True}
    one, other = (layer(t + placed - x, t + placed - x, t, **mask)[0][:, :7] for t in (x, later))
    torch.testing.assert_close(one, other)
    torch.testing.assert_close(one, layer.mixer(placed, values=x, causal=True)[:, :7])


@pytest.mark.parametrize("mixer", ["padre", "qt"])
def test_compiled(mixer):
    model = polymix.convert(Layer(twice=True), {"encoder": mixer}, positions="values").model
    torch._dynamo.reset()
    near(answer(torch.compile(model, backend="eager", fullgraph=True), GIVEN), answer(model, GIVEN))


def test_the_choice_is_saved(tmp_path):
    host = {"call": "tests.convert.test_positions:Layer", "kwargs": {"twice": True}}
    for choice, plan in (("drop", "qt"), ("all", "pom"), ("values", {"encoder": "padre"})):
        report = polymix.convert(Layer(twice=True).eval(), plan, positions=choice, input=GIVEN)
        polymix.save_pretrained(report.model, tmp_path / choice, host=host)
        loaded = polymix.load_pretrained(tmp_path / choice, trust=True)
        assert loaded.encoder.positions == choice
        near(answer(loaded, GIVEN), answer(report.model, GIVEN), 0)


# PADRe with a pattern: which input each factor reads


def test_a_pattern_reads_the_context_of_cross_attention():
    queries = torch.randn(2, QUERIES, DIM, dtype=torch.float64)
    x, placed = SRC.double(), SRC.double() + POS.double()
    module = stirred(nn.MultiheadAttention(DIM, HEADS, batch_first=True).double())
    for pattern, choice, expected in (
        ("ab", "values", lambda mixer: mixer(queries, x, mask=~HIDDEN)),
        ("ab", "all", lambda mixer: mixer(queries, placed, mask=~HIDDEN)),
        ("abb", "drop", lambda mixer: mixer(queries, x, mask=~HIDDEN)),
        ("abc", "values", lambda mixer: mixer(queries, (placed, x), mask=(~HIDDEN, ~HIDDEN))),
        ("abc", "all", lambda mixer: mixer(queries, (placed, placed), mask=(~HIDDEN, ~HIDDEN))),
    ):
        config = polymix.PadreConfig(degree=len(pattern), pattern=pattern)
        inputs = (queries, placed, x, HIDDEN)
        layer = polymix.convert(module, config, copy=True, input=inputs, positions=choice).model
        torch.testing.assert_close(layer(*inputs)[0], expected(layer.mixer))
    self_attention = polymix.convert(module, config, copy=True, positions="values").model
    torch.testing.assert_close(self_attention(placed, placed, x)[0], self_attention.mixer(placed, (placed, x)))
