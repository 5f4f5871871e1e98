"""What the kernels' tests share: the exact answer with its gradients, and how far from it a kernel may be."""

import pytest
import torch

from polymix.ops.native import library

NATIVE = library.why_not()
needs_it = pytest.mark.skipif(NATIVE is not None, reason=f"untested: kernels in C: {NATIVE}")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Where eager is near exact. The interpreter cuts off what bfloat16 does not hold, where a GPU rounds: a whole unit in
# the last place instead of half.
FLOOR = {torch.float16: 1e-3, torch.bfloat16: 2**-7 if DEVICE == "cpu" else 1e-3}


def with_gradients(function, grad, *inputs, **fixed):
    """Output, then a gradient for each input, None where it is not given."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves, **fixed)
    grads = iter(torch.autograd.grad(out, [x for x in leaves if x is not None], grad.to(out.dtype)))
    return [out.detach(), *(None if x is None else next(grads) for x in leaves)]


def wide(*inputs):
    return [None if x is None else x.double() for x in inputs]


def error(got, want):
    """Largest difference relative to the largest entry."""
    if not want.numel():
        return 0.0
    return ((got.double() - want.double()).abs().max() / want.abs().max().clamp_min(1e-30)).item()


def twice(plain, want, dtype):
    """Twice what eager code in `dtype` errs, entry by entry of a list of tensors."""
    return [max(2 * error(a, b), FLOOR[dtype]) for a, b in zip(plain, want, strict=True)]


def assert_close(names, got, want, allowed=None):
    for name, a, b, limit in zip(names, got, want, allowed or [1e-4] * len(names), strict=True):
        if b is None:
            assert a is None, f"{name}: there is none to give"
            continue
        assert a.shape == b.shape, f"{name}: shape {tuple(a.shape)}, not {tuple(b.shape)}"
        assert error(a, b) <= limit, f"{name}: off by {error(a, b):.2e} of its largest entry, or never written (nan)"


def assert_same_bits(names, got, want, why):
    for name, a, b in zip(names, got, want, strict=True):
        assert (a is None and b is None) or torch.equal(a, b), f"{name}: {why}"


def doubled(args):
    return tuple(a.double() if isinstance(a, torch.Tensor) else a for a in args)


def off(ours, wanted):
    if wanted.numel() == 0:
        return 0.0
    return ((ours.double() - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30)).item()
