"""Several channel maps of the same input; the dense ones share one matrix product."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polymix.ops import decode
from polymix.structured.base import Site, StructuredMap
from polymix.structured.cost import Op, linear_op
from polymix.structured.dense import linear
from polymix.structured.registry import create_map


class ParallelLinear(nn.Module):
    """Y_i = X B_i + b_i for every B_i in `specs`. Those named "dense" share one matrix product.

    Its output is laid out as (heads, maps, D / heads), so that the blocks of a block-diagonal map are the heads.
    """

    def __init__(self, specs: tuple[str, ...], dim: int, heads: int, bias: bool, **kw: Any) -> None:
        super().__init__()
        self.specs, self.dim, self.heads = specs, dim, heads
        self.count = specs.count("dense")
        self.maps = linear(dim, self.count * dim, heads, bias, **kw) if self.count else None
        site = Site("channel", dim, dim // heads, dim // heads, groups=heads)
        rest = (spec for spec in specs if spec != "dense")
        self.others = nn.ModuleList(create_map(spec, site, bias=bias, **kw) for spec in rest)

    def forward(self, x: Tensor, shared: tuple[Tensor, Tensor | None] | None = None) -> list[Tensor]:
        """Returns [Y_1, Y_2, …]. `shared` replaces the weight and bias of the shared product (one head only)."""
        dense: list[Tensor] = []
        if self.maps is not None:
            product = self.maps(x) if shared is None else decode.linear(x, *shared)
            split = product.unflatten(-1, (self.heads, self.count, -1))
            dense = [part.flatten(-2) for part in split.unbind(-2)]
        first, others = iter(dense), iter(self.others)
        return [next(first) if spec == "dense" else next(others)(x) for spec in self.specs]

    def one(self, index: int, x: Tensor) -> Tensor:
        """Y of map `index` alone. With several heads, all dense maps are computed."""
        if self.specs[index] != "dense":
            return self._other(index)(x)
        alone = self.linear(index)
        return self(x)[index] if alone is None else F.linear(x, *alone)

    def _other(self, index: int) -> StructuredMap:
        other = self.others[sum(spec != "dense" for spec in self.specs[:index])]
        assert isinstance(other, StructuredMap)
        return other

    def scale_(self, index: int, gain: float) -> bool:
        """Multiply map `index` by `gain`, for the init of a mixer. Returns False if the map has no scale."""
        if self.specs[index] != "dense":
            return self._other(index).scale_(gain)
        assert self.maps is not None
        with torch.no_grad():
            place = self.specs[:index].count("dense")
            self.maps.weight.view(self.heads, self.count, -1, self.dim // self.heads)[:, place] *= gain
        return True

    def linear(self, index: int) -> tuple[Tensor, Tensor | None] | None:
        """Views of map `index`'s parameters: weight (D, D) as in nn.Linear, and bias. None unless it is dense."""
        if self.specs[index] != "dense" or self.heads > 1:
            return None
        assert self.maps is not None
        place = self.specs[:index].count("dense")
        rows = slice(place * self.dim, (place + 1) * self.dim)
        return self.maps.weight[rows], None if self.maps.bias is None else self.maps.bias[rows]

    def dense(self, index: int) -> tuple[Tensor, Tensor | None]:
        """Map `index` as a matrix (D, D) and a bias (D)."""
        if self.specs[index] != "dense":
            other = self._other(index)
            return other.dense(), other.bias
        assert self.maps is not None
        place = self.specs[:index].count("dense")
        weight = self.maps.weight.view(self.heads, self.count, -1, self.dim // self.heads)[:, place]
        bias = None if self.maps.bias is None else self.maps.bias.view(self.heads, self.count, -1)[:, place].flatten()
        return torch.block_diag(*weight.transpose(-1, -2)), bias

    def cost_ops(self, n: int) -> list[Op]:
        shared = [] if self.maps is None else [linear_op(n, self.maps)]
        return shared + [op for other in self.others if isinstance(other, StructuredMap) for op in other.cost_ops(n)]
