"""Projections to the queries, keys and values of several heads, shared by the mixers that have heads."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from polymix.errors import check_divides, check_int
from polymix.ops.shared.tensors import Linear
from polymix.structured.cost import Op, linear_op
from polymix.structured.dense import Dense


def head_count(heads: int | None, dim: int) -> int:
    """The number of heads: `heads`, or about one for every 64 channels if it is None.

    Raises:
        OptionError: heads does not divide dim.
    """
    if heads is None:
        heads = max(1, dim // 64)
        heads = next(h for h in range(heads, 0, -1) if dim % h == 0)
    check_int("heads", heads, 1)
    check_divides("heads", heads, "dim", dim)
    return heads


class Heads(nn.Module):
    """Q = X W_q + b_q, and K and V likewise, as (B, N, heads, d). One product if all three read the same tokens."""

    def __init__(self, dim: int, heads: int, bias: bool, **kw: Any) -> None:
        super().__init__()
        self.dim, self.heads = dim, heads
        self.qkv = Dense(dim, 3 * dim, bias, **kw)

    def forward(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if context is x:
            parts = self.qkv(x).chunk(3, dim=-1)
        else:
            query, key_value = self.apart()
            parts = (F.linear(x, *query), *F.linear(context, *key_value).chunk(2, dim=-1))
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in parts)
        return q, k, v

    def apart(self) -> tuple[Linear, Linear]:
        """Weight and bias of the map to Q, and of the map to K and V."""
        sizes, bias = (self.dim, 2 * self.dim), self.qkv.bias
        (q, kv), (b_q, b_kv) = self.qkv.weight.split(sizes), (None, None) if bias is None else bias.split(sizes)
        return (q, b_q), (kv, b_kv)

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
