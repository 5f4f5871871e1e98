"""Rank-augmented linear attention (RALA)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from polymix.mixers.mixer import INIT_STD
from polymix.mixers.registry import Capabilities, register
from polymix.mixers.related.features import EPS, GatedConfig, GatedMixer
from polymix.ops.related.feature_maps import augmented_keys
from polymix.ops.related.linear_attention import FEATURE_MAPS, linear_attention
from polymix.ops.shared.tensors import accumulator
from polymix.structured.cost import Op

SPREAD = 0.14  # of the output before W_o, measured at 196 tokens


class RalaMixer(GatedMixer):
    """Rank-augmented linear attention (RALA): tokens that the mean query asks for count more in the sum that all read.

        y_i = (φ(q_i) Σ_j α_j φ(k_j)ᵀ v_j / (φ(q_i) · Σ_j α_j φ(k_j) + 1e-6)) ⊙ (x_i W_g + b_g)       per head
        α = N · softmax over the tokens j of φ̄·φ(k_j) / √d,   φ̄ = the mean of φ(q_i),   φ(x) = elu(x) + 1

    W_o joins the heads; with α the sums are means, so that 1e-6 stands for 1e-6 N. Both additions raise a rank: α that
    of the sum of the φ(k_j)ᵀ v_j, and the factor of each token that of the output. The authors' block also rotates φ(q)
    and φ(k) (but not in the denominator) and adds a depthwise convolution of V. Not causal, because α spans all tokens.

    Shapes: (B, N, D) -> (B, N, D), d = D / heads.
    Source: Fan, Huang and He (2025), Breaking the Low-Rank Dilemma of Linear Attention, CVPR, arXiv 2411.07635.
    """

    name = "rala"
    capabilities = Capabilities(cross=True, values=True, masks=frozenset({"padding"}))
    config: RalaConfig

    def __init__(self, config: RalaConfig, dim: int, **kw: Any) -> None:
        super().__init__(config, dim)
        self.add_projections(INIT_STD / SPREAD, **kw)

    def query_features(self, q: Tensor) -> Tensor:
        return FEATURE_MAPS["elu+1"](q)

    def key_features(self, k: Tensor) -> Tensor:
        return FEATURE_MAPS["elu+1"](k)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False,
        cross: bool = False, state: Any = None,
    ) -> tuple[Tensor, None]:  # fmt: skip
        dtype = accumulator(v.dtype)
        q, k = self.query_features(q.to(dtype)), self.key_features(k.to(dtype))
        k = augmented_keys(q, k, own=None if cross else mask, mask=mask)
        return linear_attention(q, k, v, mask=mask, eps=EPS), None

    def cost_ops(self, n: int, grid: tuple[int, ...] | None = None) -> list[Op]:
        return [*super().cost_ops(n, grid), Op("matmul", (self.heads, 1, self.dim // self.heads, n))]


@register(RalaMixer)
@dataclass(frozen=True, kw_only=True)
class RalaConfig(GatedConfig):
    """Options of rank-augmented linear attention."""

    name: ClassVar[str] = "rala"
    output: ClassVar[str] = "linear attention, tokens weighted by the mean query"
    cost_formula: ClassVar[str] = "4 N D² + 2 N D (d + 1) + N D; plus N D² if gate"
    sees: ClassVar[str] = "everything, a context"
    gate: bool = True
