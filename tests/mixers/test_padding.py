"""Whatever values stand in padding, outputs of real tokens and all gradients are those of padding with zeros."""

import pytest
import torch

from tests.helpers import build, tokens
from tests.mixers.cases import CASES

MIXERS = {key: build(name, 12, **options).float() for key, (name, options) in CASES.items()}
PADDED = [key for key, mixer in MIXERS.items() if mixer.capabilities.has("padding")]
REAL = torch.ones(2, 12, dtype=torch.bool)
REAL[0, 8:] = REAL[1, :2] = False


def ways(mixer):
    """The kinds of calls that take padding: (with a separate context, keyword arguments)."""
    yield False, {}
    if mixer.capabilities.causal and not mixer.config.causal_by_build:
        yield False, {"causal": True}
    if mixer.capabilities.cross:
        yield True, {}


def outcome(mixer, value, cross, options):
    """Outputs of real tokens, gradients of inputs and of parameters, with `value` in all padded channels."""
    padded = tokens(2, 12, 12, dtype=torch.float32).masked_fill(~REAL[..., None], value).requires_grad_()
    inputs = (tokens(2, 12, 12, seed=1, dtype=torch.float32).requires_grad_(), padded) if cross else (padded,)
    y = mixer(*inputs, mask=REAL, **options)
    y = y if cross else y[REAL]
    parameters = list(mixer.parameters())
    gradients = torch.autograd.grad(y.square().sum(), (*inputs, *parameters), allow_unused=True)
    return [y.detach(), *(grad for grad in gradients if grad is not None)]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e20])
@pytest.mark.parametrize("key", PADDED)
def test_values_in_padding_reach_no_output_and_no_gradient(key, value):
    for way in ways(MIXERS[key]):
        found, expected = (outcome(MIXERS[key], filling, *way) for filling in (value, 0.0))
        assert all(part.isfinite().all() for part in expected)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), way


RECURRENT = [key for key in PADDED if MIXERS[key].capabilities.recurrent]


@pytest.mark.parametrize("key", RECURRENT)
def test_values_in_padding_reach_no_state(key):
    mixer, x = MIXERS[key], tokens(2, 12, 12, dtype=torch.float32)

    def run(value):
        padded = x.masked_fill(~REAL[..., None], value)
        y, state = mixer.prefill(padded, mask=REAL)
        after, _ = mixer.step(x[:, 0], state)
        return [*torch.autograd.grad(after.sum() + y[REAL].sum(), list(mixer.parameters()), allow_unused=True), after]

    for found, expected in zip(run(float("nan")), run(0.0), strict=True):
        assert (found is None and expected is None) or torch.equal(found, expected)
