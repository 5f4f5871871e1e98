"""PADRe's monomials without gradients on a CPU, for dense channel maps with convolutions over the tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.ops.blocked.common import Linear, begin, cast
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
) -> Tensor:
    """The sum of `polymix.ops.padre.factored`, on the same arguments.

    Memory beside x and the output, both (B, N, D): two arrays as large as x, three from degree 3 on.
    """
    total: Tensor | None = None
    for weight, z in zip(weights, monomials(x.to(begin(x)), first, steps, partial(_apply, grid)), strict=True):
        total = _add(total, weight, z)
    assert total is not None
    return total.to(x.dtype)


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
        if factor.channel is None:
            return x.clone() if times is None else times.mul_(x)
        weight, bias = cast(factor.channel, x.dtype)
        y = F.linear(x, weight)
        y = y if bias is None else y.add_(bias)
        return y if times is None else times.mul_(y)
    weight, bias = cast((factor.token.weight, factor.token.bias), x.dtype)
    size = _group_size(weight.shape[0], math.prod(grid))
    y = x.new_empty(x.shape) if times is None else times
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
