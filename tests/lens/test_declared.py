"""Mixers with options of all kinds are of the degree that they declare."""

import pytest

from polymix import lens
from polymix.lens.overview import declared
from tests.helpers import build


@pytest.mark.parametrize(("name", "options", "degree", "homogeneous"), [
    ("linear_floor", {"bias": False}, 1, True), ("qt", {"order": 0, "bias": False}, 1, True),
    ("pom", {"degree": 3, "activation": "identity", "gate": "identity"}, 4, False),
    ("pom", {"degree": 1, "activation": "identity", "gate": "identity", "bias": False}, 2, True),
    ("pom", {"activation": "identity", "gate": "identity", "rotary": "2d"}, 3, False), ("poly_nl", {"order": 2}, 2, False),
    ("poly_sa", {"sigma": "identity", "grid": (14, 14), "bias": False, "num_prefix_tokens": 2}, 3, True),
    ("poly_sa", {"sigma": "identity", "positions": "mean"}, 3, False), ("padre", {"degree": 4, "terms": (4,), "bias": False}, 4, True),
    ("padre", {"grid": (64, 64), "num_prefix_tokens": 1}, 2, False), ("padre", {"grid": (3, 3), "weight": "full", "kernel_size": 3}, 2, False),
])  # fmt: skip
def test_other_options(name, options, degree, homogeneous):
    mixer = build(name, 8, **options)
    says, found = declared(mixer), lens.degree(mixer)
    assert (found.degree, found.homogeneous) == (degree, homogeneous), found.explain()
    assert (says.degree, says.homogeneous) == (degree, homogeneous)


@pytest.mark.parametrize("call", [{"causal": True}, {"causal": 3}])
def test_in_the_ways_that_it_can_be_called(call):
    mixer = build("pom", 4, activation="identity", gate="identity")
    assert lens.degree(mixer, **call).degree == 3


def test_a_trained_alpha_is_seen():
    mixer = build("poly_nl", 4, bias=False)
    assert not lens.degree(mixer).homogeneous
    mixer.alpha.data.zero_()
    assert lens.degree(mixer).homogeneous
    assert declared(mixer).homogeneous
