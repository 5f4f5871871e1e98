"""The distance of two maps of sequences (PoM, Eq. 10), and what no equivariant map can be near to (Theorem 3.2)."""

import math

import pytest
import torch

from polymix import PolyMorpher, lens
from polymix.errors import OptionError, ShapeError
from tests.helpers import build


@pytest.mark.parametrize("p", [1, 2, 3])
def test_it_is_the_integral_of_equation_10(p):
    """f(X) - g(X) = X over [0, 1]^6: ∫ Σ |x|^p = 6 / (p + 1)."""
    found = lens.distance(lambda x: 2 * x, lambda x: x, p=p, shape=(1, 3, 2), draws=200_000)
    exact = (6 / (p + 1)) ** (1 / p)
    assert abs(found.value - exact) < 5 * found.error + 1e-12, str(found)
    assert float(found) == found.value and f"d_{p}" in str(found)


def test_the_volume_of_the_cube_counts():
    """Over [-1, 1]^6 the constant 1 on six numbers is (2^6 · 6)^(1/p) from zero."""
    found = lens.distance(torch.ones_like, torch.zeros_like, p=2, shape=(1, 3, 2), low=-1.0, draws=10)
    assert found.value == pytest.approx((2**6 * 6) ** 0.5) and found.error == 0


def test_the_largest_difference():
    found = lens.distance(lambda x: x, lambda x: x - x[:, :1], p=math.inf, shape=(1, 3, 2), draws=1000)
    assert 0.99 < found.value <= 1 and "at least" in str(found)


def test_a_module_is_at_no_distance_from_itself_and_mixers_need_no_shape():
    assert lens.distance(build("pom", 4), build("pom", 4)).value == 0
    assert lens.distance(build("pom", 4), build("softmax", 4)).value > 1e-2


@pytest.mark.parametrize(("options", "error"), [
    ({"p": 0.5}, OptionError), ({"low": 2.0}, OptionError), ({"draws": 1}, OptionError),
    ({"g": lambda x: x.mean(1)}, ShapeError),
])  # fmt: skip
def test_what_has_no_distance_is_refused(options, error):
    with pytest.raises(error):
        lens.distance(**{"f": lambda x: x, "g": lambda x: x, "shape": (1, 3, 2), **options})


def test_without_positions_no_order_of_the_tokens_is_nearer():
    """Theorem 3.2 needs its positions: P⁻¹ f(P X) of a PolyMorpher is itself, so it is as far from f as from f ∘ P."""

    def shift(x):
        return x.roll(1, 1)

    block = PolyMorpher(2, norm=None)
    swap = torch.tensor([1, 0, 2])
    near = lens.distance(block, shift, shape=(1, 3, 2), draws=512)
    far = lens.distance(block, lambda x: shift(x[:, swap])[:, swap], shape=(1, 3, 2), draws=60_000)
    again = lens.distance(block, shift, shape=(1, 3, 2), draws=60_000)
    assert abs(far.value - again.value) < 5 * (far.error + again.error), "one equivariant map cannot prefer an order"
    apart = lens.distance(shift, lambda x: shift(x[:, swap])[:, swap], shape=(1, 3, 2))
    assert near.value >= apart.value / 2 - 5 * near.error, "the triangle inequality: it is nearer to neither"
