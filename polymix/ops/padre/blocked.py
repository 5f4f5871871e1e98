"""PADRe without gradients on a CPU, for dense channel maps with convolutions over the tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from polymix.ops.padre.eager import Convolution, PadreMaps, PadreTerms, pad
from polymix.ops.shared.blocks import Product, blocks, computed_in, output
from polymix.ops.shared.depthwise import depthwise_conv
from polymix.ops.shared.tensors import Linear, cast, share

# A depthwise convolution of all channels at once leaves the cache where the grid is large; so many at a time do not.
CHANNELS = (48, 64, 32, 16)
LARGE = 2048  # tokens

# apply(grid, channel, token, x, times): the channel map of x, then the token map, multiplied into `times` if given
Apply = Callable[[tuple[int, ...], Linear | None, Convolution | None, Tensor, Tensor | None], Tensor]


def padre(x: Tensor, maps: PadreMaps, terms: PadreTerms, grid: tuple[int, ...], apply: Apply) -> Tensor:
    """Σ_i W_i ⊙ Z_i, each map applied in place by `apply`: that of this file, or the kernel's in C.

    Memory beside x and the output, both (B, N, D): two arrays as large as x, three from degree 3 on.
    """
    assert maps.shared is not None
    dtype, dim, d = computed_in(x), x.shape[-1], terms.degree
    x_wide = x.to(dtype)
    inner = [share(maps.shared, i * dim, (i + 1) * dim) for i in range(d)]
    outer, last_weighs = list(maps.A), False
    weights = [_weight(terms, i) for i in range(1, d + 1)]
    last = weights[-1]
    if d > 1 and isinstance(last, Tensor) and last.ndim == 1:  # into the last map of X, which spares a pass
        inner[-1], outer[-1] = _weighed(inner[-1], _convolution(outer[-1]), last.to(dtype))
        last_weighs = True

    # Z_1 = X B_1 may be used for nothing but C_1 Z_1: then both maps go together, and what comes of it is overwritten.
    joined = d > 1 and maps.A[0] is None and maps.D[0] is None and 1 not in terms.terms
    z = apply(grid, inner[0], _convolution(maps.C[0] if joined else outer[0]), x_wide, None)
    total = _add(None, weights[0], z)
    for i in range(1, d):
        if i > 1 or not joined:
            channel = maps.D[i - 1]
            assert channel is None or isinstance(channel, tuple)
            z = apply(grid, channel, _convolution(maps.C[i - 1]), z, None)
        z = apply(grid, inner[i], _convolution(outer[i]), x_wide, z)
        total = _add(total, 1.0 if i == d - 1 and last_weighs else weights[i], z)
    assert total is not None
    return total.to(x.dtype)


def _convolution(part: object) -> Convolution | None:
    assert part is None or isinstance(part, Convolution)
    return part


def _weight(terms: PadreTerms, i: int) -> Tensor | float:
    """W_i: 0.0 where the degree does not enter the sum, 1.0 where it enters unweighted."""
    if i not in terms.terms:
        return 0.0
    return 1.0 if terms.weight is None else terms.weight[terms.terms.index(i)]


def _weighed(channel: Linear, token: Convolution | None, by: Tensor) -> tuple[Linear, Convolution | None]:
    """A channel map and a token map whose outputs are multiplied with `by`, a factor for each channel."""
    if token is not None:
        bias = None if token.bias is None else token.bias * by
        scale = by.view(-1, *(1,) * (token.weight.ndim - 1))
        return channel, token._replace(weight=token.weight * scale, bias=bias)
    weight, bias = channel
    return (weight * by.unsqueeze(-1), None if bias is None else bias * by), None


def _add(total: Tensor | None, weight: Tensor | float, z: Tensor) -> Tensor | None:
    """total + weight ⊙ z; total may be z of the degree before, which is no longer needed."""
    if isinstance(weight, float):
        if weight == 0.0:
            return total
        return z if total is None else total.add_(z)
    weight = weight.to(z.dtype)
    return weight * z if total is None else total.addcmul_(weight.expand_as(z), z)


def apply(
    grid: tuple[int, ...], channel: Linear | None, token: Convolution | None, x: Tensor, times: Tensor | None
) -> Tensor:
    """The maps of x (B, N, D), multiplied into `times` where that is given; never x itself."""
    if token is None:
        if times is None or channel is None:
            y = map_channels(channel, x)
            return times.mul_(y) if times is not None else y.clone() if y is x else y
        product = Product(channel, x.dtype)
        for block in blocks(x):
            block.of(times).mul_(block.split(product(block.rows(x, x.dtype))))
        return times
    weight, bias = cast((token.weight, token.bias), x.dtype)
    size = _group_size(weight.shape[0], math.prod(grid))
    y = output(x) if times is None else times
    for place, part in enumerate(_in_groups(channel, x, size)):
        group = slice(place * size, (place + 1) * size)
        mixed = depthwise_conv(
            pad(token, part), weight[group], grid, causal=token.causal, dilation=token.dilation,
            bias=None if bias is None else bias[group],
        )  # fmt: skip
        if times is None:
            y[..., group] = mixed
        else:
            y[..., group].mul_(mixed)
    return y


def map_channels(linear: Linear | None, x: Tensor) -> Tensor:
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
