"""Mixing of every token with its nearest ones: k-NN attention, and the convolutions of vision graphs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from polymix.errors import OptionError, check_choice, check_int
from polymix.mixers.checks import MixerCall
from polymix.mixers.config import HeadsConfig
from polymix.mixers.heads import Heads, head_count
from polymix.mixers.mixer import INIT_STD, TokenMixer
from polymix.mixers.registry import Capabilities, register
from polymix.ops.related.neighbours import METRICS, nearest_attention, nearest_features
from polymix.ops.shared.masks import dense_mask
from polymix.structured.cost import Op, linear_op
from polymix.structured.dense import Dense

_MAX_PADDING = 2**24  # neighbours, and their distance: the tokens are padded by this many


class KnnMixer(TokenMixer):
    """Each token reads only the k tokens nearest to it: k-NN attention, or the graph convolutions of vision GNNs.

        softmax        Y_i = [Σ_{j ∈ N(i)} softmax_j(q_i·k_j / √d) v_j] W_o + b_o     per head; N(i) by q_i and k_j
        max_relative   Y_i = [X_i, max_{j ∈ N(i)} (X_j - X_i)] W + b                  N(i) by X_i and X_j
        mean           Y_i = [X_i, 1/k Σ_{j ∈ N(i)} X_j] W + b

    The first is k-NN attention (KVT), which PADRe's tables compare with. The others are graph convolutions (ViG). A
    token is one of its own candidates. The neighbours change in jumps, so no form is a polynomial, and low precision
    may choose another of two that tie. The search compares all pairs, so it is quadratic in N. A token that sees
    nothing gets zeros for its neighbours.

    Shapes: (B, N, D) or (B, D, H, W), returned alike, d = D / heads.
    Source: KVT (Wang et al. 2022); ViG (Han et al. 2022).
    """

    name = "knn"
    capabilities = Capabilities(
        causal=True, cross=True, values=True, masks=frozenset({"padding", "arbitrary", "block_causal", "segments"}),
        isolates_future=True, isolates_segments=True,
    )  # fmt: skip
    feature_maps = True
    config: KnnConfig

    def __init__(self, config: KnnConfig, dim: int, **kw: Any) -> None:
        super().__init__(config, dim)
        attends = config.aggregate == "softmax"
        self.capabilities = replace(
            type(self).capabilities, isolates_future=not attends, isolates_segments=not attends, values=attends
        )
        self.heads = head_count(config.heads, dim) if attends else 1
        self.qkv = Heads(dim, self.heads, config.bias, **kw) if attends else None
        self.proj = Dense(dim if attends else 2 * dim, dim, config.bias, **kw)
        with torch.no_grad():  # a mean over few neighbours reduces the variance little
            self.proj.weight *= min(1.0, INIT_STD * config.k**0.5) if attends else INIT_STD

    def mix(self, x: Tensor, context: Tensor, call: MixerCall) -> Tensor:
        config = self.config
        if call.mask is not None and call.mask.ndim == 2:  # values at padding must not get through
            same, context = context is x, context.masked_fill(~call.mask.unsqueeze(-1), 0.0)
            x = context if same else x
        visible = dense_mask(x.shape[1], context.shape[1], call.mask, call.causal, call.segments, x.device)
        search: dict[str, Any] = {"count": config.k, "metric": config.metric, "dilation": config.dilation}
        if self.qkv is None:
            near = nearest_features(x, context, visible, aggregate=config.aggregate, **search)
            return self.proj(torch.cat((x, near), dim=-1))
        q, k, v = (part.transpose(1, 2) for part in self.qkv(x, context, call.values))
        seen = None if visible is None else visible.unsqueeze(1)
        return self.proj(nearest_attention(q, k, v, seen, **search).transpose(1, 2).flatten(-2))

    def named_matrices(self, n: int, grid: tuple[int, ...] | None) -> dict[str, Any]:
        if self.qkv is not None:
            return self.qkv.named_matrices(self.proj)
        own, near = self.proj.weight.t().chunk(2)
        return {"W_x": own, "W_n": near, "b": self.proj.bias}

    def cost_ops(self, n: int, grid: tuple[int, ...] | None = None) -> list[Op]:
        if self.qkv is None:
            return [Op("matmul", (1, n, self.dim, n)), linear_op(n, self.proj)]
        attention = Op("attention", (self.heads, n, n, self.dim // self.heads))
        return [self.qkv.op(n), attention, linear_op(n, self.proj)]


@register(KnnMixer)
@dataclass(frozen=True, kw_only=True)
class KnnConfig(HeadsConfig):
    """Options of k-nearest-neighbour mixing.

    Args:
        k: number of neighbours.
        dilation: take every dilation-th of the k · dilation nearest tokens.
        metric: nearest by "dot" product, "cosine" or "euclidean" distance.
        aggregate: "softmax", "max_relative" or "mean".
        heads: number of heads, for softmax only; None for one per 64 channels.
    """

    name: ClassVar[str] = "knn"
    output: ClassVar[str] = "attention of the k greatest logits; graph aggregation"
    cost_formula: ClassVar[str] = "4 N D² + 2 N² D; 2 N D² + N² D if aggregate ≠ softmax"
    sees: ClassVar[str] = "any mask"
    k: int = 32
    dilation: int = 1
    metric: str = "dot"
    aggregate: str = "softmax"

    def check(self) -> None:
        check_int("k", self.k, 1, _MAX_PADDING)
        check_int("dilation", self.dilation, 1, _MAX_PADDING)
        check_choice("metric", self.metric, METRICS)
        check_choice("aggregate", self.aggregate, ("softmax", "max_relative", "mean"))
        if self.heads is not None and self.aggregate != "softmax":
            got = f"{self.heads} with aggregate={self.aggregate!r}"
            raise OptionError("heads", got, "None, or aggregate='softmax'", "Leave heads out; graphs use whole tokens.")
