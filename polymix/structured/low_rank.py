"""Maps of low rank: U V, its rank-1 case, and the mean, which has no weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from polymix.errors import check_int
from polymix.ops.shared.tensors import Counts, Shape, accumulator
from polymix.structured.base import Site, StructuredMap, Weightless, init_
from polymix.structured.cost import Op


class LowRank(StructuredMap):
    """M = U V, with U (out, r) and V (r, in). Causal: its lower triangle, by running sums.

    Cost: r (in + out) multiply-adds per vector.
    """

    kind = "low_rank"
    rectangular = True
    causal_form = True

    def __init__(self, site: Site, *, rank: int = 8, **kw: Any) -> None:
        super().__init__(site)
        check_int("rank", rank, 1)
        self.rank = rank
        self.U = nn.Parameter(torch.empty(site.groups, site.out or 0, rank, **kw))
        self.V = nn.Parameter(torch.empty(site.groups, rank, site.size or 0, **kw))
        init_(self.U, rank)
        init_(self.V, site.size or 1)
        if site.causal:  # row i sums i + 1 entries
            rows = torch.arange(1, (site.out or 0) + 1, device=self.U.device)
            self.U.data.mul_(((site.size or 1) / rows).sqrt().to(self.U)[:, None])

    def multiply(self, v: Tensor, *, transposed: bool, out: int, real: Tensor | None) -> Tensor:
        left, right = (self.V.transpose(-1, -2), self.U.transpose(-1, -2)) if transposed else (self.U, self.V)
        if not self.site.causal:
            return (v @ right.transpose(-1, -2)) @ left.transpose(-1, -2)
        terms = v.unsqueeze(-2) * right.unsqueeze(-3)  # (…, G, R, r, n)
        running = _running(terms, transposed).to(v.dtype)
        return (running * left.transpose(-1, -2).unsqueeze(-3)).sum(-2)

    def matrix(self, n: int, out: int) -> Tensor:
        whole = self.U @ self.V
        return whole.tril() if self.site.causal else whole

    def vector_ops(self, rows: int, n: int, out: int) -> list[Op]:
        groups = self.site.groups
        if self.site.causal:
            return [Op("elementwise", (rows * groups * self.rank * (n + out),))]
        if groups == 1:
            return [Op("linear", (rows, n, self.rank, 1)), Op("linear", (rows, self.rank, out, 1))]
        return [Op("matmul", (groups, rows, n, self.rank)), Op("matmul", (groups, rows, self.rank, out))]

    def scale_(self, gain: float) -> bool:
        self.V.data.mul_(gain)
        return True


class RankOne(LowRank):
    """M = u vᵀ.

    Cost: in + out multiply-adds per vector.
    """

    kind = "rank_one"

    def __init__(self, site: Site, **kw: Any) -> None:
        super().__init__(site, rank=1, **kw)


class Mean(Weightless):
    """Every output entry is the mean of the input, without padding. Causal: the mean of the entries so far.

    It has no weights and takes any length. As a mean it turns variance 1 into 1/n, and has no scale to correct that.

    Cost: no products; n additions per vector.
    State: the sum and the count (causal).
    """

    kind = "mean"
    keeps_variance = False
    rectangular = True

    @property
    def recurrent(self) -> bool:
        return self.site.causal

    def multiply(self, v: Tensor, *, transposed: bool, out: int, real: Tensor | None) -> Tensor:
        n, dtype = v.shape[-1], accumulator(v.dtype)
        if self.site.causal:
            count = torch.arange(1, n + 1, device=v.device, dtype=dtype)
            y = _running(v / count, True) if transposed else v.cumsum(-1, dtype=dtype) / count
        else:
            y = v.sum(-1, keepdim=True, dtype=dtype)
            if real is not None:  # (B, n) beside (B, G, R, n)
                y = y / real.sum(-1).clamp_min(1)[:, None, None, None]
            else:
                y = y / (out if transposed else n)
            y = y.expand(*v.shape[:-1], out)
        return y.to(v.dtype)

    def matrix(self, n: int, out: int) -> Tensor:
        ones = self.like.new_ones(1, out, n)
        return ones.tril() / torch.arange(1, n + 1, device=ones.device)[:, None] if self.site.causal else ones / n

    def vector_ops(self, rows: int, n: int, out: int) -> list[Op]:
        return [Op("elementwise", (rows * self.site.groups * (n + (out if self.site.causal else 0)),))]

    def memory(self, batch: int) -> list[Shape]:
        return [(batch, 1, self.site.channels), Counts((batch, 1, 1))]

    def scan(self, x: Tensor, past: list[Tensor], real: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        total, count = past
        if real is not None:
            x = x.masked_fill(~real.unsqueeze(-1), 0.0)
        running = total + x.cumsum(1, dtype=total.dtype)
        ones = x.new_ones(x.shape[:2], dtype=torch.int64) if real is None else real.to(torch.int64)
        seen = count + ones.cumsum(1).unsqueeze(-1)
        return (running / seen.clamp_min(1)).to(x.dtype), [running[:, -1:].clone(), seen[:, -1:].clone()]


def _running(terms: Tensor, backwards: bool) -> Tensor:
    """Running sums along the last axis, from its end if `backwards`, at least in float32."""
    dtype = accumulator(terms.dtype)
    return terms.flip(-1).cumsum(-1, dtype=dtype).flip(-1) if backwards else terms.cumsum(-1, dtype=dtype)
