"""Efficient additive attention (SwiftFormer)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polymix.errors import check_choice
from polymix.mixers.checks import MixerCall
from polymix.mixers.config import MixerConfig
from polymix.mixers.inheritance import AttentionMaps, Sources, add_sources, copy_map, first_rows
from polymix.mixers.loading import check_keys, load, options_beyond_weights, translate
from polymix.mixers.mixer import INIT_STD, TokenMixer
from polymix.mixers.registry import Capabilities, register
from polymix.ops.related.channel_attention import additive
from polymix.structured.base import init_
from polymix.structured.cost import Op, linear_op
from polymix.structured.dense import Dense

_AUTHORS = {"in_dims": None, "token_dim": None, "num_heads": None}


class AdditiveMixer(TokenMixer):
    """Efficient additive attention: all queries pool to one vector, which scales every key (SwiftFormer).

        Y = ((g ⊙ K̂) W_p + Q̂) W_o,   g = Σ_i α_i q̂_i,   α = a / |a|,   a_i = q̂_i · w / √D

    q̂ and k̂ are the rows of X W_q + b_q and X W_k + b_k over their own norms. |a| is the norm along the tokens. There
    are no values. With `weights="ones"`, α_i = 1: transformers' SwiftFormer computes this, since its softmax runs over
    an axis of one entry. Not causal, because all tokens share g.

    Shapes: (B, N, D) -> (B, N, D).
    Source: SwiftFormer (Shaker et al. 2023), Sec. 3.2; timm's and transformers' layers.
    """

    name = "additive"
    capabilities = Capabilities(masks=frozenset({"padding"}))
    config: AdditiveConfig

    def __init__(self, config: AdditiveConfig, dim: int, **kw: Any) -> None:
        super().__init__(config, dim)
        self.qk = Dense(dim, 2 * dim, config.bias, **kw)
        learned = config.weights == "learned"
        self.w = nn.Parameter(torch.randn(dim, **kw)) if learned else None
        self.pool = Dense(dim, dim, config.bias, **kw)
        self.proj = Dense(dim, dim, config.bias, **kw)
        init_(self.proj.weight, dim, INIT_STD * dim**0.5)  # q̂ has entries of size 1 / √D

    def mix(self, x: Tensor, context: Tensor, call: MixerCall) -> Tensor:
        q, k = self.unit(x)
        return self.proj(self.pool(additive(q, k, self.w, mask=call.mask)) + q)

    def unit(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """q̂ and k̂, (B, N, D) each."""
        q, k = (F.normalize(part, dim=-1) for part in self.qk(x).chunk(2, dim=-1))
        return q, k

    @torch.no_grad()
    def inherit(self, attention: AttentionMaps) -> Sources:
        """W_q, W_k and W_o of the attention, where they fit; this mixer has no values."""
        sources: Sources = {}
        maps = [part for part in (attention.query, attention.key) if part is not None]
        if [part.weight.shape[0] for part in maps] == [self.dim] * 2:
            for i, part in enumerate(maps):
                rows = slice(i * self.dim, (i + 1) * self.dim)
                add_sources(sources, "qk", copy_map(part, self.qk.weight[rows], first_rows(self.qk.bias, rows)))
        out = attention.out
        if out is not None and out.weight.shape == self.proj.weight.shape:
            add_sources(sources, "proj", copy_map(out, self.proj.weight, self.proj.bias))
        return sources

    def no_weight_decay(self) -> set[str]:
        return set() if self.w is None else {"w"}

    def named_matrices(self, n: int, grid: tuple[int, ...] | None) -> dict[str, Any]:
        biases = (None, None) if self.qk.bias is None else self.qk.bias.chunk(2)
        matrices: dict[str, Any] = {}
        for name, weight, bias in zip("qk", self.qk.weight.chunk(2), biases, strict=True):
            matrices |= {f"W_{name}": weight.t(), f"b_{name}": bias}
        matrices |= {"w": self.w, "W_p": self.pool.weight.t(), "b_p": self.pool.bias}
        return {**matrices, "W_o": self.proj.weight.t(), "b_o": self.proj.bias}

    def cost_ops(self, n: int, grid: tuple[int, ...] | None = None) -> list[Op]:
        weigh = [Op("matmul", (1, n, self.dim, 1))] if self.w is not None else []
        return [linear_op(n, self.qk), *weigh, linear_op(n, self.pool), linear_op(n, self.proj)]

    @classmethod
    def from_reference(cls, state_dict: Mapping[str, Tensor], **options: Any) -> AdditiveMixer:
        """A mixer with the weights of timm's or transformers' EfficientAdditiveAttention, and timm's outputs.

        `options` are arguments of their constructor, or ours. Pass weights="ones" for transformers' outputs.
        """
        maps = ("to_query", "to_key", "proj", "final")
        check_keys(state_dict, ("w_g", *(f"{name}.{key}" for name in maps for key in ("weight", "bias"))))
        width = state_dict["to_query.weight"].shape[1]
        for name in ("in_dims", "token_dim"):
            check_choice(name, options.pop(name, width), (width,))
        check_choice("num_heads", options.pop("num_heads", 1), (1,))
        settings = translate(AdditiveConfig, options, _AUTHORS)
        settings = options_beyond_weights(settings, {"bias": True}) | {"bias": True}
        like = state_dict["proj.weight"]
        mixer = cls(AdditiveConfig(**settings), width, device=like.device, dtype=like.dtype)
        joined = {
            f"qk.{key}": torch.cat([state_dict[f"{name}.{key}"] for name in maps[:2]]) for key in ("weight", "bias")
        }
        for ours, theirs in (("pool", "proj"), ("proj", "final")):
            joined |= {f"{ours}.{key}": state_dict[f"{theirs}.{key}"] for key in ("weight", "bias")}
        load(mixer, joined if mixer.w is None else {**joined, "w": state_dict["w_g"].flatten()})
        return mixer


@register(AdditiveMixer)
@dataclass(frozen=True, kw_only=True)
class AdditiveConfig(MixerConfig):
    """Options of efficient additive attention.

    Args:
        weights: of the queries in the pool: "learned", or "ones" for their sum.
    """

    name: ClassVar[str] = "additive"
    output: ClassVar[str] = "((g ⊙ K̂) W_p + Q̂) W_o, g: the pooled queries"
    cost_formula: ClassVar[str] = "4 N D²; plus N D if weights = learned"
    sees: ClassVar[str] = "everything"
    weights: str = "learned"

    def check(self) -> None:
        check_choice("weights", self.weights, ("learned", "ones"))
