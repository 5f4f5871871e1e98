"""PADRe's step (depthwise(x) + bias) ⊙ y in Triton for GPUs, forward and backward.

Grids of 1 or 2 axes are treated as 3 axes, with leading sizes of 1. Tokens are rows and channels are columns, so that
memory accesses run along the channels. Tap t of a token reads the token `dilation · t - pad` positions later, or zero
outside the grid.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

Axes = tuple[int, ...]
PROGRAMS = 512  # the number of programs that a launch aims for: a few per multiprocessor of the largest GPUs
RUN = 4  # tokens along the last axis that share their reads
BLOCK = 32  # channels in a tile: one cache line of float32
WARPS = 8  # with four warps, the compiler chooses a layout for the taps and shuffles x on every read


@triton.jit
def _load(x, inside):
    """Load as float32; elements that are not `inside` are zero and never read."""
    return tl.load(x, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["runs", "n", "size_2", "seen_2"])
def _conv_kernel(
    x, x_b, x_n, x_d, u, u_b, u_n, u_d, taps, bias, y, y_b, y_n, y_d, out, runs, n, width, dilation,
    size_1, size_2, seen_0, seen_1, seen_2, taps_0, taps_1, taps_2, pad_0, pad_1, pad_2,
    RUN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out (B, n, D) = (conv(x ⊙ u) + bias) ⊙ y, from the grid `seen` to the grid `size`; u, bias and y may be None.

    A program computes ROWS runs of RUN tokens, `dilation` apart along the last axis. The tokens of a run share their
    neighbours: each neighbour is read once per run and used for all tokens whose kernel covers it.
    """
    per_line = tl.cdiv(size_2, RUN * dilation) * dilation
    run = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[None, :, None]
    line, place = run // per_line % (n // size_2), run % per_line
    batch = (run // per_line // (n // size_2)).to(tl.int64)
    axis_0, axis_1 = line // size_1, line % size_1
    axis_2 = place // dilation * RUN * dilation + place % dilation
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, None, :]
    step = tl.arange(0, RUN)[:, None, None]
    real = channel < width
    held = (run < runs) & real
    origin = ((axis_0 * seen_1 + axis_1) * seen_2 + axis_2).to(tl.int64)
    x += batch * x_b + origin * x_n + channel.to(tl.int64) * x_d
    if u is not None:
        u += batch * u_b + origin * u_n + channel.to(tl.int64) * u_d
    total = tl.zeros((RUN, ROWS, BLOCK), tl.float32)
    for t_0 in range(taps_0):
        on_0 = t_0 * dilation - pad_0
        for t_1 in range(taps_1):
            on_1 = t_1 * dilation - pad_1
            within = held & (axis_0 + on_0 >= 0) & (axis_0 + on_0 < seen_0)
            within &= (axis_1 + on_1 >= 0) & (axis_1 + on_1 < seen_1)
            for t in range(taps_2 + RUN - 1):
                on_2 = t * dilation - pad_2
                inside = within & (axis_2 + on_2 >= 0) & (axis_2 + on_2 < seen_2)
                on = tl.cast((on_0 * seen_1 + on_1) * seen_2 + on_2, tl.int64)
                value = _load(x + on * x_n, inside)
                if u is not None:
                    value *= _load(u + on * u_n, inside)
                t_2 = t - step
                under = (t_2 >= 0) & (t_2 < taps_2)
                tap = _load(taps + ((t_0 * taps_1 + t_1) * taps_2 + t_2) * width + channel, under & real)
                # tl.where instead of a product with zero, which would spread a NaN to tokens that it cannot reach.
                total = tl.where(under, total + value * tap, total)
    if bias is not None:
        total += _load(bias + channel, real)
    held &= axis_2 + step * dilation < size_2
    token = (line * size_2 + axis_2 + step * dilation).to(tl.int64)
    if y is not None:
        total *= _load(y + batch * y_b + token * y_n + channel.to(tl.int64) * y_d, held)
    tl.store(out + (batch * n + token) * width + channel, total, mask=held)


@triton.jit(do_not_specialize=["total", "span", "n", "size_2", "seen_2"])
def _weight_kernel(
    sums, bias_sums, x, x_b, x_n, x_d, grad, grad_b, grad_n, grad_d, y, y_b, y_n, y_d, total, span, n, width, dilation,
    size_1, size_2, seen_0, seen_1, seen_2, taps_0, taps_1, taps_2, pad_0, pad_1, pad_2,
    TAPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """sums (splits, taps, D) = Σ grad ⊙ y ⊙ (x at the tap) over the tokens of a split.

    bias_sums (splits, D) = Σ grad ⊙ y. A program computes up to TAPS neighbouring taps of one line of the kernel,
    which share their reads of grad and y.
    """
    chunks = tl.cdiv(taps_2, TAPS)
    lead = tl.program_id(2) // chunks
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, None, :]
    real = channel < width
    t_2 = tl.program_id(2) % chunks * TAPS + tl.arange(0, TAPS)[:, None, None]
    on_0, on_1, on_2 = lead // taps_1 * dilation - pad_0, lead % taps_1 * dilation - pad_1, t_2 * dilation - pad_2
    shares = tl.zeros((TAPS, ROWS, BLOCK), tl.float32)
    bias_shares = tl.zeros((1, ROWS, BLOCK), tl.float32)
    begin = tl.program_id(0) * span
    for tile in range(begin, tl.minimum(begin + span, total), ROWS):
        row = tile + tl.arange(0, ROWS)[None, :, None]
        batch, token = (row // n).to(tl.int64), row % n
        held = (row < total) & real
        g = _load(grad + batch * grad_b + token.to(tl.int64) * grad_n + channel.to(tl.int64) * grad_d, held)
        if y is not None:
            g *= _load(y + batch * y_b + token.to(tl.int64) * y_n + channel.to(tl.int64) * y_d, held)
        bias_shares += g
        at_0, at_1 = token // size_2 // size_1 + on_0, token // size_2 % size_1 + on_1
        axis_2 = token % size_2
        inside = held & (at_0 >= 0) & (at_0 < seen_0) & (at_1 >= 0) & (at_1 < seen_1)
        inside = inside & (axis_2 + on_2 >= 0) & (axis_2 + on_2 < seen_2) & (t_2 < taps_2)
        origin = ((at_0 * seen_1 + at_1) * seen_2 + axis_2).to(tl.int64)
        line = x + batch * x_b + origin * x_n + channel.to(tl.int64) * x_d
        shares += _load(line + on_2.to(tl.int64) * x_n, inside) * g
    out = (tl.program_id(0) * taps_0 * taps_1 + lead) * taps_2 + t_2
    total_shares = tl.sum(shares, 1, keep_dims=True)
    tl.store(sums + out.to(tl.int64) * width + channel, total_shares, mask=(t_2 < taps_2) & real)
    if bias_sums is not None:
        first = real & (tl.program_id(2) == 0)
        tl.store(bias_sums + tl.program_id(0) * width + channel, tl.sum(bias_shares, 1, keep_dims=True), mask=first)


def _geometry(x: Tensor, weight: Tensor, grid: Axes, causal: bool, dilation: int) -> tuple[Axes, Axes, Axes, Axes]:
    """The grid of the outputs, the grid of the inputs, the kernel sizes and the padding in front, three axes each."""
    lead = (1,) * (3 - len(grid))
    size, kernel = (*lead, *grid), (*lead, *weight.shape[2:])
    if causal:
        return size, (1, 1, x.shape[1]), kernel, (0, 0, 0)
    return size, size, kernel, tuple(dilation * (k // 2) for k in kernel)


def _strides(x: Tensor | None) -> Axes:
    return (0, 0, 0) if x is None else x.stride()


def _conv(
    x: Tensor, u: Tensor | None, taps: Tensor, bias: Tensor | None, y: Tensor | None, size: Axes, seen: Axes,
    kernel: Axes, pad: Axes, dilation: int, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Compute (conv(x ⊙ u) + bias) ⊙ y, (B, ∏ size, D), for x (B, ∏ seen, D) and taps (∏ kernel, D)."""
    batch, _, width = x.shape
    n, blocks = math.prod(size), triton.cdiv(width, BLOCK)
    runs = batch * size[0] * size[1] * triton.cdiv(size[2], RUN * dilation) * dilation
    rows = 64 if triton.cdiv(runs, 64) * blocks >= PROGRAMS else 32
    out = torch.empty((batch, n, width), dtype=dtype, device=x.device)
    _conv_kernel[(triton.cdiv(runs, rows), blocks)](
        x, *x.stride(), u, *_strides(u), taps, None if bias is None else bias.contiguous(), y, *_strides(y), out,
        runs, n, width, dilation, *size[1:], *seen, *kernel, *pad,
        RUN=RUN, ROWS=rows, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return out


def _taps(weight: Tensor) -> Tensor:
    """Transpose a weight (D, 1, *kernel) to (∏ kernel, D), so that kernels read it along the channels."""
    return weight.flatten(1).t().float().contiguous()


def step(
    x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor | None, grid: Axes, *,
    causal: bool = False, dilation: int = 1,
) -> Tensor:  # fmt: skip
    """Compute (depthwise(x) + bias) ⊙ y, with the convolution of `polymix.ops.shared.depthwise`.

    Args:
        x: (B, N, D) of any strides, N = ∏ grid. If causal, (B, δ (k - 1) + N, D), the earlier tokens first.
        weight: (D, 1, *kernel).
        bias: (D) or None.
        y: (B, N, D) or None for ones.
        grid: the sizes of 1, 2 or 3 axes.
        causal: whether each token sees only itself and its past.
        dilation: δ.
    Returns:
        (B, N, D) in the dtype of x. Cost: N D (∏ kernel + 1) multiply-adds, summed in float32; no intermediates are
        written.
    """
    size, seen, kernel, pad = _geometry(x, weight, grid, causal, dilation)
    return _conv(x, None, _taps(weight), bias, y, size, seen, kernel, pad, dilation, x.dtype)


def step_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor | None, grid: Axes, *,
    causal: bool = False, dilation: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients of `step` for grad (B, N, D) of any strides. With g = grad ⊙ y, which is never stored:

        x:  g convolved with the flipped kernel     weight:  Σ_{b,n} g ⊙ (x at the tap)
        y:  grad ⊙ (depthwise(x) + bias)            bias:    Σ_{b,n} g

    Returns:
        The gradients of x and y in their dtypes, and of the weight and the bias in float32; None for arguments that
        are None. Cost: three forward steps. Sums are computed per split and added in a fixed order.
    """
    size, seen, kernel, pad = _geometry(x, weight, grid, causal, dilation)
    taps = _taps(weight)
    rest = tuple((k - 1) * dilation - p for k, p in zip(kernel, pad, strict=True))
    grad_x = _conv(grad, y, taps.flip(0), None, None, seen, size, kernel, rest, dilation, x.dtype)
    grad_y = None
    if y is not None:
        grad_y = _conv(x, None, taps, bias, grad, size, seen, kernel, pad, dilation, y.dtype)
    batch, n, width = grad.shape
    # Each thread holds 16 bytes of a tile, and as many taps as leave room for its addresses: 64 sums, 32 in 16 bits.
    rows, most = (32, 16) if x.element_size() == 4 else (64, 4)
    line = min(most, triton.next_power_of_2(kernel[2]))
    blocks, chunks = triton.cdiv(width, BLOCK), kernel[0] * kernel[1] * triton.cdiv(kernel[2], line)
    span = rows * max(1, triton.cdiv(batch * n, rows * max(1, PROGRAMS // max(1, blocks * chunks))))
    splits = max(1, triton.cdiv(batch * n, span))
    sums = torch.empty((splits, *taps.shape), dtype=torch.float32, device=x.device)
    bias_sums = None if bias is None else torch.empty((splits, width), dtype=torch.float32, device=x.device)
    _weight_kernel[(splits, blocks, chunks)](
        sums, bias_sums, x, *x.stride(), grad, *grad.stride(), y, *_strides(y), batch * n, span, n, width, dilation,
        *size[1:], *seen, *kernel, *pad,
        TAPS=line, ROWS=rows, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    grad_weight = sums.sum(0).t().contiguous().view(weight.shape)
    return grad_x, grad_weight, None if bias_sums is None else bias_sums.sum(0), grad_y
