"""Softmax attention, the yardstick: PyTorch's fused kernel behind the contract of a mixer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from polymix.mixers.base import Capabilities, MixerConfig, TokenMixer
from polymix.mixers.checks import Call
from polymix.mixers.heads import Heads, head_count
from polymix.mixers.registry import register
from polymix.ops.attention import softmax_attention
from polymix.structured.cost import Op, linear_op
from polymix.structured.dense import Dense


class SoftmaxMixer(TokenMixer):
    """Y = softmax(Q Kᵀ / √d) V a head, heads joined by W_o (Vaswani et al. 2017), through PyTorch's fused kernel.

    Shapes: (B, N, D) -> (B, N, D), d = D / heads. Cost: 4 N D² + 2 N² D multiply-adds. A query that sees nothing
    gets zeros before W_o. Not recurrent: its cache would grow with N.
    """

    name = "softmax"
    capabilities = Capabilities(
        causal=True, cross=True, masks=frozenset({"padding", "arbitrary", "block_causal", "segments"})
    )
    config: SoftmaxConfig

    def __init__(self, config: SoftmaxConfig, dim: int, **kw: Any) -> None:
        super().__init__(config, dim)
        self.heads = head_count(config.heads, dim)
        self.qkv = Heads(dim, self.heads, config.bias, **kw)
        self.proj = Dense(dim, dim, config.bias, **kw)

    def mix(self, x: Tensor, context: Tensor, call: Call) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in self.qkv(x, context))
        scale = q.shape[-1] ** -0.5
        y = softmax_attention(q, k, v, scale=scale, mask=call.mask, causal=call.causal, segments=call.segments)
        return self.proj(y.transpose(1, 2).flatten(-2))

    def letters(self, n: int, grid: tuple[int, ...] | None) -> dict[str, Any]:
        return self.qkv.letters(self.proj)

    def ops(self, n: int, grid: tuple[int, ...] | None = None) -> list[Op]:
        attention = Op("attention", (self.heads, n, n, self.dim // self.heads))
        return [self.qkv.op(n), attention, linear_op(n, self.proj)]


@register(SoftmaxMixer)
@dataclass(frozen=True, kw_only=True)
class SoftmaxConfig(MixerConfig):
    """Options of softmax attention. heads: None takes one for every 64 channels."""

    name: ClassVar[str] = "softmax"
    heads: int | None = None
