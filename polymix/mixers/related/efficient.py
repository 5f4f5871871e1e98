"""Efficient attention, with softmax of the queries over channels and of the keys over tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from polymix.errors import check_divides, check_int
from polymix.mixers.config import HeadsConfig
from polymix.mixers.heads import Heads, head_count
from polymix.mixers.heads_mixer import HeadsMixer
from polymix.mixers.mixer import INIT_STD
from polymix.mixers.registry import Capabilities, register
from polymix.ops.related.linear_attention import linear_attention
from polymix.ops.shared.tensors import accumulator
from polymix.structured.base import init_
from polymix.structured.cost import Op, linear_op
from polymix.structured.dense import Dense


class EfficientMixer(HeadsMixer):
    """Efficient attention: softmax of queries over channels, and of keys over tokens.

        Q = X W_q, K = X W_k, V = X W_v     D -> r = D / reduction channels
        Y = ρ_q(Q) (ρ_k(K)ᵀ V)              per head; W_o joins the heads, r -> D

    ρ_q is a softmax over the d channels of each query, ρ_k a softmax over the tokens for each key channel. So every
    channel is a weighted mean of the values, and every query a weighted mean of the channels. Not causal, because ρ_k
    spans all tokens.

    Raises: OptionError for a reduction that does not divide D, or heads that do not divide r.

    Shapes: (B, N, D) -> (B, N, D), d = r / heads; or (B, D, H, W), returned alike.
    Source: Shen et al. (2021), Eq. 4-5; Poly-NL, Table 1a (reduction 8, one head: 0.11 G, 0.5 M at 14 × 14 × 1024).
    """

    name = "efficient"
    capabilities = Capabilities(cross=True, values=True, masks=frozenset({"padding"}))
    feature_maps = True
    config: EfficientConfig

    def __init__(self, config: EfficientConfig, dim: int, **kw: Any) -> None:
        super().__init__(config, dim)
        check_divides("reduction", config.reduction, "dim", dim)
        self.inner = dim // config.reduction
        self.heads = head_count(config.heads, self.inner)
        self.qkv = Heads(dim, self.heads, config.bias, self.inner, **kw)
        self.proj = Dense(self.inner, dim, config.bias, **kw)
        init_(self.proj.weight, self.inner, INIT_STD * 14)  # for a mean of 196 values with almost equal weights

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False,
        cross: bool = False, state: Any = None,
    ) -> tuple[Tensor, None]:  # fmt: skip
        dtype = accumulator(v.dtype)
        q, k = q.to(dtype), k.to(dtype)
        if mask is not None:  # finite, so that a row with only padding does not become NaN
            k = k.masked_fill(~mask[:, None, :, None], torch.finfo(dtype).min)
        return linear_attention(q.softmax(-1), k.softmax(2), v, mask=mask, normalize=False, scale=1.0), None

    def named_matrices(self, n: int, grid: tuple[int, ...] | None) -> dict[str, Any]:
        return self.qkv.named_matrices(self.proj)

    def cost_ops(self, n: int, grid: tuple[int, ...] | None = None) -> list[Op]:
        d = self.inner // self.heads
        pool, ask = Op("matmul", (self.heads, d, n, d)), Op("matmul", (self.heads, n, d, d))
        return [self.qkv.op(n), pool, ask, linear_op(n, self.proj)]


@register(EfficientMixer)
@dataclass(frozen=True, kw_only=True)
class EfficientConfig(HeadsConfig):
    """Options of efficient attention.

    Args:
        reduction: D / r, the width of queries, keys and values.
    """

    name: ClassVar[str] = "efficient"
    output: ClassVar[str] = "softmax of q over channels, of k over tokens"
    cost_formula: ClassVar[str] = "4 N D r + 2 N r (r / heads); where r = D / reduction"
    sees: ClassVar[str] = "everything"
    reduction: int = 1

    @property
    def attends(self) -> bool:
        return self.reduction == 1

    def check(self) -> None:
        check_int("reduction", self.reduction, 1)
