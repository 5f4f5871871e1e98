"""Starting a mixer from the weights of the attention that it replaces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from polymix.structured import DepthwiseConv, Prefixed

Sources = dict[str, tuple[str, ...]]  # parameter of the mixer -> parameters of the attention it was copied from


class Projection(NamedTuple):
    """A linear map of an attention layer. keys: the parameters that hold it, "weight" or "weight[part]"."""

    weight: Tensor  # (out, in), as nn.Linear's
    bias: Tensor | None
    keys: tuple[str, ...]

    def rows(self, first: int, last: int) -> Projection:
        """The part of the map with outputs first … last - 1."""
        return Projection(self.weight[first:last], None if self.bias is None else self.bias[first:last], self.keys)


class Smoothing(NamedTuple):
    """A branch of multi-scale attention: further heads on smoothed copies of the queries, keys and values.

    conv: depthwise convolution (3D, 1, s, s) of [Q | K | V]. mix: grouped map (3D, d, 1, 1) after it. out: the part of
    the output map that reads these heads.
    """

    conv: Projection
    mix: Projection
    out: Projection

    @property
    def size(self) -> int:
        """The side s of the convolution."""
        return self.conv.weight.shape[-1]


@dataclass(frozen=True, kw_only=True)
class AttentionMaps:
    """The linear maps of an attention layer, for `TokenMixer.inherit`.

    Attributes:
        dim: channels of its input and output.
        heads: number of query heads.
        query, key, value, out: its projections; None if it has none.
        scale: factor on the logits. None: d^-½.
        relative: a learned bias for each offset on the grid, (offsets, heads).
        smoothing: its branches on smoothed queries, keys and values, as EfficientViT has them.
    """

    dim: int
    heads: int
    query: Projection | None = None
    key: Projection | None = None
    value: Projection | None = None
    out: Projection | None = None
    scale: float | None = None
    relative: Projection | None = None
    smoothing: tuple[Smoothing, ...] = ()


def copy_map(source: Projection, weight: Tensor, bias: Tensor | None, gain: float = 1.0) -> Sources:
    """Copy gain · source into `weight` and `bias`, and return the sources of both.

    If the source has no bias, `bias` becomes zero.
    """
    bias_keys = tuple(key for key in source.keys if "bias" in key.rpartition(".")[2])
    weight.copy_(gain * source.weight)
    sources: Sources = {"weight": tuple(key for key in source.keys if key not in bias_keys)}
    if bias is None:
        return sources
    if source.bias is None:
        bias.zero_()
    else:
        bias.copy_(gain * source.bias)
    return {**sources, "bias": bias_keys}


def add_sources(total: Sources, prefix: str, sources: Sources) -> None:
    """Add `sources` to `total`, with `prefix` and a dot before each name."""
    for name, keys in sources.items():
        key = f"{prefix}.{name}"
        total[key] = tuple(dict.fromkeys((*total.get(key, ()), *keys)))


def first_rows(bias: Tensor | None, rows: slice) -> Tensor | None:
    """Some rows of a bias; None if there is no bias."""
    return None if bias is None else bias[rows]


def joined(first: Projection, then: Projection) -> Projection:
    """The product of two projections, `first` and `then`, as one."""
    bias = None if first.bias is None else then.weight @ first.bias
    bias = then.bias if bias is None or then.bias is None else bias + then.bias
    return Projection(then.weight @ first.weight, bias, (*first.keys, *then.keys))


def smooth_(part: nn.Module) -> None:
    """Set a depthwise kernel to a local mean: a Gaussian a quarter of the kernel wide; if causal, its later half."""
    part = part.inner if isinstance(part, Prefixed) else part
    if isinstance(part, DepthwiseConv):
        bump = torch.ones((), dtype=part.weight.dtype, device=part.weight.device)
        for size in part.kernel:
            centre = size - 1 if part.site.causal else size // 2
            offset = torch.arange(size, dtype=bump.dtype, device=bump.device) - centre
            bump = bump[..., None] * (-0.5 * (offset / max(size / 4, 0.5)).square()).exp()
        part.weight.copy_((bump / bump.sum()).expand_as(part.weight))
