"""lens.degree on functions whose degree is known, on near-misses, and on what is no polynomial at all."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from polymix import lens
from tests.helpers import build, tokens

SHAPE = (1, 2, 3)


def product(degree, seed):
    """A homogeneous polynomial: Π of `degree` linear maps of the six entries; a constant at degree 0."""
    weights = tokens(max(degree, 1), 6, 6, seed=seed)

    def function(x):
        y = torch.ones_like(x).flatten(1)
        for weight in weights[:degree]:
            y = y * (x.flatten(1) @ weight)
        return y

    return function


@pytest.mark.slow
@given(degree=st.integers(0, 8), lower=st.sets(st.integers(0, 7), max_size=3), seed=st.integers(0, 1000))
def test_random_polynomials(degree, lower, seed):
    parts = [product(d, seed + d) for d in sorted({degree, *(d for d in lower if d < degree)})]
    result = lens.degree(lambda x: sum(part(x) for part in parts), shape=SHAPE, seed=seed)
    assert (result.degree, result.homogeneous, result.rational) == (degree, len(parts) == 1, None), result.explain()


@pytest.mark.parametrize(("function", "degree"), [
    (lambda x: x**3 + 1e-6 * x**5, 5), (lambda x: x**3 + 1e-6 * x**4, 4), (lambda x: x + 1e-9 * x**2, 2),
    (lambda x: x**2 + 1e-6 * x.sum() ** 3, 3), (lambda x: torch.cat((x, x**4), -1), 4), (lambda x: (1e6 + x**3) - 1e6, 3),
    (lambda x: x**16 - x, 16), (lambda x: 0 * x, 0), (lambda x: 0 * x + 3, 0), (lambda x: x.sum(), 1),
    (lambda x: (x**2, x**5), 2), (lambda x: [x, None], 1), (lambda x: torch.complex(x, x**2), 2),
    (lambda x: (x.float() ** 2).double(), 2),
])  # fmt: skip
def test_faint_and_odd_polynomials(function, degree):
    result = lens.degree(function, shape=(1, 5))
    assert result.degree == degree, result.explain()


@pytest.mark.parametrize("omega", [0.05, 0.3, 1.0, 7.0, 30.0, 1e3, 1e5])
@pytest.mark.parametrize("power", [1, 3])
def test_near_misses(omega, power):
    """A polynomial plus a millionth of a sine is none, however slow or fast the sine is."""
    result = lens.degree(lambda x: x**power + 1e-6 * torch.sin(omega * x), shape=(1, 5))
    assert result.degree is None and not result.rational and not result.homogeneous, result.explain()


@pytest.mark.parametrize("miss", [torch.tanh, torch.relu, torch.abs, F.gelu, torch.exp, torch.round])
def test_other_near_misses(miss):
    result = lens.degree(lambda x: x**3 + 1e-6 * miss(x), shape=(1, 5))
    assert result.degree is None and not result.rational, result.explain()


NONE = {
    "softmax": lambda x: x.softmax(-1), "log_softmax": lambda x: x.log_softmax(-1), "tanh": torch.tanh, "gelu": F.gelu, "relu": torch.relu,
    "silu": F.silu, "sigmoid": torch.sigmoid, "softplus": F.softplus, "elu": F.elu, "abs": torch.abs, "exp": torch.exp, "sin": torch.sin,
    "slow exp": lambda x: torch.exp(0.01 * x), "slow sine": lambda x: torch.sin(0.003 * x), "root": lambda x: (1 + x * x).sqrt(),
    "rms": lambda x: F.rms_norm(x, (5,)), "layer": lambda x: F.layer_norm(x, (5,)), "norm": lambda x: x / x.norm(dim=-1, keepdim=True),
    "clamp": lambda x: x.clamp(-6, 6), "wide clamp": lambda x: x.clamp(-600, 600), "sort": lambda x: x.sort(-1)[0], "round": torch.round,
    "hardsigmoid": F.hardsigmoid, "relu squared": lambda x: torch.relu(x) ** 2, "l1": lambda x: x / x.abs().sum(-1, keepdim=True),
}  # fmt: skip


@pytest.mark.parametrize("name", list(NONE))
def test_what_is_neither_polynomial_nor_rational(name):
    result = lens.degree(NONE[name], shape=(1, 5))
    assert (result.degree, result.homogeneous, result.rational) == (None, False, None), result.explain()
    assert "neither a polynomial nor a quotient" in str(result)


@pytest.mark.parametrize(("function", "says"), [
    (torch.log, "not finite"), (lambda x: x / 0, "not finite"), (lambda x: (100 - x * x).sqrt(), "not finite"),
    (lambda x: x + torch.rand(1), "different outputs"), (lambda x: x[:, :0], "no output"),
    (lambda x: x**17, "polynomial of degree 17"), (lambda x: x**40, "No polynomial of degree 16 or less"),
])  # fmt: skip
def test_the_reason_is_said(function, says):
    result = lens.degree(function, shape=(1, 5))
    assert result.degree is None
    assert says in result.evidence.reason
    assert says in result.explain()


def test_a_higher_degree_when_asked_for():
    assert lens.degree(lambda x: x**40, shape=(1, 3), max_degree=40).degree == 40


def test_a_tiny_constant_breaks_homogeneity():
    assert lens.degree(lambda x: x**3, shape=(1, 3)).homogeneous
    assert not lens.degree(lambda x: x**3 + 1e-10, shape=(1, 3)).homogeneous
    assert lens.degree(lambda x: (x[..., :1] ** 3 - x[..., 1:2] ** 3) * 1e-9, shape=(1, 3)).homogeneous


@pytest.mark.parametrize(("options", "degree", "homogeneous"), [
    ({"degree": 8, "grid": (3, 4), "kernel_size": 3}, 8, False), ({"degree": 8, "bias": False, "terms": (8,)}, 8, True),
    ({"degree": 5, "bias": False}, 5, False),
])  # fmt: skip
def test_padre_of_high_degree(options, degree, homogeneous):
    result = lens.degree(build("padre", 6, **options))
    assert (result.degree, result.homogeneous) == (degree, homogeneous), result.explain()


def test_the_evidence():
    result = lens.degree(lambda x: x**3, shape=(1, 5), lines=2, max_degree=6)
    evidence = result.evidence
    assert list(evidence.residual) == list(range(7))
    assert evidence.excess[3] <= 1 < 1e6 < evidence.excess[2]
    assert evidence.residual[3] <= evidence.tolerance < 1e-11
    assert evidence.noise < 1e-14
    assert (evidence.lines, evidence.outputs, evidence.shape, evidence.needed) == (2, 5, (1, 5), (3,) * 6)
    assert "degree 3" in str(result)
    assert "1024: 3" in result.explain()
