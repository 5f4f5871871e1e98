"""Depthwise convolution of tokens, with a backward made of forward convolutions.

On a CPU, PyTorch's own backward of a depthwise convolution costs 20 to 50 times its forward. Both gradients are
depthwise convolutions themselves, and each costs about as much as the forward:
    input:   the output's gradient convolved with the flipped kernel, with padding span - 1 - p;
    weight:  the input, as one image of B·C channels, convolved with the output's gradient; summed over B.
A kernel of k taps with dilation δ spans (k - 1) δ + 1 positions.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.errors import ShapeError
from polymix.ops.shared.tensors import accumulator, autocast_dtype, forward_mode

_CONV = {2: F.conv2d, 3: F.conv3d}
Axes = tuple[int, ...]


def _conv(x: Tensor, weight: Tensor, padding: Axes, dilation: Axes, bias: Tensor | None = None) -> Tensor:
    return _CONV[len(padding)](x, weight, bias, padding=padding, dilation=dilation, groups=x.shape[1])


class _Depthwise(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, padding: Axes, dilation: Axes) -> Tensor:
        return _conv(x, weight, padding, dilation)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, ctx.padding, ctx.dilation = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        span = tuple((k - 1) * d + 1 for k, d in zip(weight.shape[2:], ctx.dilation, strict=True))
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            flipped = weight.flip(tuple(range(2, weight.ndim)))
            rest = tuple(k - 1 - p for k, p in zip(span, ctx.padding, strict=True))
            grad_x = _convolve(grad, flipped, rest, ctx.dilation)
        if ctx.needs_input_grad[1]:
            # In float32 or wider: the gradients of the samples are summed and may cancel.
            dtype = accumulator(weight.dtype)
            grad_w = _weight_gradient(x.to(dtype), grad.to(dtype), span, ctx.padding, ctx.dilation).to(weight.dtype)
        return grad_x, grad_w, None, None


def _convolve(x: Tensor, weight: Tensor, padding: Axes, dilation: Axes) -> Tensor:
    """Convolve differentiably; negative padding crops the input.

    The backward calls this function again, so that second derivatives are fast too.
    """
    for axis, p in enumerate(padding, start=2):
        x = x.narrow(axis, -p, x.shape[axis] + 2 * p) if p < 0 else x
    return _Depthwise.apply(x, weight, tuple(max(p, 0) for p in padding), dilation)


def _weight_gradient(x: Tensor, grad: Tensor, span: Axes, padding: Axes, dilation: Axes) -> Tensor:
    """The weight's gradient (D, 1, *taps) from x and the output's gradient, both (B, D, *grid)."""
    batch, dim = x.shape[:2]
    taps = tuple((s - 1) // d + 1 for s, d in zip(span, dilation, strict=True))
    if batch == 0:
        return x.new_zeros(dim, 1, *taps)
    if x.ndim == 4 and span[0] == 1:  # for a sequence, one sum per tap is faster than a kernel as long as the sequence
        x = F.pad(x, (padding[1], padding[1]))
        starts = range(0, span[1], dilation[1])
        shifts = [(grad * x[..., t : t + grad.shape[-1]]).sum((0, 2, 3)) for t in starts]
        return torch.stack(shifts, dim=1).view(dim, 1, *taps)
    image = x.reshape(1, batch * dim, *x.shape[2:])
    kernel = grad.reshape(batch * dim, 1, *grad.shape[2:])
    per_sample = _convolve(image, kernel, padding, (1,) * len(padding)).view(batch, dim, 1, *span)
    for axis, d in enumerate(dilation, start=3):  # keep the positions that hold a tap
        per_sample = per_sample if d == 1 else per_sample[(slice(None),) * axis + (slice(None, None, d),)]
    return per_sample.sum(0)


def effective_kernel(kernel: Axes, grid: Axes, dilation: int = 1) -> Axes:
    """The part of a kernel that can reach a grid: at most 2 ⌊(size - 1) / δ⌋ + 1 taps per axis.

    A kernel on a sequence is returned unchanged: the length may be symbolic, and kernels are short compared with it.
    """
    if len(grid) == 1:
        return kernel
    return tuple(min(k, 2 * ((size - 1) // dilation) + 1) for k, size in zip(kernel, grid, strict=True))


def _one_token(x: Tensor, weight: Tensor, dilation: int, bias: Tensor | None) -> Tensor:
    """The causal convolution of the last token alone, as a weighted sum: oneDNN takes ten times as long to set up."""
    dtype = x.dtype if x.dtype == torch.float64 else autocast_dtype(x.device) or x.dtype
    taps, kernel = x[:, ::dilation].to(accumulator(dtype)), weight[:, 0].t().to(accumulator(dtype))
    y = (taps * kernel).sum(1, keepdim=True).to(dtype)
    return y if bias is None else y + bias.to(dtype)


def depthwise_conv(
    x: Tensor, weight: Tensor, grid: Axes, *, causal: bool = False, dilation: int = 1, bias: Tensor | None = None
) -> Tensor:
    """Convolve each channel of a grid of tokens with its own kernel.

        y[n, c] = Σ_t weight[c, 0, t] · x[n + δ (t - ⌊k/2⌋), c]        (zero outside the grid)
        y[n, c] = Σ_t weight[c, 0, t] · x[n + δ (t - (k - 1)), c]      (causal; x begins δ (k - 1) tokens earlier)

    Taps that cannot reach a small grid are removed first, because oneDNN is 40 times slower when the kernel is larger
    than the image.

    Args:
        x: tokens (B, N, D) with N = ∏ grid, row-major. If causal, (B, δ (k - 1) + N, D), the earlier tokens first.
        weight: (D, 1, *kernel) with one kernel size per grid axis; odd sizes unless causal.
        grid: the sizes of 1, 2 or 3 axes.
        causal: whether each token sees only itself and its past; grids of one axis only.
        dilation: δ, the same on every axis.
        bias: (D), added to the result.
    Returns:
        (B, N, D). Cost: N D ∏ kernel multiply-adds; the backward costs about twice that. With a dilation, the
        weight's gradient costs as much as for a dense kernel of the same span.
    Raises:
        ShapeError: the grid and the kernel have different numbers of axes, or a kernel size is even and not causal.
    """
    if len(grid) != weight.ndim - 2 or (causal and len(grid) != 1):
        allowed = f"as many axes as the kernel {tuple(weight.shape[2:])} has, and one if causal"
        raise ShapeError("grid", grid, allowed, "")
    if not causal and any(k % 2 == 0 for k in weight.shape[2:]):
        cure = "Pad the kernel by one tap."
        raise ShapeError("weight", tuple(weight.shape), "odd kernel sizes unless causal", cure)
    batch, _, dim = x.shape
    if causal and not torch.compiler.is_compiling() and x.shape[1] == (weight.shape[2] - 1) * dilation + 1:
        return _one_token(x, weight, dilation, bias)
    full = tuple(weight.shape[2:])
    taps = effective_kernel(full, grid, dilation)
    for axis, (k, rest) in enumerate(zip(full, taps, strict=True)):
        weight = weight if k == rest else weight.narrow(2 + axis, (k - rest) // 2, rest)
    padding = (0,) * len(taps) if causal else tuple(dilation * (k // 2) for k in taps)
    gaps = (dilation,) * len(taps)
    if len(grid) == 1:  # oneDNN's 2-D path takes this view without a copy; its 1-D path does not
        grid, padding, gaps, weight = (1, x.shape[1]), (0, *padding), (1, *gaps), weight.unsqueeze(2)
    image = x.reshape(batch, *grid, dim).movedim(-1, 1)  # (B, D, *grid), a channels-last view
    dtype = x.dtype if x.dtype == torch.float64 else autocast_dtype(x.device) or x.dtype
    image, weight, bias = image.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    operands = (image, weight) if bias is None else (image, weight, bias)
    if torch.is_grad_enabled() and any(part.requires_grad for part in operands) and not forward_mode():
        out = _convolve(image, weight, padding, gaps)
    else:
        out, bias = _conv(image, weight, padding, gaps, bias), None
    out = out.movedim(1, -1).flatten(1, -2)  # (B, N, D)
    return out if bias is None else out + bias
