"""Depthwise convolution on tokens, with a backward made of forward convolutions.

PyTorch's own CPU backward of a depthwise convolution costs 20 to 50 times its forward. Both gradients are themselves
depthwise convolutions, each about as dear as the forward:
    input:   the output's gradient, convolved with the flipped kernel, padded by k - 1 - p;
    weight:  the input as one image of B·C channels, convolved with the output's gradient as the kernel, summed over B.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.ops.common import autocast_dtype

_CONV = {2: F.conv2d, 3: F.conv3d}


def _conv(x: Tensor, weight: Tensor, padding: tuple[int, ...]) -> Tensor:
    return _CONV[len(padding)](x, weight, padding=padding, groups=x.shape[1])


class _Depthwise(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, padding: tuple[int, ...]) -> Tensor:
        return _conv(x, weight, padding)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, ctx.padding = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        taps = weight.shape[2:]
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            flipped = weight.flip(tuple(range(2, weight.ndim)))
            rest = tuple(k - 1 - p for k, p in zip(taps, ctx.padding, strict=True))
            # Calling the Function again, not the bare convolution, keeps second derivatives fast too.
            grad_x = _Depthwise.apply(grad, flipped, rest)
        if ctx.needs_input_grad[1]:
            batch, dim = x.shape[:2]
            image = x.reshape(1, batch * dim, *x.shape[2:])
            kernel = grad.reshape(batch * dim, 1, *grad.shape[2:])
            per_sample = _Depthwise.apply(image, kernel, ctx.padding)
            accumulate = torch.promote_types(weight.dtype, torch.float32)
            grad_w = per_sample.view(batch, dim, 1, *taps).sum(0, dtype=accumulate).to(weight.dtype)
        return grad_x, grad_w, None


def effective_kernel(kernel: tuple[int, ...], grid: tuple[int, ...]) -> tuple[int, ...]:
    """The part of a kernel that can touch a grid: 2 · size - 1 taps an axis at most.

    Beyond one axis only: the length of a sequence may be symbolic, and a kernel is short beside it.
    """
    return kernel if len(grid) == 1 else tuple(min(k, 2 * size - 1) for k, size in zip(kernel, grid, strict=True))


def depthwise_conv(x: Tensor, weight: Tensor, grid: tuple[int, ...], *, causal: bool = False) -> Tensor:
    """Convolve each channel of a grid of tokens with its own kernel.

        y[n, c] = Σ_t weight[c, 0, t] · x[n + t - ⌊k/2⌋, c]        (zero outside the grid)
        y[n, c] = Σ_t weight[c, 0, t] · x[n + t - (k - 1), c]      (causal; x begins k - 1 tokens early)

    Args:
        x: tokens (B, N, D) with N = ∏ grid, row-major; when causal (B, k - 1 + N, D), the earlier ones first.
        weight: (D, 1, *kernel), one entry of the kernel a grid axis; odd sizes unless causal.
        grid: 1, 2 or 3 axes.
    Returns:
        (B, N, D). Cost: N · D · ∏ kernel multiply-adds, backward about twice that; taps that a small grid cannot
        reach are cut off first (oneDNN is 40 times slower where the kernel is larger than the image).
    """
    batch, _, dim = x.shape
    full = tuple(weight.shape[2:])
    taps = effective_kernel(full, grid)
    for axis, (k, rest) in enumerate(zip(full, taps, strict=True)):
        weight = weight if k == rest else weight.narrow(2 + axis, (k - rest) // 2, rest)
    padding = (0,) * len(taps) if causal else tuple(k // 2 for k in taps)
    if len(grid) == 1:  # oneDNN's 2-D path takes a tokens-first view without a copy, its 1-D path does not
        grid, padding, weight = (1, x.shape[1]), (0, *padding), weight.unsqueeze(2)
    image = x.reshape(batch, *grid, dim).movedim(-1, 1)  # (B, D, *grid), a channels-last view
    dtype = autocast_dtype(x.device) or x.dtype
    image, weight = image.to(dtype), weight.to(dtype)
    if torch.is_grad_enabled() and (image.requires_grad or weight.requires_grad):
        out = _Depthwise.apply(image, weight, padding)
    else:
        out = _conv(image, weight, padding)
    return out.movedim(1, -1).flatten(1, -2)  # (B, N, D)
