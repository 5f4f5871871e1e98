"""The floor: only the linear layers of attention. A mixer should cost little more, and be more accurate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from polymix.mixers.checks import MixerCall
from polymix.mixers.config import MixerConfig
from polymix.mixers.heads import Heads
from polymix.mixers.mixer import INIT_STD, Polynomial, TokenMixer
from polymix.mixers.registry import Capabilities, register
from polymix.mixers.states import Counts, StateSpec, count_tokens
from polymix.structured.base import init_
from polymix.structured.cost import Op, linear_op
from polymix.structured.dense import Dense


class LinearFloorState(NamedTuple):
    """The number of tokens seen: no output depends on earlier ones."""

    count: Tensor  # type: ignore[assignment]  # (B,) real tokens, int64


class LinearFloorMixer(TokenMixer):
    """The linear layers of attention without the attention: what any mixer costs at least, and must beat ("No-SA").

        Y = (Q + K + V) W_o + b_o

    No token sees another, so causal order, padding and packed sequences change no output of a real token.

    Raises: CapabilityError for a separate context, and for masks (B, N, M), which can hide a token from itself.

    Shapes: (B, N, D) -> (B, N, D), or (B, D, H, W) -> (B, D, H, W), as of the blocks that it is the floor of.
    State: the number of tokens seen.
    Source: Poly-SA, Sec. 5.2.1, the baseline "No-SA".
    """

    name = "linear_floor"
    feature_maps = True
    capabilities = Capabilities(
        causal=True, masks=frozenset({"padding", "block_causal", "segments"}), recurrent=True, isolates_future=True,
        isolates_segments=True, sequence="halo",
    )  # fmt: skip
    config: LinearFloorConfig

    def __init__(self, config: LinearFloorConfig, dim: int, **kw: Any) -> None:
        super().__init__(config, dim)
        self.qkv = Heads(dim, 1, config.bias, **kw)
        self.proj = Dense(dim, dim, config.bias, **kw)
        init_(self.proj.weight, dim, INIT_STD * 3**-0.5)

    def mix(self, x: Tensor, context: Tensor, call: MixerCall) -> Tensor:
        q, k, v = self.qkv(x, context)
        return self.proj((q + k + v).flatten(-2))

    def scan(self, x: Tensor, state: LinearFloorState | None, mask: Tensor | None) -> tuple[Tensor, LinearFloorState]:
        seen = count_tokens(x, mask)
        return self.mix(x, x, MixerCall()), LinearFloorState(seen if state is None else state.count + seen)

    def scan_blocks(
        self, x: Tensor, state: LinearFloorState | None, mask: Tensor | None, block: int
    ) -> tuple[Tensor, LinearFloorState]:
        return self.scan(x, state, mask)

    def state_spec(self, batch: int) -> StateSpec:
        return StateSpec(LinearFloorState, Counts((batch,)))

    def halo(self) -> tuple[int, int]:
        return 0, 0

    @property
    def polynomial(self) -> Polynomial:
        return Polynomial(1, homogeneous=not self.config.bias)

    def named_matrices(self, n: int, grid: tuple[int, ...] | None) -> dict[str, Any]:
        return self.qkv.named_matrices(self.proj)

    def cost_ops(self, n: int, grid: tuple[int, ...] | None = None) -> list[Op]:
        return [self.qkv.op(n), linear_op(n, self.proj)]


@register(LinearFloorMixer)
@dataclass(frozen=True, kw_only=True)
class LinearFloorConfig(MixerConfig):
    """Options of the linear floor: only those of every mixer."""

    name: ClassVar[str] = "linear_floor"
    output: ClassVar[str] = "attention's linear layers, nothing mixed"
    cost_formula: ClassVar[str] = "4 N D²"
    sees: ClassVar[str] = "itself"
