"""Quotients of two polynomials: found with their degrees, and nothing else is taken for one."""

import pytest
import torch

from polymix import lens
from tests.helpers import build, tokens

ROWS = tokens(4, 5, seed=3)


def linear(i):
    return lambda x: (x * ROWS[i]).sum(-1, keepdim=True)


@pytest.mark.parametrize(("function", "degrees"), [
    (lambda x: 1 / (1 + x * x), (0, 2)), (lambda x: 1 / x, (0, 1)), (lambda x: x / (2 + x**2), (1, 2)),
    (lambda x: (x**3 + 1) / (1 + x**8), (3, 8)), (lambda x: x**5 / (1 + x**4), (5, 4)), (lambda x: x + 1e-6 / (1 + x * x), (3, 2)),
    (lambda x: linear(0)(x) * linear(1)(x) / (1 + linear(2)(x) ** 2), (2, 2)),
    (lambda x: linear(0)(x) / (1 + linear(1)(x) ** 2) + linear(2)(x) / (1 + linear(3)(x) ** 2), (3, 4)),
    (lambda x: torch.cat((1 / (1 + x**2), 1 / (2 + x**4)), -1), (0, 4)),  # each output its own denominator
    (lambda x: x * x.sum(-1, keepdim=True) ** 2 / (1e-6 + x.square().sum(-1, keepdim=True) ** 2), (3, 4)),
])  # fmt: skip
def test_degrees(function, degrees):
    result = lens.degree(function, shape=(1, 5))
    assert (result.degree, result.rational) == (None, degrees), result.explain()
    assert str(result) == f"not a polynomial: rational, degree {degrees[0]} over degree {degrees[1]}"


@pytest.mark.parametrize(("heads", "form"), [(1, "compact"), (1, "full"), (2, "full")])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_qt(heads, form, seed):
    """A head is of degree 5 over degree 4; W_o brings the heads to a common denominator."""
    result = lens.degree(build("qt", 8, heads=heads, form=form), seed=seed)
    assert result.rational == (4 * heads + 1, 4 * heads), result.explain()


@pytest.mark.parametrize("function", [lambda x: (x**2 - 1) * (x + 2), lambda x: (x**4 - 1) / (x**2 + 1)])
def test_a_quotient_that_is_a_polynomial_is_one(function):
    result = lens.degree(function, shape=(1, 5))
    assert result.degree is not None
    assert not result.rational


def test_it_can_be_left_out():
    result = lens.degree(lambda x: 1 / (1 + x * x), shape=(1, 5), max_rational=0)
    assert result.degree is None
    assert result.rational is None
