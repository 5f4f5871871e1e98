"""`values=` in single mixers: their equations, what they refuse, and every way of running."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F

import polymix
from polymix.errors import CapabilityError, ShapeError
from tests.contracts.mixer_cases import CASES
from tests.helpers import build, tokens

DIM, N = 12, 12
EXTRA = {"padre-heads": ("padre", {"degree": 3, "heads": 2, "grid": (3, 4), "kernel_size": 3})}
PADRE = ["padre-1", "padre-2", "padre-1d", "padre-causal", "padre-structures", "padre-tied", "padre-heads"]


@pytest.mark.parametrize("key", PADRE)
def test_padre_by_its_equation(key):
    """Z_{i+1} = C_i (Z_i D_i) ⊙ Y_{i+1} with Y_d = A_d V B_d and Y_i = A_i X B_i before it."""
    name, options = {**CASES, **EXTRA}[key]
    mixer, x, values = build(name, DIM, **options), tokens(2, N, DIM), tokens(2, N, DIM, seed=1)
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
    mixer, x, values = build("poly_nl", DIM, reduction=4, order="2+3"), tokens(2, N, DIM), tokens(2, N, DIM, seed=1)
    m = mixer.matrices(N)
    inner, other = x @ m["W_in"] + m["b_in"], values @ m["W_in"] + m["b_in"]
    mean = ((inner @ m["W_1"] + m["b_1"]) * (other @ m["W_2"] + m["b_2"])).mean(1, keepdim=True)
    y = (mean * inner) @ m["W_3"] + m["b_3"] + (inner @ m["W_p"] + m["b_p"]) * inner
    expected = (m["alpha"] * inner + m["beta"] * y) @ m["W_out"] + m["b_out"]
    torch.testing.assert_close(mixer(x, values=values), expected, rtol=1e-10, atol=1e-11)


def test_pom_gates_by_the_queries_and_pools_the_values():
    mixer, x, context, values = build("pom", DIM), *(tokens(2, N, DIM, seed=seed) for seed in range(3))
    m = mixer.matrices(N)
    h = F.gelu(values @ m["W_h"] + m["b_h"])
    pooled = sum(m["alpha"][:, p] * h ** (p + 1) for p in range(2)).mean(1, keepdim=True)
    expected = (torch.sigmoid(x @ m["W_s"] + m["b_s"]) * pooled) @ m["W_o"] + m["b_o"]
    torch.testing.assert_close(mixer(x, context, values=values), expected, rtol=1e-10, atol=1e-11)


def test_refusals():
    x, mixer = tokens(2, N, DIM), build("qt", DIM, heads=3)
    with pytest.raises(ShapeError, match=r"`values`.*one value for each key"):
        mixer(x, values=x[:, 1:])
    with pytest.raises(ShapeError, match="`values`"):
        mixer(x, values=x[..., 1:])
    with pytest.raises(ShapeError, match=r"`context`.*a key in each place of x"):
        build("poly_sa", DIM, positions="mean")(x, x[:, 1:])
    for name, impl in (("qt", "native"), ("padre", "native"), ("poly_sa", "blocked"), ("poly_nl", "native")):
        options = {"positions": "mean"} if name == "poly_sa" else {}
        named = polymix.create_mixer(name, DIM, impl=impl, **options)
        with torch.no_grad(), pytest.raises(CapabilityError, match="same tokens"):
            named(x.float(), values=x.float())
    for impl in ("blocked", "native"):
        named = polymix.create_mixer("poly_sa", DIM, impl=impl, positions="mean")
        with torch.no_grad(), pytest.raises(CapabilityError, match="same tokens"):
            named(x.float(), x.float() + 1)


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
