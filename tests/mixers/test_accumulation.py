"""Gradients accumulated over the two halves of a batch are those of the whole batch."""

import pytest

from tests.helpers import build, tokens
from tests.mixers.cases import CASES

# A bias that shifts all logits of a query alike: the softmax cancels it, and what is left of its gradient is rounding.
IDLE = {"non_local": "layer.p.bias", "gc": "layer.conv_attn.bias"}


def gradients(mixer, x, weight, parts):
    mixer.zero_grad()
    for part in parts:
        (mixer(x[part]) * weight[part]).sum().backward()
    return {name: p.grad.clone() for name, p in mixer.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("key", CASES)
def test_two_halves_make_the_gradient_of_the_whole(key):
    name, options = CASES[key]
    mixer, x, weight = build(name, 12, **options), tokens(4, 12, 12), tokens(4, 12, 12, seed=5)
    whole = gradients(mixer, x, weight, [slice(0, 4)])
    halves = gradients(mixer, x, weight, [slice(0, 2), slice(2, 4)])
    largest = max(grad.norm() for grad in whole.values())
    assert whole.keys() == halves.keys()
    for parameter, grad in whole.items():
        if parameter == IDLE.get(key):
            assert max(grad.norm(), halves[parameter].norm()) < 1e-14 * largest, "more than rounding"
        else:
            assert (grad - halves[parameter]).norm() <= 1e-10 * grad.norm(), parameter
