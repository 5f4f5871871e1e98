"""The maps of PADRe in plain PyTorch without gradients, for `polymix.ops.padre.inplace`."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from polymix.ops.padre.eager import Convolution, pad
from polymix.ops.padre.inplace import pointwise
from polymix.ops.shared.blocks import output
from polymix.ops.shared.depthwise import depthwise_conv
from polymix.ops.shared.tensors import Linear, cast

# From so many tokens on, a depthwise convolution of all channels does not fit in the cache. The channels are then
# processed in groups of the first of these sizes that divides their number.
MIN_GROUPED_TOKENS = 2048
GROUP_SIZES = (48, 64, 32, 16)


def apply(
    token: Convolution | None, channel: Linear | None, x: Tensor, times: Tensor | None, grid: tuple[int, ...]
) -> Tensor:
    """Apply the channel map to x (B, N, D), then the token map, and multiply into `times` if given; never returns x."""
    if token is None:
        return pointwise(channel, x, times)
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


def _group_size(channels: int, tokens: int) -> int:
    """How many channels to convolve at once."""
    if tokens < MIN_GROUPED_TOKENS:
        return channels
    return next((size for size in GROUP_SIZES if channels % size == 0), channels)


def _in_groups(channel: Linear | None, x: Tensor, size: int) -> Iterator[Tensor]:
    """Yield the outputs of the channel map in groups of `size` channels, each a contiguous (B, N, size)."""
    if channel is None:
        yield from (part.contiguous() for part in x.split(size, dim=-1))
        return
    weight, bias = channel
    rows, first = x.flatten(0, 1), 0
    # Two groups per product: one group is too narrow for a fast product, and all groups together need another array
    # of the size of the output, which the allocator would return to the system after every call.
    for pair in weight.unflatten(0, (-1, size)).transpose(1, 2).split(2):  # (groups, D, size)
        for part in torch.bmm(rows.expand(pair.shape[0], -1, -1), pair).unflatten(1, x.shape[:2]):
            yield part if bias is None else part.add_(bias[first : first + size])
            first += size
