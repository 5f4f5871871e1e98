"""SimA, attention without a softmax: queries and keys of unit L1 norm along the tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from polymix.errors import check_choice
from polymix.mixers.checks import MixerCall
from polymix.mixers.config import HeadsConfig
from polymix.mixers.heads import head_count
from polymix.mixers.heads_mixer import HeadsMixer
from polymix.mixers.loading import attention_projections, check_keys, load, options_beyond_weights, translate
from polymix.mixers.mixer import INIT_STD
from polymix.mixers.registry import Capabilities, register
from polymix.ops.related.linear_attention import linear_attention
from polymix.ops.shared.causal_sums import hide
from polymix.ops.shared.tensors import accumulator
from polymix.structured.cost import Op, linear_op

_AUTHORS = {"dim": None, "num_heads": "heads", "qkv_bias": None, "proj_drop": "dropout", "qk_scale": None,
            "attn_drop": None}  # fmt: skip


class SimaMixer(HeadsMixer):
    """SimA: attention without a softmax. Queries and keys have unit L1 norm along the tokens instead.

        Y = Q̂ (K̂ᵀ V)     per head; W_o joins the heads
        q̂_nc = q_nc / Σ_m |q_mc| over the tokens m, and k̂ likewise

    With its norms frozen (see `norms`) it is a polynomial of degree 3. As published, nothing makes up for the norms,
    so the output shrinks as N^-1.5; W_o is initialised for 196 tokens. `class_attention` is the authors' class
    attention: the first token attends to all tokens, and the others pass through unchanged. Not causal, because the
    norms span all tokens.

    Shapes: (B, N, D) -> (B, N, D), d = D / heads.
    Source: SimA (Koohpayegani and Pirsiavash 2024); PADRe, Eq. 21-27, for the polynomial.
    """

    name = "sima"
    capabilities = Capabilities(cross=True, values=True, masks=frozenset({"padding"}))
    config: SimaConfig

    def __init__(self, config: SimaConfig, dim: int, **kw: Any) -> None:
        super().__init__(config, dim)
        root = (dim // head_count(config.heads, dim)) ** 0.5
        self.add_projections(INIT_STD * (0.8 * 196) ** 2 / (14 * root), **kw)  # Σ|q| ≈ 0.8 · 196, d · 196 terms
        self.eps = 1e-6 if config.class_attention else 1e-12  # as in the authors' code
        if config.class_attention:  # drop only the class token's output, not the tokens that pass through
            self.class_drop, self.drop = self.drop, nn.Dropout(0.0)
            self.capabilities = Capabilities(values=True, masks=frozenset({"padding"}))

    def mix(self, x: Tensor, context: Tensor, call: MixerCall) -> Tensor:
        y = super().mix(x, context, call)
        return torch.cat((self.class_drop(y), x[:, 1:].to(y.dtype)), dim=1) if self.config.class_attention else y

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False,
        cross: bool = False, state: Any = None,
    ) -> tuple[Tensor, None]:  # fmt: skip
        dtype = accumulator(v.dtype)
        q = self._normalized(hide(q.to(dtype), None if cross else mask))
        k = self._normalized(hide(k.to(dtype), mask))
        q = q[:, :, :1] if self.config.class_attention else q
        return linear_attention(q, k, v, mask=mask, normalize=False, scale=1.0), None

    def _normalized(self, x: Tensor) -> Tensor:
        """`F.normalize` along the tokens, without the operator ReduceL1, which Hexagon processors have not."""
        return x / x.abs().sum(2, keepdim=True).clamp_min(self.eps)

    def norms(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Σ_n |q_nc| and Σ_n |k_nc| for x (B, N, D), each (B, D)."""
        q, k, _ = self.qkv(x, x)
        dtype = accumulator(q.dtype)
        q, k = (part.flatten(-2).to(dtype).abs().sum(1).clamp_min(self.eps) for part in (q, k))
        return q, k

    def cost_ops(self, n: int, grid: tuple[int, ...] | None = None) -> list[Op]:
        d, queries = self.dim // self.heads, 1 if self.config.class_attention else n
        pool, read = Op("matmul", (self.heads, d, n, d)), Op("matmul", (self.heads, queries, d, d))
        return [self.qkv.op(n), pool, read, linear_op(queries, self.proj)]

    @classmethod
    def from_reference(cls, state_dict: Mapping[str, Tensor], **options: Any) -> SimaMixer:
        """A mixer with the weights of the authors' SimA, or ClassAttention with class_attention=True.

        `options` are arguments of their constructor (num_heads defaults to 8; qk_scale and attn_drop are ignored, as
        they do) or ours. A missing bias of qkv is zero.
        """
        check_keys(state_dict, ("qkv.weight", "proj.weight"), ("qkv.bias", "proj.bias"))
        settings = {"heads": 8, **translate(SimaConfig, options, _AUTHORS)}
        own = {"bias": "proj.bias" in state_dict}
        settings = options_beyond_weights(settings, own) | own
        like = state_dict["proj.weight"]
        mixer = cls(SimaConfig(**settings), like.shape[0], device=like.device, dtype=like.dtype)
        load(mixer, attention_projections(state_dict))
        return mixer


@register(SimaMixer)
@dataclass(frozen=True, kw_only=True)
class SimaConfig(HeadsConfig):
    """Options of SimA.

    Args:
        class_attention: update only the first token.
    """

    name: ClassVar[str] = "sima"
    output: ClassVar[str] = "q and k of unit L1 norm along the tokens"
    cost_formula: ClassVar[str] = "4 N D² + 2 N D d; 3 N D² + N D d + D² + D d if class_attention"
    sees: ClassVar[str] = "everything"
    class_attention: bool = False

    @property
    def attends(self) -> bool:
        return not self.class_attention

    def check(self) -> None:
        check_choice("class_attention", self.class_attention, (True, False))
