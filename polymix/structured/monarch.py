"""Monarch matrices: two block-diagonal factors with a permutation between them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from polymix.errors import check_divides, check_int
from polymix.structured.base import Site, StructuredMap, init_
from polymix.structured.cost import Op


class Monarch(StructuredMap):
    """M = P L Pᵀ R for n = b · m, where R has b blocks of m × m, L has m blocks of b × b, and P transposes (b, m).

        M[(i, j), (k, l)] = L[j, i, k] R[k, j, l]

    `blocks` is b; None takes the divisor of n closest to √n. Every output reads every input.

    Cost: n (b + m) multiply-adds per vector.
    Source: Dao et al. (2022).
    """

    kind = "monarch"

    def __init__(self, site: Site, *, blocks: int | None = None, **kw: Any) -> None:
        super().__init__(site)
        n = site.size or 0
        if blocks is None:
            blocks = min((b for b in range(1, n + 1) if n % b == 0), key=lambda b: (abs(b - math.sqrt(n)), b))
        check_int("blocks", blocks, 1)
        check_divides("blocks", blocks, "the size of a monarch map", n)
        self.blocks, rest = blocks, n // blocks
        self.L = nn.Parameter(torch.empty(site.groups, rest, blocks, blocks, **kw))
        self.R = nn.Parameter(torch.empty(site.groups, blocks, rest, rest, **kw))
        init_(self.L, blocks)
        init_(self.R, rest)

    def multiply(self, v: Tensor, *, transposed: bool, out: int, real: Tensor | None) -> Tensor:
        v = v.unflatten(-1, (self.blocks, -1)).movedim(-3, -2)  # (…, G, b, R, m)
        if transposed:
            v = (v.transpose(-1, -3) @ self.L).transpose(-1, -3)
            v = v @ self.R
        else:
            v = v @ self.R.transpose(-1, -2)
            v = (v.transpose(-1, -3) @ self.L.transpose(-1, -2)).transpose(-1, -3)  # (…, G, m, R, b) and back
        return v.movedim(-2, -3).flatten(-2)

    def matrix(self, n: int, out: int) -> Tensor:
        whole = torch.einsum("gjik,gkjl->gijkl", self.L, self.R)
        return whole.reshape(len(whole), n, n)

    def vector_ops(self, rows: int, n: int, out: int) -> list[Op]:
        rest, groups = n // self.blocks, self.site.groups
        return [
            Op("matmul", (groups * self.blocks, rows, rest, rest)),
            Op("matmul", (groups * rest, rows, self.blocks, self.blocks)),
        ]

    def scale_(self, gain: float) -> bool:
        self.L.data.mul_(gain)
        return True

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, blocks={self.blocks}"
