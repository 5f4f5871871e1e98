"""PADRe on a CPU without gradients, for dense channel maps and depthwise convolutions over the tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from polymix.ops.padre.eager import Convolution, PadreMaps, PadreTerms, pad
from polymix.ops.shared.blocks import Product, blocks, computed_in, output
from polymix.ops.shared.depthwise import depthwise_conv
from polymix.ops.shared.prefix import PrefixMap
from polymix.ops.shared.tensors import Linear, cast, share

# On grids of LARGE tokens or more, a depthwise convolution of all channels does not fit in the cache. The channels
# are then processed in groups of the first of these sizes that divides their number.
CHANNELS = (48, 64, 32, 16)
LARGE = 2048

# apply(grid, channel, token, x, times) applies the channel map to x, then the token map, and multiplies the result
# into `times` if given.
Apply = Callable[[tuple[int, ...], Linear | None, Convolution | None, Tensor, Tensor | None], Tensor]


def padre(x: Tensor, maps: PadreMaps, terms: PadreTerms, grid: tuple[int, ...], apply: Apply) -> Tensor:
    """Compute Σ_i W_i ⊙ Z_i in place.

    `apply` applies the maps: that of this module, or of `polymix.ops.padre.native`. Memory besides x and the output:
    two arrays of the size of x, or three from degree 3 on.
    """
    assert maps.shared is not None
    dtype, dim, d = computed_in(x), x.shape[-1], terms.degree
    x_cast = x if x.dtype == dtype else x.to(dtype)
    inner = [share(maps.shared, i * dim, (i + 1) * dim) for i in range(d)]
    outer, weight_merged = list(maps.A), False
    weights = [_weight(terms, i) for i in range(1, d + 1)]
    last = weights[-1]
    if d > 1 and isinstance(last, Tensor) and last.ndim == 1:  # merging W_d into the last maps of X saves a pass
        inner[-1], outer[-1] = _scaled(inner[-1], _convolution(outer[-1]), last.to(dtype))
        weight_merged = True

    # If Z_1 = X B_1 is used only for C_1 Z_1, both maps are applied together, and Z_1 itself is never stored.
    joined = d > 1 and maps.A[0] is None and maps.D[0] is None and 1 not in terms.terms
    z = apply(grid, inner[0], _convolution(maps.C[0] if joined else outer[0]), x_cast, None)
    total = _add(None, weights[0], z)
    for i in range(1, d):
        if i > 1 or not joined:
            channel = maps.D[i - 1]
            assert channel is None or isinstance(channel, tuple)
            z = apply(grid, channel, _convolution(maps.C[i - 1]), z, None)
        z = apply(grid, inner[i], _convolution(outer[i]), x_cast, z)
        total = _add(total, 1.0 if i == d - 1 and weight_merged else weights[i], z)
    assert total is not None
    return total.to(x.dtype)


def _convolution(part: object) -> Convolution | None:
    assert part is None or isinstance(part, Convolution)
    return part


def _weight(terms: PadreTerms, i: int) -> Tensor | float:
    """W_i: 0.0 if degree i is not summed, 1.0 if it is summed without a weight."""
    if i not in terms.terms:
        return 0.0
    return 1.0 if terms.weight is None else terms.weight[terms.terms.index(i)]


def _scaled(channel: Linear, token: Convolution | None, factor: Tensor) -> tuple[Linear, Convolution | None]:
    """Multiply the outputs of a channel map followed by a token map with `factor` (D), by scaling one of the maps."""
    if token is not None:
        bias = None if token.bias is None else token.bias * factor
        scale = factor.view(-1, *(1,) * (token.weight.ndim - 1))
        prefix = None if token.prefix is None else PrefixMap(token.prefix.own * factor, token.prefix.mean * factor)
        return channel, token._replace(weight=token.weight * scale, bias=bias, prefix=prefix)
    weight, bias = channel
    return (weight * factor.unsqueeze(-1), None if bias is None else bias * factor), None


def _add(total: Tensor | None, weight: Tensor | float, z: Tensor) -> Tensor | None:
    """total + weight ⊙ z, in place. `total` may be the z of the previous degree, which is no longer needed."""
    if isinstance(weight, float):
        if weight == 0.0:
            return total
        return z if total is None else total.add_(z)
    weight = weight.to(z.dtype)
    return weight * z if total is None else total.addcmul_(weight.expand_as(z), z)


def apply(
    grid: tuple[int, ...], channel: Linear | None, token: Convolution | None, x: Tensor, times: Tensor | None
) -> Tensor:
    """Apply the channel map and the token map to x (B, N, D), and multiply into `times` if given; never returns x."""
    if token is None:
        if times is None or channel is None:
            y = map_channels(channel, x)
            return times.mul_(y) if times is not None else y.clone() if y is x else y
        product = Product(channel, x.dtype)
        for block in blocks(x):
            block.of(times).mul_(block.split(product(block.rows(x, x.dtype))))
        return times
    size, p = _group_size(x.shape[-1], math.prod(grid)), token.num_prefix_tokens
    y = output(x) if times is None else times
    for number, part in enumerate(_in_groups(channel, x, size)):
        group = slice(number * size, (number + 1) * size)
        own = token.of_channels(group)
        part, (weight, bias) = own.hide(part), cast((own.weight, own.bias), x.dtype)
        mixed = depthwise_conv(pad(own, part[:, p:]), weight, grid, causal=own.causal, dilation=own.dilation, bias=bias)
        results = [(y[:, p:, group], mixed)]
        if p:
            results.append((y[:, :p, group], own.map_prefix(part)))
        for place, result in results:
            if times is None:
                place.copy_(result)
            else:
                place.mul_(result)
    return y


def map_channels(linear: Linear | None, x: Tensor) -> Tensor:
    """Apply a channel map to x (B, N, D); None returns x itself."""
    if linear is None:
        return x
    y = output(x)
    Product(linear, x.dtype)(x.flatten(0, 1), y.view(-1, y.shape[-1]))
    return y


def _group_size(channels: int, tokens: int) -> int:
    """How many channels to convolve at once."""
    return next((size for size in CHANNELS if channels % size == 0), channels) if tokens >= LARGE else channels


def _in_groups(channel: Linear | None, x: Tensor, size: int) -> Iterator[Tensor]:
    """Yield the outputs of the channel map in groups of `size` channels, each a contiguous (B, N, size)."""
    if channel is None:
        yield from (part.contiguous() for part in x.split(size, dim=-1))
        return
    weight, bias = cast(channel, x.dtype)
    rows, first = x.flatten(0, 1), 0
    # Two groups per product: one group is too narrow for a fast product, and all groups together need another array
    # of the size of the output, which the allocator would return to the system after every call.
    for pair in weight.unflatten(0, (-1, size)).transpose(1, 2).split(2):  # (groups, D, size)
        for part in torch.bmm(rows.expand(pair.shape[0], -1, -1), pair).unflatten(1, x.shape[:2]):
            yield part if bias is None else part.add_(bias[first : first + size])
            first += size
