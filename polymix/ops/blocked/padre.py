"""PADRe's monomials without gradients on a CPU, for dense channel maps with convolutions over the tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.ops.blocked.common import KEPT, Linear, Product, blocks, cast, computed_in, output
from polymix.ops.depthwise import depthwise_conv
from polymix.ops.padre import Factor, monomials

# A depthwise convolution of all channels at once leaves the cache where the grid is large; so many at a time do not.
CHANNELS = (48, 64, 32, 16)
LARGE = 2048  # tokens


def padre(
    x: Tensor,
    first: Factor,
    steps: Sequence[tuple[Factor | None, Factor]],
    weights: Sequence[Tensor | float],
    grid: tuple[int, ...],
    *,
    native: bool = False,
) -> Tensor:
    """The sum of `polymix.ops.padre.factored`, on the same arguments; `native`: with the convolution in C.

    Memory beside x and the output, both (B, N, D): two arrays as large as x, three from degree 3 on.
    """
    total: Tensor | None = None
    dtype = computed_in(x)
    steps, weights = _with_last(steps, weights, dtype)
    apply = partial(_apply_native if native else _apply, grid)
    for weight, z in zip(weights, monomials(x.to(dtype), first, steps, apply), strict=True):
        total = _add(total, weight, z)
    assert total is not None
    return total.to(x.dtype)


def _with_last(
    steps: Sequence[tuple[Factor | None, Factor]], weights: Sequence[Tensor | float], dtype: torch.dtype
) -> tuple[Sequence[tuple[Factor | None, Factor]], Sequence[Tensor | float]]:
    """W_d put into the last map of X where it is a factor for each channel, which spares a pass over the tokens."""
    last = weights[-1]
    if not steps or isinstance(last, float) or last.ndim > 1:
        return steps, weights
    last = last.to(dtype)  # and so what it is multiplied with
    left, (channel, token) = steps[-1]
    if token is not None:
        scale = last.view(-1, *(1,) * (token.weight.ndim - 1))
        bias = None if token.bias is None else token.bias * last
        token = token._replace(weight=token.weight * scale, bias=bias)
    elif channel is not None:
        weight, bias = channel
        channel = weight * last.unsqueeze(-1), None if bias is None else bias * last
    else:
        return steps, weights
    return [*steps[:-1], (left, Factor(channel, token))], [*weights[:-1], 1.0]


def _add(total: Tensor | None, weight: Tensor | float, z: Tensor) -> Tensor | None:
    """total + weight ⊙ z; total may be z of the degree before, which is needed no more."""
    if isinstance(weight, float):
        if weight == 0.0:
            return total
        return z if total is None else total.add_(z)
    weight = weight.to(z.dtype)
    return weight * z if total is None else total.addcmul_(weight.expand_as(z), z)


def _apply(grid: tuple[int, ...], factor: Factor, x: Tensor, times: Tensor | None) -> Tensor:
    """The factor of x (B, N, D), multiplied into `times` where that is given; never x itself."""
    if factor.token is None:
        if times is None or factor.channel is None:
            y = _channels(factor.channel, x)
            return times.mul_(y) if times is not None else y.clone() if y is x else y
        product = Product(factor.channel, x.dtype)
        for block in blocks(x):
            block.of(times).mul_(block.split(product(block.rows(x, x.dtype))))
        return times
    weight, bias = cast((factor.token.weight, factor.token.bias), x.dtype)
    size = _group_size(weight.shape[0], math.prod(grid))
    y = output(x) if times is None else times
    for place, part in enumerate(_in_groups(factor.channel, x, size)):
        group = slice(place * size, (place + 1) * size)
        token = factor.token
        mixed = depthwise_conv(
            token.before(part), weight[group], grid, causal=token.causal, dilation=token.dilation,
            bias=None if bias is None else bias[group],
        )  # fmt: skip
        if times is None:
            y[..., group] = mixed
        else:
            y[..., group].mul_(mixed)
    return y


def _apply_native(grid: tuple[int, ...], factor: Factor, x: Tensor, times: Tensor | None) -> Tensor:
    """The same; the kernel in C keeps to the cache by itself, and multiplies on the way."""
    token = factor.token
    if token is None:
        return _apply(grid, factor, x, times)
    from polymix.ops.native import padre as native  # compiled where it is asked for

    if token.causal or factor.channel is None:
        given = token.before(_channels(factor.channel, x))
        return native.step(given, token.weight, token.bias, times, grid, causal=token.causal, out=times)
    weight, shift = cast(factor.channel, x.dtype)
    if len(grid) == 1 or x.nbytes <= KEPT:
        given = F.linear(x, weight)
        return native.step(given, token.weight, token.bias, times, grid, out=times, shift=shift)
    y = output(x) if times is None else times
    product, (rows, width) = Product((weight, None), x.dtype), grid
    reach, most = token.weight.shape[2] // 2, max(1, KEPT // (2 * width * x.shape[-1] * x.element_size()))
    for sample in range(x.shape[0]):
        for first in range(0, rows, most):
            last = min(first + most, rows)
            above, below = max(0, first - reach), min(rows, last + reach)
            u = product(x[sample, above * width : below * width])[None]
            place = slice(first * width, last * width)
            native.band(
                u, shift, token.weight, token.bias, None if times is None else times[sample : sample + 1, place],
                width, first - above, y[sample : sample + 1, place],
            )  # fmt: skip
    return y


def _channels(linear: Linear | None, x: Tensor) -> Tensor:
    """The channel map of x (B, N, D); x itself where there is none."""
    if linear is None:
        return x
    y = output(x)
    Product(linear, x.dtype)(x.flatten(0, 1), y.view(-1, y.shape[-1]))
    return y


def _group_size(channels: int, tokens: int) -> int:
    return next((size for size in CHANNELS if channels % size == 0), channels) if tokens >= LARGE else channels


def _in_groups(channel: Linear | None, x: Tensor, size: int) -> Iterator[Tensor]:
    """The channel map of x in groups of `size` channels, each dense in memory: (B, N, size) after (B, N, size)."""
    if channel is None:
        yield from (part.contiguous() for part in x.split(size, dim=-1))
        return
    weight, bias = cast(channel, x.dtype)
    rows, place = x.flatten(0, 1), 0
    # Two groups a product: one is too narrow for it, and all would be as large as the output again, which an allocator
    # gives back to the system after every call.
    for some in weight.unflatten(0, (-1, size)).transpose(1, 2).split(2):  # (groups, D, size)
        for part in torch.bmm(rows.expand(some.shape[0], -1, -1), some).unflatten(1, x.shape[:2]):
            yield part if bias is None else part.add_(bias[place : place + size])
            place += size
