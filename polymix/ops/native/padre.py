"""PADRe's step on a CPU, (depthwise(x) + bias) ⊙ y, forward and backward, for grids of one or two axes."""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.ops.depthwise import effective_kernel
from polymix.ops.native.build import call, dense, tokens, values

Axes = tuple[int, ...]


class Shape(ctypes.Structure):
    """As in depthwise.c."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ("batch", "dim", "h", "w", "oh", "ow", "kh", "kw", "top", "left", "bf16", "threads")
    )


def _shape(x: Tensor, size: Axes, seen: Axes, kernel: Axes, pad: Axes) -> Shape:
    """Outputs `size` of inputs `seen`."""
    bf16 = int(x.dtype == torch.bfloat16)
    return Shape(x.shape[0], x.shape[2], *seen, *size, *kernel, *pad, bf16, torch.get_num_threads())


def _geometry(x: Tensor, weight: Tensor, grid: Axes, causal: bool) -> tuple[Tensor, Axes, Axes, Axes, Axes]:
    """The weight (D, kh, kw) without the taps that no token reaches, and the grid of the output, that of the input, the
    kernel and the padding in front: two axes each."""
    full = tuple(weight.shape[2:])
    taps = full if causal else effective_kernel(full, tuple(grid))
    for axis, (k, rest) in enumerate(zip(full, taps, strict=True), start=2):
        weight = weight.narrow(axis, (k - rest) // 2, rest)
    lead = (1,) * (2 - len(grid))
    size, kernel = (*lead, *grid), (*lead, *taps)
    if causal:
        return weight.flatten(1), size, (1, x.shape[1]), kernel, (0, 0)
    return weight.flatten(1), size, size, kernel, tuple(k // 2 for k in kernel)


def _taps(weight: Tensor) -> Tensor:
    """(D, taps) tap by tap, in float32: read along the channels."""
    return weight.t().float().contiguous()


def _conv(
    x: Tensor, scale: Tensor | None, taps: Tensor, bias: Tensor | None, times: Tensor | None, size: Axes, seen: Axes,
    kernel: Axes, pad: Axes, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """(conv(x ⊙ scale) + bias) ⊙ times (B, ∏ size, D) of x (B, ∏ seen, D) and taps (∏ kernel, D)."""
    out = x.new_empty(x.shape[0], size[0] * size[1], x.shape[2]) if out is None else out
    bias = None if bias is None else bias.float().contiguous()
    x, scale, times = dense(x), dense(scale), dense(times)
    call("depthwise", tokens(x), tokens(scale), values(taps), values(bias), tokens(times), tokens(out),
         _shape(x, size, seen, kernel, pad))  # fmt: skip
    return out


def step(
    x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor | None, grid: Axes, *,
    causal: bool = False, dilation: int = 1, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """(depthwise(x) + bias) ⊙ y, the convolution as `polymix.ops.depthwise.depthwise_conv` defines it.

    x (B, N, D) of float32 or bf16, N = ∏ grid; when causal (B, k - 1 + N, D), the earlier tokens first. weight
    (D, 1, *kernel); bias (D,) or None; y (B, N, D) or None for ones. Returns (B, N, D) in x's type. Cost:
    N D (∏ kernel + 1) multiply-adds, summed in float32; beside the output, or `out`, which may be y, a strip of the
    inputs a thread, 512 KiB.
    """
    assert dilation == 1
    weight, size, seen, kernel, pad = _geometry(x, weight, grid, causal)
    return _conv(x, None, _taps(weight), bias, y, size, seen, kernel, pad, out)


def band(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor | None, width: int, first: int, out: Tensor) -> None:
    """Rows of `step` on a grid of two axes: from row `first` of x on, as many as out (B, rows · width, D) has.

    x (B, N, D) are the rows that these see, none but those at the edge of the grid left out.
    """
    seen, size = (x.shape[1] // width, width), (out.shape[1] // width, width)
    flat, _, _, kernel, pad = _geometry(x, weight, (1 << 30, width), False)
    _conv(x, None, _taps(flat), bias, y, size, seen, kernel, (pad[0] - first, pad[1]), out)


def step_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor | None, grid: Axes, *,
    causal: bool = False, dilation: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients of `step`: of x and y in their types, of the weight and the bias in float32, of what is given.

    grad (B, N, D). With g = grad ⊙ y, formed on the way and never written,
        x:  g convolved with the flipped kernel;       weight:  Σ_{b,n} g ⊙ (x at the tap);
        y:  grad ⊙ (depthwise(x) + bias), once more;   bias:    Σ_{b,n} g.
    Cost: that of three forward steps, two where y is None. The same bits every time: no sum depends on the threads.
    """
    assert dilation == 1
    given, (weight, size, seen, kernel, pad) = weight, _geometry(x, weight, grid, causal)
    taps = _taps(weight)
    rest = tuple(k - 1 - p for k, p in zip(kernel, pad, strict=True))
    grad_x = _conv(grad, y, taps.flip(0), None, None, seen, size, kernel, rest)
    grad_y = None if y is None else _conv(x, None, taps, bias, grad, size, seen, kernel, pad)
    sums, bias_sums = torch.empty_like(taps), taps.new_empty(x.shape[2])
    x, grad, y = dense(x), dense(grad), dense(y)
    call("depthwise_weight", tokens(x), tokens(grad), tokens(y), values(sums), values(bias_sums),
         _shape(x, size, seen, kernel, pad))  # fmt: skip
    grad_weight = sums.t().contiguous().view(weight.shape[0], 1, *kernel[2 - len(grid) :])
    rim = [(k - taken) // 2 for k, taken in zip(given.shape[2:], grad_weight.shape[2:], strict=True)]
    grad_weight = F.pad(grad_weight, [side for k in reversed(rim) for side in (k, k)])
    return grad_x, grad_weight, None if bias is None else bias_sums, grad_y
