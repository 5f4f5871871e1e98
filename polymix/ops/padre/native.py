"""PADRe's step (depthwise(x) + bias) ⊙ y in C for the CPU, forward and backward, on grids of one or two axes.

`step` is the kernel of the operator polymix::padre_step; `apply` serves `polymix.ops.padre.inplace`.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.ops.native.arrays import Needs, dense
from polymix.ops.native.library import Address, address, call
from polymix.ops.padre.eager import Convolution, pad
from polymix.ops.padre.inplace import pointwise
from polymix.ops.shared import blocks
from polymix.ops.shared.blocks import Product, output
from polymix.ops.shared.depthwise import effective_kernel
from polymix.ops.shared.tensors import Linear

Axes = tuple[int, ...]


class Shape(ctypes.Structure):
    """The struct Shape of depthwise.c."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ("batch", "dim", "h", "w", "oh", "ow", "kh", "kw", "top", "left", "bf16", "threads")
    )


class Taps(Address):
    """The struct Taps of depthwise.c: each channel's taps of a contiguous weight (D, 1, *kernel), from `first` on."""

    _fields_ = (("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("channel", "row", "col")))
    kinds = ("taps",)
    channel: int
    row: int
    col: int

    def __init__(self, weight: Tensor, kernel: Axes, *, flipped: bool = False) -> None:
        """The taps of the part `kernel` in the middle of the weight, in reverse order if `flipped`."""
        height, width = (1, *weight.shape[2:])[-2:]
        row, col, sign = (height - kernel[0]) // 2, (width - kernel[1]) // 2, -1 if flipped else 1
        if flipped:
            row, col = row + kernel[0] - 1, col + kernel[1] - 1
        self.tensors, self.first = (weight,), row * width + col
        super().__init__(weight.data_ptr() + weight.element_size() * self.first, height * width, sign * width, sign)

    def fits(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        weight, (dim, height, width) = self.tensors[0], shape
        last = self.first + self.row * (height - 1) + self.col * (width - 1)
        inside = min(self.first, last) >= 0 and max(self.first, last) < self.channel
        return inside and address(weight, dim * self.channel, dtype) is not None


class Geometry(NamedTuple):
    """The sizes of a convolution, two axes each."""

    size: Axes  # the grid of the outputs
    seen: Axes  # the grid of the inputs
    kernel: Axes  # the part of the kernel that can reach the grid
    pad: Axes  # the zeros in front of the inputs

    def shape(self, x: Tensor) -> Shape:
        """The struct that the C functions take."""
        bf16 = int(x.dtype == torch.bfloat16)
        return Shape(
            x.shape[0], x.shape[2], *self.seen, *self.size, *self.kernel, *self.pad, bf16, torch.get_num_threads()
        )

    def transposed(self) -> Geometry:
        """The geometry of the convolution that computes the gradient of the inputs."""
        return Geometry(
            self.seen, self.size, self.kernel, (self.kernel[0] - 1 - self.pad[0], self.kernel[1] - 1 - self.pad[1])
        )


@lru_cache(256)  # the same few in every call
def _geometry(tokens: int, kernel: Axes, grid: Axes, causal: bool) -> Geometry:
    """The sizes of a convolution with a kernel of one or two axes for an input of so many tokens."""
    lead = (1,) * (2 - len(grid))
    if causal:
        return Geometry((*lead, *grid), (1, tokens), (*lead, *kernel), (0, 0))
    size, kernel = (*lead, *grid), (*lead, *effective_kernel(kernel, grid))
    return Geometry(size, size, kernel, (kernel[0] // 2, kernel[1] // 2))


def _conv(
    x: Tensor, scale: Tensor | None, taps: Taps, bias: Tensor | None, times: Tensor | None, geometry: Geometry,
    out: Tensor | None = None, shift: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute (conv((x + shift) ⊙ scale) + bias) ⊙ times, (B, ∏ size, D), for x (B, ∏ seen, D).

    x, the scale and `times` have contiguous channels.
    """
    if out is None:
        out = x.new_empty(x.shape[0], geometry.size[0] * geometry.size[1], x.shape[2])
    shift, bias = (None if v is None else v.float().contiguous() for v in (shift, bias))
    call("depthwise", x, shift, scale, taps, bias, times, out, geometry.shape(x))
    return out


def step(
    x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor | None, grid: Axes, *,
    causal: bool = False, dilation: int = 1, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute (depthwise(x) + bias) ⊙ y, with the convolution of `polymix.ops.shared.depthwise`.

    Args:
        x: (B, N, D) in float32 or bfloat16, N = ∏ grid. If causal, (B, k - 1 + N, D), the earlier tokens first.
        weight: (D, 1, *kernel).
        bias: (D) or None.
        y: (B, N, D) or None for ones.
        grid: the sizes of one or two axes.
        causal: whether each token sees only itself and its past.
        dilation: must be 1.
        out: where to write the result; may be y.
    Returns:
        (B, N, D) in the dtype of x. Cost: N D (∏ kernel + 1) multiply-adds, summed in float32. Memory besides the
        output: 512 KiB of inputs per thread.
    """
    weight, geometry = weight.float().contiguous(), _geometry(x.shape[1], weight.shape[2:], tuple(grid), causal)
    return _conv(dense(x), None, Taps(weight, geometry.kernel), bias, dense(y), geometry, out)


def _band(
    x: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor | None, y: Tensor | None, width: int, first: int,
    out: Tensor,
) -> None:  # fmt: skip
    """Compute (depthwise(x + shift) + bias) ⊙ y for a band of rows of a grid of two axes.

    Args:
        x: (B, N, D), all rows of the grid that the band sees, with contiguous channels, as y and `out` have.
        width: the number of tokens in a row.
        first: the band's first row, counted in x.
        out: the band's part of the output, (B, rows · width, D).
    """
    weight = weight.float().contiguous()
    _, _, kernel, pad = _geometry(x.shape[1], weight.shape[2:], (weight.shape[2], width), False)
    geometry = Geometry((out.shape[1] // width, width), (x.shape[1] // width, width), kernel, (pad[0] - first, pad[1]))
    _conv(x, None, Taps(weight, geometry.kernel), bias, y, geometry, out, shift)


def step_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor | None, grid: Axes, *,
    causal: bool = False, dilation: int = 1, needs: Needs = (True,) * 4,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients of `step` for grad (B, N, D). With g = grad ⊙ y, which is never stored:

        x:  g convolved with the flipped kernel     weight:  Σ_{b,n} g ⊙ (x at the tap)
        y:  grad ⊙ (depthwise(x) + bias)            bias:    Σ_{b,n} g

    Returns:
        The gradients of x, the weight, the bias and y; those of x and y in their dtypes, the others in float32. None
        for arguments that are None, or whose gradient `needs` does not ask for. Cost: three forward steps, less one
        for each of x, y, and the weight with the bias that is not needed. The result does not depend on the number of
        threads, to the bit.
    """
    weight, geometry = weight.float().contiguous(), _geometry(x.shape[1], weight.shape[2:], tuple(grid), causal)
    x, grad, y = dense(x), dense(grad), dense(y)
    of_x, of_weight, of_bias, of_y = needs
    grad_x, grad_y, of_bias = None, None, of_bias and bias is not None
    if of_x:
        grad_x = _conv(grad, y, Taps(weight, geometry.kernel, flipped=True), None, None, geometry.transposed())
    if of_y and y is not None:
        grad_y = _conv(x, None, Taps(weight, geometry.kernel), bias, grad, geometry)
    if not (of_weight or of_bias):
        return grad_x, None, None, grad_y
    sums = torch.zeros_like(weight) if of_weight else None  # taps that reach no token stay zero
    bias_sums = weight.new_empty(x.shape[2]) if of_bias else None
    call(
        "depthwise_weight",
        x,
        grad,
        y,
        None if sums is None else Taps(sums, geometry.kernel),
        bias_sums,
        geometry.shape(x),
    )
    return grad_x, sums, bias_sums, grad_y


def apply(token: Convolution | None, channel: Linear | None, x: Tensor, times: Tensor | None, grid: Axes) -> Tensor:
    """Like `blocked.apply`. The C kernel works in cache by itself, and multiplies with `times` as it writes.

    If x is larger than allocators keep (`blocks.MAX_KEPT_BYTES`), a grid of two axes is processed in bands of rows.
    """
    if token is None:
        return pointwise(channel, x, times)
    large, p = x.nbytes > blocks.MAX_KEPT_BYTES, 0
    y = times if times is not None else output(x) if large else x.new_empty(x.shape)
    shift: Tensor | None = None
    if channel is None or token.causal or token.mask is not None:
        u = token.hide(dense(x) if channel is None else pointwise(channel, x))
    else:
        weight, shift = channel  # the kernel adds the bias
        if large and len(grid) == 2:
            return _in_bands(token, (weight, shift), x, times, grid, y)
        u = F.linear(x, weight)
    if token.prefix is not None:
        p = token.num_prefix_tokens
        first = token.map_prefix(u, shift)
        y[:, :p] = first if times is None else first.mul_(times[:, :p])
    factor = None if times is None else times[:, p:]
    u = pad(token, u[:, p:]) if token.causal else u[:, p:]
    geometry = _geometry(u.shape[1], token.weight.shape[2:], grid, token.causal)
    kernel = token.weight.float().contiguous()
    _conv(u, None, Taps(kernel, geometry.kernel), token.bias, factor, geometry, y[:, p:], shift)
    return y


def _in_bands(token: Convolution, channel: Linear, x: Tensor, times: Tensor | None, grid: Axes, y: Tensor) -> Tensor:
    """`apply` without a mask on a grid of two axes, in bands of rows; writes to y."""
    p, (weight, shift) = token.num_prefix_tokens, channel
    product, (rows, width) = Product((weight, None), x.dtype), grid
    if token.prefix is not None:
        means = F.linear(torch.cat((x[:, :p], x[:, p:].mean(1, keepdim=True)), dim=1), weight, shift)
        first = token.prefix.combine(means[:, :p], means[:, p:])
        first = first if token.bias is None else first + token.bias.to(first.dtype)
        y[:, :p] = first if times is None else first * times[:, :p]
    reach = token.weight.shape[2] // 2
    band = max(1, blocks.MAX_KEPT_BYTES // (2 * width * x.shape[-1] * x.element_size()))
    for sample in range(x.shape[0]):
        for top in range(0, rows, band):
            last = min(top + band, rows)
            above, below = max(0, top - reach), min(rows, last + reach)
            u = product(x[sample, p + above * width : p + below * width])[None]
            place = slice(p + top * width, p + last * width)
            _band(
                u, shift, token.weight, token.bias, None if times is None else times[sample : sample + 1, place],
                width, top - above, y[sample : sample + 1, place],
            )  # fmt: skip
    return y
