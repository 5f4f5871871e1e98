"""What a token must not see must not show in any mixer, however large or broken: padding, the future, other segments."""

import pytest
import torch

from tests.contracts.mixer_cases import CASES
from tests.helpers import build, close, tokens

MIXERS = {key: build(name, 12, **options).float() for key, (name, options) in CASES.items()}
PADDED = [key for key, mixer in MIXERS.items() if mixer.capabilities.has("padding")]
REAL = torch.ones(2, 12, dtype=torch.bool)
REAL[0, 8:] = REAL[1, :2] = False


def ways(mixer):
    """The kinds of calls that take padding: (with a separate context, keyword arguments)."""
    yield False, {}
    if mixer.capabilities.causal and not mixer.config.causal_by_build:
        yield False, {"causal": True}
    if mixer.capabilities.cross or mixer.capabilities.keys:
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
        filled, expected = (outcome(MIXERS[key], filling, *way) for filling in (value, 0.0))
        assert all(part.isfinite().all() for part in expected)
        assert all(torch.equal(a, b) for a, b in zip(filled, expected, strict=True)), way


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


CAUSAL = {key: mixer for key, mixer in MIXERS.items() if mixer.capabilities.causal}


@pytest.mark.parametrize("key", list(CAUSAL))
@pytest.mark.parametrize("recorded", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_future_is_isolated_where_that_is_declared(key, recorded, value):
    """And nowhere else, so that the declaration says as much as is true."""
    mixer, ways = CAUSAL[key], [True, *([3] if CAUSAL[key].capabilities.has("block_causal") else [])]
    lengths = (12,) if mixer.capabilities.grids == (2,) else (12, 300)
    isolated = True
    with torch.set_grad_enabled(recorded):
        for n in lengths:
            x = tokens(1, n, 12, dtype=torch.float32)
            broken = torch.cat((x[:, :-1], torch.full_like(x[:, -1:], value)), dim=1)
            for causal in ways:
                y, found = (mixer(part, causal=causal)[:, : n - int(causal)] for part in (x, broken))
                isolated = isolated and bool(found.isfinite().all())
                if mixer.capabilities.isolates_future:
                    close(found, y, 1e-6)
    assert isolated == mixer.capabilities.isolates_future


PACKED = {key: mixer for key, mixer in MIXERS.items() if mixer.capabilities.has("segments")}


@pytest.mark.parametrize("key", list(PACKED))
def test_segments_are_isolated_where_that_is_declared(key):
    """Outputs, and gradients of the inputs; and nowhere else, so that the declaration says as much as is true."""
    mixer, ids = PACKED[key], torch.tensor([[0] * 5 + [1] * 7])
    ways = [None, *([True] if mixer.capabilities.causal else [])]
    ways += [3] if mixer.capabilities.has("block_causal") and not mixer.config.causal_by_build else []
    isolated, x = True, tokens(1, 12, 12, dtype=torch.float32)
    for value in (float("nan"), float("inf"), 1e20):
        for causal in ways:
            broken = torch.cat((x[:, :5], torch.full_like(x[:, 5:], value)), dim=1).requires_grad_()
            y = mixer(broken, segments=ids, causal=causal)[:, :5]
            expected = mixer(x, segments=ids, causal=causal)[:, :5]
            grad = torch.autograd.grad(y.sum(), broken)[0][:, :5]
            isolated = isolated and bool(grad.isfinite().all()) and torch.allclose(y, expected, rtol=1e-4, atol=1e-5)
    assert isolated == mixer.capabilities.isolates_segments


CHOOSY = [key for key, mixer in PACKED.items() if mixer.capabilities.has("arbitrary")]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e20])
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("key", CHOOSY)
def test_what_no_query_sees_reaches_no_output_and_no_gradient(key, cross, value):
    """A mask for each query that leaves the last four tokens to none, as padding under another name."""
    mixer, x = PACKED[key], tokens(2, 12, 12, dtype=torch.float32)
    if cross and not mixer.capabilities.cross:
        return
    mask = tokens(2, 12, 12, seed=3) > -0.5
    mask[:, :, 8:], mask[:, :, 0] = False, True

    def outcome(filling):
        source = torch.cat((x[:, :8], torch.full_like(x[:, 8:], filling)), dim=1).requires_grad_()
        y = mixer(x, source, mask=mask) if cross else mixer(source, mask=mask)[:, :8]
        grads = torch.autograd.grad(y.square().sum(), [source, *mixer.parameters()], allow_unused=True)
        return [y.detach(), *(grad for grad in grads if grad is not None)]

    for found, expected in zip(outcome(value), outcome(0.0), strict=True):
        assert torch.equal(found, expected)
