"""Power attention: its features, its relation to qt, its gates, and what it refuses."""

import math
from itertools import combinations_with_replacement

import pytest
import torch

import polymix
from polymix.errors import CapabilityError, MaskError, OptionError
from polymix.mixers.related.power import PowerConfig
from polymix.ops.qt.eager import moments, query, taylor_features
from polymix.ops.shared.symmetric import symmetric_power, symmetric_size
from tests.helpers import build, close, tokens


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("d", [1, 4, 5])
def test_features_are_the_weighted_monomials(d, degree):
    """Each monomial once, in order, with the root of its multinomial weight; their product is the power."""
    q, k = tokens(2, 7, d)
    rows = list(combinations_with_replacement(range(d), degree))
    assert symmetric_size(d, degree) == len(rows) == math.comb(d + degree - 1, degree)
    ways = [math.factorial(degree) / math.prod(math.factorial(row.count(i)) for i in range(d)) for row in rows]
    by_hand = torch.stack([w**0.5 * q[:, row].prod(-1) for w, row in zip(ways, rows, strict=True)], -1)
    close(symmetric_power(q, degree), by_hand, 1e-12)
    close((symmetric_power(q, degree) * symmetric_power(k, degree)).sum(-1), (q * k).sum(-1) ** degree, 1e-10)


def test_qt_adds_half_of_degree_2():
    """The quadratic part of qt's full form, 1 + s + s²/2, is half the sums of power attention of degree 2."""
    q, k, v = tokens(3, 2, 3, 9, 4)
    parts = [query(q, moments(k, v, None, None, "full", order), None, "full", order) for order in (1, 2)]
    power, qt = build("power", 12, heads=3, normalize=False), build("qt", 12, heads=3, form="full")
    y, _ = power.attend(q, k, v)
    close(2 * (parts[1] - parts[0])[..., :-1] / 9, y, 1e-12)
    close(symmetric_power(q * 4**-0.25, 2), 2**0.5 * taylor_features(q, "full", 2)[..., 5:], 1e-12)
    ours, theirs = (set(mixer.matrices(9)) - {"alpha", "beta", "gamma"} for mixer in (power, qt))
    assert ours == theirs, "the matrices have other names than qt's"


def test_open_gates_change_nothing_and_closed_ones_forget():
    """γ = 1 is power attention without gates; γ = 0 leaves every token its own value."""
    gated, plain, x = build("power", 12, heads=3, gate=True), build("power", 12, heads=3), tokens(2, 150, 12)
    plain.load_state_dict({k: v for k, v in gated.state_dict().items() if not k.startswith("gate")})
    with torch.no_grad():
        gated.gate.weight.zero_()
        gated.gate.bias.fill_(60.0)
        close(gated(x), plain(x, causal=True), 1e-11)
        gated.gate.bias.fill_(-800.0)
        close(gated(x), plain(x.reshape(-1, 1, 12)).view_as(x), 1e-11)


def test_gradients_of_the_gated_form():
    mixer, x = build("power", 6, heads=2, gate=True), 0.5 * tokens(1, 7, 6).requires_grad_()
    mask = torch.tensor([[True, True, False, True, True, False, True]])
    assert torch.autograd.gradcheck(lambda x: mixer(x, mask=mask)[mask], (x,), fast_mode=True)
    assert torch.autograd.gradgradcheck(mixer, (x,), fast_mode=True)
    mixer(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in mixer.parameters())


@pytest.mark.slow
def test_gates_compile_export_and_run_under_autocast():
    mixer, x = build("power", 12, heads=3, gate=True).float(), tokens(2, 40, 12, dtype=torch.float32)
    y = mixer(x)
    torch._dynamo.reset()
    close(torch.compile(mixer, fullgraph=True, backend="aot_eager")(x), y, 1e-5)
    close(torch.export.export(mixer, (x,)).module()(x), y, 1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        close(mixer(x).float(), y, 0.05)


@pytest.mark.parametrize("causal", [False, True])
def test_features_and_pairs_agree(causal):
    """Few tokens are summed pair by pair, many by features: with padding, a context and gradients it is the same."""
    pairs, features = (build("power", 12, heads=2, degree=4, impl=impl) for impl in ("auto", "eager"))
    mask, context = torch.arange(11).expand(2, 11) < torch.tensor([[11], [6]]), tokens(2, 11, 12, seed=1)
    for call in (lambda mixer, x: mixer(x, mask=mask, causal=causal), lambda mixer, x: mixer(x, context, mask=mask)):
        inputs = [tokens(2, 11, 12).requires_grad_() for _ in "ab"]
        outputs = [call(mixer, x) for mixer, x in zip((pairs, features), inputs, strict=True)]
        close(*outputs, 1e-11)
        close(*(torch.autograd.grad(y.sum(), x)[0] for y, x in zip(outputs, inputs, strict=True)), 1e-10)


def test_what_power_refuses():
    with pytest.raises(OptionError, match=r"may sum to zero.*normalize=False"):
        PowerConfig(degree=3)
    for degree in (1, 5, 2.5):
        with pytest.raises(OptionError, match="degree"):
            PowerConfig(degree=degree)
    gated, x = build("power", 12, heads=3, gate=True), tokens(1, 5, 12)
    with pytest.raises(MaskError, match="gate=False"):
        gated(x, causal=False)
    with pytest.raises(CapabilityError, match="context"):
        gated(x, tokens(1, 4, 12))
    with pytest.raises(polymix.errors.OptionError, match="heads"):
        polymix.create_mixer("power", 12, heads=5)
