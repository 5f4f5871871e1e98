"""Hydra attention, linear attention with as many heads as channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from polymix.mixers.config import MixerConfig
from polymix.mixers.heads_mixer import HeadsMixer
from polymix.mixers.mixer import INIT_STD
from polymix.mixers.registry import Capabilities, register
from polymix.mixers.states import StateSpec
from polymix.ops.related.channel_attention import HydraState, hydra, hydra_read, hydra_terms
from polymix.structured.cost import Op, linear_op


class HydraMixer(HeadsMixer):
    """Hydra attention: linear attention with as many heads as channels.

        y_i = φ(q_i) ⊙ Σ_j φ(k_j) ⊙ v_j,   φ(x) = x / |x| over all D channels;   then W_o

    Keys and values pool to a single vector. It is a sum over the tokens that token i sees, not a mean, so the output
    grows with the square root of their number; W_o is initialised for 196 tokens.

    Shapes: (B, N, D) -> (B, N, D).
    State: D numbers.
    Source: Bolya et al. (2022), Eq. 6-8.
    """

    name = "hydra"
    capabilities = Capabilities(
        causal=True,
        cross=True,
        values=True,
        masks=frozenset({"padding"}),
        recurrent=True,
        isolates_future=True,
        sequence="sum",
    )
    config: HydraConfig

    def __init__(self, config: HydraConfig, dim: int, **kw: Any) -> None:
        super().__init__(config, dim)
        # q / |q| and k / |k| have entries of size 1 / √D; 14 = √196 tokens
        self.add_projections(INIT_STD * dim / 14, heads=1, **kw)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False,
        cross: bool = False, state: HydraState | None = None,
    ) -> tuple[Tensor, HydraState | None]:  # fmt: skip
        """As `TokenMixer.attend`, with e = d: keys and values are multiplied channel by channel, over all heads."""
        joined = (part.transpose(1, 2).flatten(-2) for part in (q, k, v))
        y, state = hydra(*joined, mask=mask, causal=causal, state=state)
        return y.unflatten(-1, (v.shape[1], -1)).transpose(1, 2), state

    def pool(self, k: Tensor, v: Tensor, mask: Tensor | None) -> HydraState:
        k, v = (part.transpose(1, 2).flatten(-2) for part in (k, v))
        return HydraState(hydra_terms(k, v, mask).sum(1))

    def ask(self, q: Tensor, state: HydraState) -> Tensor:
        y = hydra_read(q.transpose(1, 2).flatten(-2), state)
        return y.unflatten(-1, (q.shape[1], -1)).transpose(1, 2)

    def state_spec(self, batch: int) -> StateSpec:
        return StateSpec(HydraState, (batch, self.dim))

    def cost_ops(self, n: int, grid: tuple[int, ...] | None = None) -> list[Op]:
        return [self.qkv.op(n), linear_op(n, self.proj)]


@register(HydraMixer)
@dataclass(frozen=True, kw_only=True)
class HydraConfig(MixerConfig):
    """Options of Hydra attention: only those of every mixer, as there is a head per channel."""

    name: ClassVar[str] = "hydra"
    output: ClassVar[str] = "as many heads as channels, cosine similarity"
    cost_formula: ClassVar[str] = "4 N D²"
    sees: ClassVar[str] = "everything, the past"
    equal_widths: ClassVar[bool] = True

    @property
    def attends(self) -> bool:
        return True
