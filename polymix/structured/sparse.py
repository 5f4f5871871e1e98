"""Maps with few entries: diagonal, banded, and a fixed random pattern."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polymix.errors import check_int, check_number
from polymix.structured.base import Site, StructuredMap
from polymix.structured.cost import Op


class Diagonal(StructuredMap):
    """M = diag(w), with w = 1 at init.

    Cost: n multiply-adds per vector.
    """

    kind = "diagonal"
    causal_form = True

    def __init__(self, site: Site, **kw: Any) -> None:
        super().__init__(site)
        self.weight = nn.Parameter(torch.ones(site.groups, site.size or 0, **kw))

    def multiply(self, v: Tensor, *, transposed: bool, out: int, real: Tensor | None) -> Tensor:
        return v * self.weight.unsqueeze(-2)

    def matrix(self, n: int, out: int) -> Tensor:
        return torch.diag_embed(self.weight)

    def vector_ops(self, rows: int, n: int, out: int) -> list[Op]:
        return [Op("elementwise", (rows * self.site.groups * n,))]

    def scale_(self, gain: float) -> bool:
        self.weight.data.mul_(gain)
        return True


class Banded(StructuredMap):
    """M_ij = w[j - i + lower, i] up to `lower` entries below and `upper` above the diagonal, else 0.

    Causal maps have no upper part.

    Cost: n (lower + 1 + upper) multiply-adds per vector.
    """

    kind = "banded"
    causal_form = True

    def __init__(self, site: Site, *, lower: int = 5, upper: int | None = None, **kw: Any) -> None:
        super().__init__(site)
        check_int("lower", lower, 0)
        upper = (0 if site.causal else lower) if upper is None else upper
        check_int("upper", upper, 0, 0 if site.causal else None)
        self.lower, self.upper = lower, upper
        self.weight = nn.Parameter(torch.empty(site.groups, lower + 1 + upper, site.size or 0, **kw))
        nn.init.normal_(self.weight, std=(lower + 1 + upper) ** -0.5)

    def multiply(self, v: Tensor, *, transposed: bool, out: int, real: Tensor | None) -> Tensor:
        n, bands = v.shape[-1], self.lower + 1 + self.upper
        weight = self.weight.unsqueeze(-2)  # (G, bands, 1, n)
        if transposed:
            padded = [F.pad(v * weight[:, k], (self.upper, self.lower)) for k in range(bands)]
            return torch.stack([padded[k][..., bands - 1 - k :][..., :n] for k in range(bands)]).sum(0)
        wide = F.pad(v, (self.lower, self.upper))
        return torch.stack([weight[:, k] * wide[..., k : k + n] for k in range(bands)]).sum(0)

    def matrix(self, n: int, out: int) -> Tensor:
        whole = self.weight.new_zeros(self.weight.shape[0], n, n)
        for k in range(self.weight.shape[1]):
            shift = k - self.lower
            if abs(shift) >= n:
                continue
            rows = torch.arange(max(0, -shift), min(n, n - shift), device=whole.device)
            whole = whole.index_put((slice_all(whole), rows[None], (rows + shift)[None]), self.weight[:, k, rows])
        return whole

    def vector_ops(self, rows: int, n: int, out: int) -> list[Op]:
        return [Op("elementwise", (rows * self.site.groups * n * (self.lower + 1 + self.upper),))]

    def scale_(self, gain: float) -> bool:
        self.weight.data.mul_(gain)
        return True


def slice_all(whole: Tensor) -> Tensor:
    return torch.arange(whole.shape[0], device=whole.device)[:, None]


class Sparse(StructuredMap):
    """Learned values at a random pattern of about `density` of all entries, and the diagonal.

    The pattern is drawn once from `seed` and kept in the buffers `rows` and `columns`, and so in the state dict.
    Causal maps keep its lower triangle.

    Cost: a multiply-add per entry kept and vector.
    """

    kind = "sparse"
    rectangular = True
    causal_form = True
    rows: Tensor
    columns: Tensor

    def __init__(self, site: Site, *, density: float = 0.1, seed: int = 0, **kw: Any) -> None:
        super().__init__(site)
        check_number("density", density, 0.0, 1.0 + 1e-9, "a share in [0, 1]", 0.1)
        check_int("seed", seed, 0, 2**63 - 1)
        n, out = site.size or 0, site.out or 0
        pattern = torch.rand(out, n, generator=torch.Generator().manual_seed(seed), device="cpu") < density
        place = torch.arange(max(n, out))
        pattern[place % out, place % n] = True  # no row and no column is empty
        rows, columns = (pattern.tril() if site.causal else pattern).nonzero().unbind(1)
        device = kw.get("device")
        self.register_buffer("rows", rows.to(device))
        self.register_buffer("columns", columns.to(device))
        self.weight = nn.Parameter(torch.empty(site.groups, len(rows), **kw))
        nn.init.normal_(self.weight)
        its = torch.bincount(rows, minlength=out)[rows]  # how many entries each row has
        self.weight.data.mul_((its**-0.5).to(self.weight))

    def multiply(self, v: Tensor, *, transposed: bool, out: int, real: Tensor | None) -> Tensor:
        read, write = (self.rows, self.columns) if transposed else (self.columns, self.rows)
        terms = v[..., read] * self.weight.unsqueeze(-2)
        return terms.new_zeros(*v.shape[:-1], out).index_add(-1, write, terms)

    def matrix(self, n: int, out: int) -> Tensor:
        whole = self.weight.new_zeros(self.weight.shape[0], out, n)
        return whole.index_put((slice_all(whole), self.rows[None], self.columns[None]), self.weight)

    def vector_ops(self, rows: int, n: int, out: int) -> list[Op]:
        return [Op("elementwise", (rows * self.weight.numel(),))]

    def scale_(self, gain: float) -> bool:
        self.weight.data.mul_(gain)
        return True
