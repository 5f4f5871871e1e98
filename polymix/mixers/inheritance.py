"""How a mixer starts from the weights of the attention that it replaces: the attention's maps, copied part by part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

Sources = dict[str, tuple[str, ...]]  # a mixer's parameter: the attention's parameters that it comes from


class Projection(NamedTuple):
    """A linear map of an attention layer, and the parameters that it comes from: "weight", or "weight[part]"."""

    weight: Tensor  # (out, in), as nn.Linear's
    bias: Tensor | None
    keys: tuple[str, ...]

    def rows(self, first: int, last: int) -> Projection:
        """Outputs first … last - 1 alone."""
        return Projection(self.weight[first:last], None if self.bias is None else self.bias[first:last], self.keys)


@dataclass(frozen=True, kw_only=True)
class AttentionMaps:
    """What an attention layer computes with.

    dim: channels of its input and output. heads: of its queries. query … out: its maps, where it has them. scale: of
    its logits; None: d^-½. relative: a learned bias for each offset on the grid, (offsets, heads).
    """

    dim: int
    heads: int
    query: Projection | None = None
    key: Projection | None = None
    value: Projection | None = None
    out: Projection | None = None
    scale: float | None = None
    relative: Projection | None = None


def copy_map(source: Projection, weight: Tensor, bias: Tensor | None, gain: float = 1.0) -> Sources:
    """Fill `weight` and `bias` with gain · source, zeros where the source has no bias; says what each came from."""
    of_bias = ["bias" in key.rpartition(".")[2] for key in source.keys]
    pairs = list(zip(source.keys, of_bias, strict=True))
    weight.copy_(gain * source.weight)
    found: Sources = {"weight": tuple(key for key, is_bias in pairs if not is_bias)}
    if bias is None:
        return found
    if source.bias is None:
        bias.zero_()
    else:
        bias.copy_(gain * source.bias)
    return {**found, "bias": tuple(key for key, is_bias in pairs if is_bias)}


def add_sources(found: Sources, prefix: str, sources: Sources) -> None:
    """Add `sources` to `found`, each name behind `prefix`."""
    for name, keys in sources.items():
        key = f"{prefix}.{name}"
        found[key] = tuple(dict.fromkeys((*found.get(key, ()), *keys)))


def first_rows(bias: Tensor | None, rows: slice) -> Tensor | None:
    """The rows of a bias that may not be there."""
    return None if bias is None else bias[rows]
