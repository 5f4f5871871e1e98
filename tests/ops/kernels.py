"""Helpers of the kernels' tests: exact results with gradients, and the errors that kernels may have."""

import pytest
import torch

from polymix.ops.native import compile, library

NATIVE = library.why_not()
needs_it = pytest.mark.skipif(NATIVE is not None, reason=f"untested: kernels in C: {NATIVE}")
COMPILES = bool(compile.levels()) and bool(compile.compilers())
needs_compiler = pytest.mark.skipif(not COMPILES, reason="untested: building the kernels, which needs Linux and gcc")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The smallest tolerance, for cases in which eager code is nearly exact. Triton's interpreter truncates to bfloat16
# where a GPU rounds, so its error is a whole unit in the last place instead of half a unit.
FLOOR = {torch.float16: 1e-3, torch.bfloat16: 2**-7 if DEVICE == "cpu" else 1e-3}


def with_gradients(function, grad, *inputs, **fixed):
    """The output, then the gradient of each input; None for an input that is None."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves, **fixed)
    grads = iter(torch.autograd.grad(out, [x for x in leaves if x is not None], grad.to(out.dtype)))
    return [out.detach(), *(None if x is None else next(grads) for x in leaves)]


def to_float64(*inputs):
    """The inputs in float64; None stays None."""
    return [None if x is None else x.double() for x in inputs]


def relative_error(got, want):
    """The largest difference, relative to the largest entry; 0 for empty tensors."""
    if not want.numel():
        return 0.0
    return ((got.double() - want.double()).abs().max() / want.abs().max().clamp_min(1e-30)).item()


def error_by_token(ours, expected):
    """The largest difference, relative to the largest entry of the same token, or to the median token's if larger."""
    if not expected.numel():
        return 0.0
    size = expected.abs().amax(-1, keepdim=True)
    return ((ours.double() - expected).abs() / size.clamp_min(max(size.median().item(), 1e-30))).max().item()


def padding(batch, n):
    """Masks with padding on the left, padding on the right, and padding only, in turns."""
    mask, place = torch.ones(batch, n, dtype=torch.bool), torch.arange(n)
    for b in range(batch):
        mask[b] = (place >= n // 3, place <= n // 2, place < 0)[(b + n) % 3]
    return mask


def twice_the_error(plain, want, dtype):
    """Tolerances for a list of tensors: twice the error of eager code in `dtype`."""
    return [max(2 * relative_error(a, b), FLOOR[dtype]) for a, b in zip(plain, want, strict=True)]


def assert_close(names, got, want, allowed=None):
    for name, a, b, limit in zip(names, got, want, allowed or [1e-4] * len(names), strict=True):
        if b is None:
            assert a is None, f"{name}: should be None"
            continue
        assert a.shape == b.shape, f"{name}: expected shape {tuple(b.shape)}, got {tuple(a.shape)}"
        assert relative_error(a, b) <= limit, f"{name}: relative error {relative_error(a, b):.2e} (nan: never written)"


def assert_same_bits(names, got, want, why):
    for name, a, b in zip(names, got, want, strict=True):
        assert (a is None and b is None) or torch.equal(a, b), f"{name}: {why}"


def in_float64(args):
    """The arguments with all tensors in float64."""
    return tuple(a.double() if isinstance(a, torch.Tensor) else a for a in args)
