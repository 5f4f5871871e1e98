"""Norm-aware linear attention (NaLaFormer)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.mixers.config import HeadsConfig
from polymix.mixers.mixer import INIT_STD
from polymix.mixers.registry import Capabilities, register
from polymix.mixers.related.features import FeatureMixer
from polymix.ops.related.feature_maps import length, signed_powers

SPREAD = 0.15  # of the output before W_o, measured at 196 tokens


class NalaMixer(FeatureMixer):
    """Norm-aware linear attention (NaLaFormer): the length of a query is the power that its direction is raised to.

        y_i = φ_q(q_i) Σ_j φ_k(k_j)ᵀ v_j / (φ_q(q_i) · Σ_j φ_k(k_j) + 1e-6 n_i)     per head; W_o joins the heads
        φ_q(q) = [relu(q̂)^p, relu(-q̂)^p],   q̂ = q / |q|,   p = 3 (½ + tanh |q|)
        φ_k(k) = [relu(k³), relu(-k³)]

    The sums run over the n_i tokens j that token i sees. Positive and negative parts are channels of their own, so that
    only channels of equal sign add to a similarity, and none is negative. A longer query has a power nearer to 4.5, and
    sharper weights. The formula is that of the authors' code; their block also rotates the features (but not in the
    denominator), adds a depthwise convolution of V, normalises and multiplies by silu(X W_g). The causal form works in
    chunks of 128 tokens; torch.export then needs a fixed length.

    Shapes: (B, N, D) -> (B, N, D), d = D / heads.
    State: 2 d (d + 1) numbers per head.
    Source: Meng et al. (2026), Norm × Direction: Restoring the Missing Query Norm in Vision Linear Attention, ICML,
    arXiv 2506.21137.
    """

    name = "nala"
    capabilities = Capabilities(
        causal=True, cross=True, values=True, masks=frozenset({"padding"}), recurrent=True, sequence="sum"
    )
    config: NalaConfig

    def __init__(self, config: NalaConfig, dim: int, **kw: Any) -> None:
        super().__init__(config, dim)
        self.add_projections(INIT_STD / SPREAD, **kw)

    def query_features(self, q: Tensor) -> Tensor:
        size = length(q)
        return signed_powers(q / size, 1.5 + 3 * size.tanh())

    def key_features(self, k: Tensor) -> Tensor:
        return torch.cat((F.relu(k**3), F.relu(-(k**3))), -1)

    @property
    def moments(self) -> tuple[int, int, int]:
        d = self.dim // self.heads
        return self.heads, 2 * d, d


@register(NalaMixer)
@dataclass(frozen=True, kw_only=True)
class NalaConfig(HeadsConfig):
    """Options of norm-aware linear attention."""

    name: ClassVar[str] = "nala"
    output: ClassVar[str] = "linear attention, q's direction to a power of its length"
    cost_formula: ClassVar[str] = "4 N D² + 4 N D (d + 1)"
    sees: ClassVar[str] = "everything, the past, a context"

    @property
    def attends(self) -> bool:
        return True
