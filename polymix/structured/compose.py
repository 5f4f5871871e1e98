"""Maps made of maps: the identity, sums, products, and a map with prefix tokens beside it."""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor, nn

from polymix.ops.shared.prefix import PrefixMap
from polymix.ops.shared.tensors import Shape
from polymix.structured.base import Grid, Site, StructuredMap, Weightless
from polymix.structured.cost import Op


class Identity(Weightless):
    """The identity, without parameters or bias.

    Cost: none.
    """

    kind = "identity"

    @property
    def recurrent(self) -> bool:
        return self.site.causal

    def add_bias(self, **kw: Any) -> None:
        """An identity has no bias."""

    def act(self, x: Tensor, grid: Grid, mask: Tensor | None, *, out: int | None, transposed: bool) -> Tensor:
        return x if mask is None else x.masked_fill(~mask.unsqueeze(-1), 0.0)

    def multiply(self, v: Tensor, *, transposed: bool, out: int, real: Tensor | None) -> Tensor:
        return v

    def matrix(self, n: int, out: int) -> Tensor:
        return torch.eye(n, dtype=self.like.dtype, device=self.like.device)[None]

    def vector_ops(self, rows: int, n: int, out: int) -> list[Op]:
        return []

    def scan(self, x: Tensor, past: list[Tensor], real: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        return x, []


class _Composite(StructuredMap):
    """A map made of parts, which do the layout themselves."""

    fixed = False  # the parts check their own lengths
    rectangular = True
    causal_form = True

    def __init__(self, site: Site, parts: list[StructuredMap]) -> None:
        super().__init__(site)
        self.parts = nn.ModuleList(parts)

    @property
    def members(self) -> list[StructuredMap]:
        return [part for part in self.parts if isinstance(part, StructuredMap)]

    @property
    def recurrent(self) -> bool:
        return all(part.recurrent for part in self.members)

    def multiply(self, v: Tensor, *, transposed: bool, out: int, real: Tensor | None) -> Tensor:
        raise NotImplementedError("a composite acts through its parts")

    def matrix(self, n: int, out: int) -> Tensor:
        raise NotImplementedError("a composite is dense through its parts")

    def vector_ops(self, rows: int, n: int, out: int) -> list[Op]:
        raise NotImplementedError("a composite costs what its parts cost")

    def memory(self, batch: int) -> list[Shape]:
        return [shape for part in self.members for shape in part.memory(batch)]

    def _split(self, past: list[Tensor]) -> list[list[Tensor]]:
        """The state of each part."""
        rest, split = list(past), []
        for part in self.members:
            count = len(part.memory(0))
            split.append(rest[:count])
            rest = rest[count:]
        return split


class Sum(_Composite):
    """M = Σ_k M_k. Costs what its parts cost."""

    kind = "sum"

    def act(self, x: Tensor, grid: Grid, mask: Tensor | None, *, out: int | None, transposed: bool) -> Tensor:
        return reduce(add, (part.act(x, grid, mask, out=out, transposed=transposed) for part in self.members))

    def dense(self, n: int | None = None, grid: Grid = None, out: int | None = None) -> Tensor:
        return reduce(add, (part.dense(n, grid, out) for part in self.members))

    def cost_ops(self, n: int, grid: Grid = None, out: int | None = None) -> list[Op]:
        return [op for part in self.members for op in part.cost_ops(n, grid, out)]

    def scale_(self, gain: float) -> bool:
        done = [part.scale_(gain) for part in self.members]  # scale every part, even if another has no scale
        return all(done)

    def scan(self, x: Tensor, past: list[Tensor], real: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        pairs = [part.scan(x, its, real) for part, its in zip(self.members, self._split(past), strict=True)]
        return reduce(add, (y for y, _ in pairs)), [tensor for _, memory in pairs for tensor in memory]


class Product(_Composite):
    """M = M_1 M_2 …: the last part acts first. Between two lengths, it is the part that changes the length."""

    kind = "product"

    def _after(self, n: int | None, out: int | None) -> int | None:
        """Number of entries after the first part has acted."""
        return out or (n if self.site.square else self.site.out)

    def act(self, x: Tensor, grid: Grid, mask: Tensor | None, *, out: int | None, transposed: bool) -> Tensor:
        for part in self.members if transposed else reversed(self.members):
            length = out if part.site.side == "channel" or not part.site.square or part is self.members[-1] else None
            x = part.act(x, grid, mask, out=length, transposed=transposed)
            mask = mask if mask is None or mask.shape[1] == x.shape[1] else None
        return x

    def dense(self, n: int | None = None, grid: Grid = None, out: int | None = None) -> Tensor:
        first, *rest = reversed(self.members)
        whole = first.dense(n, grid, out)
        for part in rest:
            matrix = part.dense(self._after(n, out), grid, None)
            whole = whole @ matrix if self.site.side == "channel" else matrix @ whole
        return whole

    def cost_ops(self, n: int, grid: Grid = None, out: int | None = None) -> list[Op]:
        *rest, first = self.members
        length = (self._after(n, out) if self.site.side == "token" else n) or n
        return first.cost_ops(n, grid, out) + [op for part in reversed(rest) for op in part.cost_ops(length, grid)]

    def scale_(self, gain: float) -> bool:
        return any(part.scale_(gain) for part in self.members)  # the first that can

    def scan(self, x: Tensor, past: list[Tensor], real: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        memory: list[list[Tensor]] = []
        for part, its in reversed(list(zip(self.members, self._split(past), strict=True))):
            x, new = part.scan(x, its, real)
            memory.insert(0, new)
        return x, [tensor for part in memory for tensor in part]


class Prefixed(nn.Module):
    """A map over the grid tokens, after p prefix tokens that lie outside the grid (class token, registers).

    Prefix token j becomes prefix_self[j] ⊙ itself + prefix_mean[j] ⊙ the mean of the grid tokens. The grid tokens do
    not see the prefix. The bias is added to every token.
    """

    def __init__(self, inner: StructuredMap, prefix: int, bias: bool, **kw: Any) -> None:
        super().__init__()
        dim = inner.site.channels
        self.inner, self.prefix = inner, prefix
        self.bias = nn.Parameter(torch.zeros(dim, **kw)) if bias else None
        self.prefix_self = nn.Parameter(torch.ones(prefix, dim, **kw))
        self.prefix_mean = nn.Parameter(torch.ones(prefix, dim, **kw))

    def forward(self, x: Tensor, grid: Grid = None, mask: Tensor | None = None) -> Tensor:
        p = self.prefix
        if mask is not None:
            x = x.masked_fill(~mask.unsqueeze(-1), 0.0)
        y = self.inner(x[:, p:], grid, None if mask is None else mask[:, p:])
        y = torch.cat((self.prefix_map(x, mask).to(y.dtype), y), dim=1)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    @property
    def prefix_map(self) -> PrefixMap:
        """What becomes of the prefix tokens, without the bias."""
        return PrefixMap(self.prefix_self, self.prefix_mean)

    def dense(self, n: int, grid: Grid = None) -> Tensor:
        """(D, N, N) over prefix and grid."""
        return beside_prefix_matrix(self.inner.dense(n - self.prefix, grid), self.prefix_self, self.prefix_mean)

    def cost_ops(self, n: int, grid: Grid = None) -> list[Op]:
        return self.inner.cost_ops(n - self.prefix, grid)

    def scale_(self, gain: float) -> bool:
        return self.inner.scale_(gain)


def beside_prefix_matrix(body: Tensor, own: Tensor, mean: Tensor) -> Tensor:
    """The matrices (D, N, N) of a map over the grid, `body` (D, N - p, N - p), with `PrefixMap(own, mean)` in front."""
    p, m = len(own), body.shape[-1]
    whole = body.new_zeros(own.shape[1], p + m, p + m)
    whole[:, p:, p:] = body
    whole[:, :p, :p] = torch.diag_embed(own.t())
    whole[:, :p, p:] = (mean.t() / m).unsqueeze(-1)
    return whole


__all__ = ["Identity", "Prefixed", "Product", "Sum", "beside_prefix_matrix"]
