"""Projections to the queries, keys and values of several heads, shared by the mixers that have heads."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from polymix.errors import check_divides, check_int, divisors
from polymix.ops.shared.tensors import project
from polymix.structured.cost import Op, linear_op
from polymix.structured.dense import Dense, affine


def head_count(heads: int | None, dim: int) -> int:
    """The number of heads: `heads`, or about one for every 64 channels if it is None.

    Raises:
        OptionError: heads does not divide dim.
    """
    if heads is None:
        heads = max(1, dim // 64)
        heads = max(h for h in divisors(dim) if h <= heads)
    check_int("heads", heads, 1)
    check_divides("heads", heads, "dim", dim)
    return heads


class Heads(nn.Module):
    """Q = X W_q + b_q, and K and V likewise, as (B, N, heads, d). One product if all three read the same tokens.

    `inner` is the width of each; None: D. Q reads x and K the context. V reads `values`, or without them the context
    too.
    """

    def __init__(self, dim: int, heads: int, bias: bool, inner: int | None = None, **kw: Any) -> None:
        super().__init__()
        self.dim, self.heads = dim, heads
        self.qkv = Dense(dim, 3 * (inner or dim), bias, **kw)

    def forward(self, x: Tensor, context: Tensor, values: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        if context is x and values is None:
            parts = self.qkv(x).chunk(3, dim=-1)
        else:
            parts = project(affine(self.qkv), x, context, values)
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in parts)
        return q, k, v

    def op(self, n: int) -> Op:
        return linear_op(n, self.qkv)

    def named_matrices(self, proj: nn.Linear | None) -> dict[str, Tensor | None]:
        """W_q, W_k, W_v and, with `proj`, W_o, which act on row tokens from the right; and their biases."""
        weight, bias = self.qkv.weight.chunk(3), self.qkv.bias
        b_q, b_k, b_v = (None, None, None) if bias is None else bias.chunk(3)
        matrices: dict[str, Any] = {"W_" + name: w.t() for name, w in zip("qkv", weight, strict=True)}
        matrices.update(b_q=b_q, b_k=b_k, b_v=b_v)
        if proj is not None:
            matrices.update(W_o=proj.weight.t(), b_o=proj.bias)
        return matrices
