"""`values=`: the map that starts from the attention's W_v reads the values, and every other map reads x or the context."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F

import polymix
from polymix.errors import CapabilityError, ShapeError
from tests.helpers import build, tokens
from tests.mixers.cases import CASES

DIM, N = 12, 12
MIXERS = {key: build(name, DIM, **options).eval() for key, (name, options) in CASES.items()}
APART = [key for key, mixer in MIXERS.items() if mixer.capabilities.values]
ALONE = [key for key in MIXERS if key not in APART]
SCALES = torch.linspace(0.5, 1.5, DIM, dtype=torch.float64)  # values = x ⊙ SCALES: then W_v diag(SCALES) gives the same
REAL = torch.ones(2, N, dtype=torch.bool)
REAL[0, 8:] = REAL[1, :2] = False


def value_rows(mixer):
    """The weight (…, D) of the map that reads the values; None if it is no dense matrix that reads them alone."""
    parameters = dict(mixer.named_parameters())
    if mixer.name == "padre":
        maps, degree = mixer.B["a"], mixer.config.degree
        if maps.specs[degree - 1] != "dense":
            return None
        return maps.maps.weight.view(mixer.config.heads, maps.count, -1, DIM // mixer.config.heads)[:, degree - 1]
    if mixer.name == "pom":
        return parameters["poly.weight"]
    if mixer.name == "poly_nl":
        return parameters["product.weight"].chunk(len(mixer.parts))[1] if mixer.into is None else None
    if mixer.name == "relu_linear":
        return parameters["mla.qkv.conv.weight"].view(mixer.heads, 3, -1, DIM)[:, 2]
    if mixer.name == "non_local":
        return parameters["layer.g.weight"].flatten(1)
    fused = next(p for key, p in parameters.items() if key in ("qkv.qkv.weight", "embed.weight", "xca.qkv.weight"))
    return fused.chunk(3)[2]


def calls(mixer):
    """Every kind of call that the mixer takes: keyword arguments, and whether there is a separate context."""
    can = mixer.capabilities
    yield {}, False
    if can.has("padding"):
        yield {"mask": REAL}, False
    if can.causal and not mixer.config.causal_by_build:
        yield {"causal": True}, False
    if can.has("segments"):
        yield {"segments": torch.arange(N).repeat(2, 1) // 5}, False
    if can.has("arbitrary"):
        yield {"mask": torch.rand(2, N, N, generator=torch.Generator().manual_seed(3)) < 0.6}, False
    if can.cross:
        yield {}, True
        if can.has("padding"):
            yield {"mask": REAL}, True


@pytest.mark.parametrize("key", [key for key in APART if value_rows(MIXERS[key]) is not None])
def test_only_the_value_map_reads_the_values(key):
    """On values x ⊙ s, the mixer is the one whose W_v has columns scaled by s, on x alone."""
    mixer, x, other = MIXERS[key], tokens(2, N, DIM), tokens(2, N, DIM, seed=1)
    scaled = deepcopy(mixer)
    rows = value_rows(scaled)
    with torch.no_grad():
        columns = SCALES.view(mixer.config.heads, 1, -1) if mixer.name == "padre" else SCALES
        if mixer.name == "pom" and mixer.config.groups > 1:
            columns = SCALES.view(mixer.config.groups, 1, -1)
        rows.mul_(columns)
    for options, cross in calls(mixer):
        source = other if cross else x
        context = other if cross else None
        found = mixer(x, context, values=source * SCALES, **options)
        torch.testing.assert_close(found, scaled(x, context, **options), rtol=1e-9, atol=1e-10)
        assert not torch.allclose(found, mixer(x, context, **options)), "the values play no part"


@pytest.mark.parametrize("key", APART)
def test_values_that_are_the_keys_input_change_nothing(key):
    mixer, x, other = MIXERS[key], tokens(2, N, DIM), tokens(2, N, DIM, seed=1)
    for options, cross in calls(mixer):
        context = other if cross else None
        found = mixer(x, context, values=(other if cross else x).clone(), **options)
        torch.testing.assert_close(found, mixer(x, context, **options), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("key", [key for key in APART if MIXERS[key].capabilities.has("padding")])
def test_broken_values_in_padding_reach_nothing(key):
    mixer = deepcopy(MIXERS[key]).float()
    x, values = (tokens(2, N, DIM, seed=seed, dtype=torch.float32) for seed in (0, 1))

    def outcome(filling):
        given = [t.masked_fill(~REAL[..., None], filling).requires_grad_() for t in (x, values)]
        y = mixer(given[0], mask=REAL, values=given[1])[REAL]
        found = torch.autograd.grad(y.square().sum(), (*given, *mixer.parameters()), allow_unused=True)
        return [y, *(grad for grad in found if grad is not None)]

    for found, expected in zip(outcome(float("nan")), outcome(0.0), strict=True):
        assert torch.equal(found, expected)


PADRE = ["padre-1", "padre-2", "padre-1d", "padre-causal", "padre-structures", "padre-tied", "padre-heads"]


@pytest.mark.parametrize("key", PADRE)
def test_padre_by_its_equation(key):
    """Z_{i+1} = C_i (Z_i D_i) ⊙ Y_{i+1} with Y_d = A_d V B_d and Y_i = A_i X B_i before it."""
    extra = {"padre-heads": build("padre", DIM, degree=3, heads=2, grid=(3, 4), kernel_size=3)}
    mixer, x, values = {**MIXERS, **extra}[key], tokens(2, N, DIM), tokens(2, N, DIM, seed=1)
    m, degree = mixer.matrices(N), mixer.config.degree

    def tokenwise(matrix, y, bias):
        y = torch.einsum("dnm,bmd->bnd", matrix, y) if matrix.ndim == 3 else matrix @ y
        return y if bias is None else y + bias

    def channelwise(y, matrix, bias):
        return y @ matrix if bias is None else y @ matrix + bias

    z, total = None, torch.zeros(2, N, DIM, dtype=torch.float64)
    for i in range(degree):
        y = tokenwise(m["A"][i], channelwise(values if i == degree - 1 else x, m["B"][i], m["b_B"][i]), m["b_A"][i])
        if z is not None:
            y = y * tokenwise(m["C"][i - 1], channelwise(z, m["D"][i - 1], m["b_D"][i - 1]), m["b_C"][i - 1])
        z, total = y, total + m["W"][i] * y
    torch.testing.assert_close(mixer(x, values=values), total, rtol=1e-10, atol=1e-11)


def test_poly_nl_with_a_bottleneck_by_its_equation():
    mixer, x, values = MIXERS["poly_nl-4"], tokens(2, N, DIM), tokens(2, N, DIM, seed=1)
    m = mixer.matrices(N)
    inner, other = x @ m["W_in"] + m["b_in"], values @ m["W_in"] + m["b_in"]
    mean = ((inner @ m["W_1"] + m["b_1"]) * (other @ m["W_2"] + m["b_2"])).mean(1, keepdim=True)
    y = (mean * inner) @ m["W_3"] + m["b_3"] + (inner @ m["W_p"] + m["b_p"]) * inner
    expected = (m["alpha"] * inner + m["beta"] * y) @ m["W_out"] + m["b_out"]
    torch.testing.assert_close(mixer(x, values=values), expected, rtol=1e-10, atol=1e-11)


def test_pom_gates_by_the_queries_and_pools_the_values():
    mixer, x, context, values = MIXERS["pom"], *(tokens(2, N, DIM, seed=seed) for seed in range(3))
    m = mixer.matrices(N)
    h = F.gelu(values @ m["W_h"] + m["b_h"])
    pooled = sum(m["alpha"][:, p] * h ** (p + 1) for p in range(2)).mean(1, keepdim=True)
    expected = (torch.sigmoid(x @ m["W_s"] + m["b_s"]) * pooled) @ m["W_o"] + m["b_o"]
    torch.testing.assert_close(mixer(x, context, values=values), expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("key", ALONE)
def test_a_mixer_with_one_input_refuses_values(key):
    x = tokens(2, N, DIM)
    with pytest.raises(CapabilityError, match="values from another input"):
        MIXERS[key](x, values=x)


def test_refusals():
    x, mixer = tokens(2, N, DIM), MIXERS["qt"]
    with pytest.raises(ShapeError, match=r"`values`.*one value for each key"):
        mixer(x, values=x[:, 1:])
    with pytest.raises(ShapeError, match="`values`"):
        mixer(x, values=x[..., 1:])
    for name, impl in (("qt", "native"), ("padre", "native"), ("poly_sa", "blocked"), ("poly_nl", "native")):
        options = {"positions": "mean"} if name == "poly_sa" else {}
        named = polymix.create_mixer(name, DIM, impl=impl, **options)
        with torch.no_grad(), pytest.raises(CapabilityError, match="same tokens"):
            named(x.float(), values=x.float())


@pytest.mark.parametrize("name", ["padre", "pom", "qt", "poly_nl", "poly_sa", "softmax"])
def test_many_tokens_in_every_way_of_running(name):
    """Where "auto" prefers a kernel for x alone: with and without gradients, compiled, under autocast."""
    options = {"positions": "mean"} if name == "poly_sa" else {}
    mixer = polymix.create_mixer(name, 32, **options)
    x, values = tokens(2, 600, 32, dtype=torch.float32), tokens(2, 600, 32, seed=1, dtype=torch.float32)
    expected = deepcopy(mixer).double()(x.double(), values=values.double()).float()
    with torch.no_grad():
        torch.testing.assert_close(mixer(x, values=values), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mixer(x, values=values), expected, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, v: mixer(x, values=v), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, values), expected, rtol=1e-4, atol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (mixer(x, values=values).float() - expected).norm() < 0.1 * expected.norm()
