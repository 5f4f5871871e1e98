"""`values=`: the map that starts from the attention's W_v reads the values, and every other map reads x or the context."""

from copy import deepcopy

import pytest
import torch

from polymix.errors import CapabilityError
from tests.contracts.mixer_cases import CASES
from tests.helpers import build, tokens

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
    if can.cross or can.keys:
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
        output = mixer(x, context, values=source * SCALES, **options)
        torch.testing.assert_close(output, scaled(x, context, **options), rtol=1e-9, atol=1e-10)
        assert not torch.allclose(output, mixer(x, context, **options)), "the values play no part"


@pytest.mark.parametrize("key", APART)
def test_values_that_are_the_keys_input_change_nothing(key):
    mixer, x, other = MIXERS[key], tokens(2, N, DIM), tokens(2, N, DIM, seed=1)
    for options, cross in calls(mixer):
        context = other if cross else None
        output = mixer(x, context, values=(other if cross else x).clone(), **options)
        torch.testing.assert_close(output, mixer(x, context, **options), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("key", [key for key in APART if MIXERS[key].capabilities.has("padding")])
def test_broken_values_in_padding_reach_nothing(key):
    mixer = deepcopy(MIXERS[key]).float()
    x, values = (tokens(2, N, DIM, seed=seed, dtype=torch.float32) for seed in (0, 1))

    def outcome(filling):
        leaves = [t.masked_fill(~REAL[..., None], filling).requires_grad_() for t in (x, values)]
        y = mixer(leaves[0], mask=REAL, values=leaves[1])[REAL]
        gradients = torch.autograd.grad(y.square().sum(), (*leaves, *mixer.parameters()), allow_unused=True)
        return [y, *(grad for grad in gradients if grad is not None)]

    for gradients, expected in zip(outcome(float("nan")), outcome(0.0), strict=True):
        assert torch.equal(gradients, expected)


@pytest.mark.parametrize("key", ALONE)
def test_a_mixer_with_one_input_refuses_values(key):
    x = tokens(2, N, DIM)
    with pytest.raises(CapabilityError, match="values from another input"):
        MIXERS[key](x, values=x)
