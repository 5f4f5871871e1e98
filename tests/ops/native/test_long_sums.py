"""Sums over a million tokens keep the digits of float32, wherever the tokens lie."""

import pytest
import torch

from polymix.ops.gated import linear_gated
from polymix.ops.padre import padre_step
from polymix.ops.pom import linear_powers
from polymix.ops.pooled import linear_pairs, linear_scaled, moments
from polymix.ops.qt import qt_pool, qt_spread
from tests.helpers import slow_but, tokens
from tests.ops.kernels import needs_it, relative_error

pytestmark = needs_it
N, D = 1_000_000, 3


def cases(x):
    """The arguments of each operator for tokens x (1, N, D)."""
    w, b, gate = tokens(D, D, seed=1) / 2, tokens(D, seed=2), tokens(1, D, seed=3)
    last, last_b = tokens(D, D, seed=4), tokens(D, seed=5)
    sums = tokens(1, 1, 1 + 2 * D, D + 1, seed=6).abs()
    return {
        "powers": (linear_powers, (x, w, b, None, "gelu", 2)),
        "pairs": (linear_pairs, (x, torch.cat((w, last)), torch.cat((b, last_b)), None, None)),
        "gated": (linear_gated, (x, w, b, gate, None, last, last_b, "gelu")),
        "scaled": (linear_scaled, (x, gate, w, b, torch.tensor(0.7))),
        "moments": (moments, (x, None)),
        "qt_pool": (qt_pool, (x, torch.cat((w, last)), torch.cat((b, last_b)), None, 1, 2)),
        "qt_spread": (qt_spread, (x, w, b, sums + 1.0, torch.full((1,), 0.9), last, last_b)),
        "padre_step": (padre_step, (x, tokens(D, 1, 3, 3, seed=7), b, 1.0 + 0.1 * tokens(1, N, D, seed=8), [1000, 1000], False, 1)),
    }  # fmt: skip


def results(operator, args, impl, dtype):
    """The outputs, and the gradients by name, for cotangents around 1."""
    leaves = [
        a.detach().to(dtype).requires_grad_(i in operator.wrt) if isinstance(a, torch.Tensor) else a
        for i, a in enumerate(args)
    ]
    out = operator(*leaves, impl=impl)
    out = out if isinstance(out, tuple) else (out,)
    wrt = {operator.names[i]: leaves[i] for i in operator.wrt if leaves[i] is not None}
    cotangents = [(1.0 + 0.1 * tokens(*y.shape, seed=9)).float().to(dtype) for y in out]
    grads = torch.autograd.grad(out, wrt.values(), cotangents)
    return {**{f"output {i}": y.detach() for i, y in enumerate(out)}, **dict(zip(wrt, grads, strict=True))}


@pytest.mark.parametrize("name", slow_but(("powers", "moments", "qt_pool", "qt_spread"), cases(torch.zeros(1, 1, D))))
def test_a_million_tokens_with_a_mean(name):
    """Tokens with a mean of 1 and a deviation of 0.1: a running float32 sum was off by 2e-5 to 6e-4."""
    operator, args = cases((1.0 + 0.1 * tokens(1, N, D)).float())[name]
    args = [a.float() if isinstance(a, torch.Tensor) else a for a in args]
    exact, ours = results(operator, args, "eager", torch.float64), results(operator, args, "native", torch.float32)
    for part, value in ours.items():
        assert relative_error(value, exact[part]) < 2e-6, f"{part}: a sum over tokens loses digits"


@pytest.mark.parametrize("name", ["powers", "gated", "moments", "padre_step"])
def test_a_million_equal_tokens(name):
    """Roundings of equal terms all go the same way; a running float32 sum drifts."""
    operator, args = cases(torch.full((1, N, D), 1.1))[name]
    args = [a.float() if isinstance(a, torch.Tensor) else a for a in args]
    exact, ours = results(operator, args, "eager", torch.float64), results(operator, args, "native", torch.float32)
    scale = args[0].double().square().sum() if name == "moments" else None  # the second moment itself is zero
    for part, value in ours.items():
        error = (value.double() - exact[part]).abs().max() / (scale or exact[part].abs().max())
        assert error < 1e-5, f"{part}: a sum over tokens loses digits"


@pytest.mark.parametrize("mean", [0.0, 1e4, -3e5])
@pytest.mark.parametrize("masked", [False, True])
def test_moments_of_tokens_far_from_zero(mean, masked):
    """The gradient is that of distances to the mean, so it must not be a difference of large products."""
    x = (mean + tokens(2, 700, 20)).float()
    mask = tokens(2, 700, seed=1) < 0.5 if masked else None
    if masked:
        x[~mask] = torch.nan
    results = []
    for impl, dtype in (("native", torch.float32), ("eager", torch.float64)):
        leaf = x.to(dtype).requires_grad_()
        centre, moment = moments(leaf, mask, impl=impl)
        cotangents = tokens(2, 20, seed=2).to(dtype), tokens(2, 20, 20, seed=3).to(dtype)
        results.append((centre, moment, *torch.autograd.grad((centre, moment), leaf, cotangents)))
    (centre, moment, grad), (right_centre, right_moment, right_grad) = results
    assert relative_error(centre, right_centre) < 1e-6
    assert relative_error(moment, right_moment) < 2e-6 + 1e-13 * mean**2
    assert relative_error(grad, right_grad) < 2e-6
