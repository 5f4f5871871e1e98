"""Local attention: softmax over the last tokens alone, with a state as long as its window."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from polymix.errors import OptionError, check_int, check_number
from polymix.mixers.checks import MixerCall
from polymix.mixers.config import HeadsConfig
from polymix.mixers.heads import Heads, head_count
from polymix.mixers.mixer import INIT_STD, TokenMixer
from polymix.mixers.registry import Capabilities, register
from polymix.mixers.states import Counts, StateSpec
from polymix.ops.related.attention import Past, local_attention
from polymix.ops.shared.masks import compact
from polymix.ops.shared.rotary import rotary, rotate
from polymix.ops.shared.sequences import after_window, next_window, take, without_padding
from polymix.ops.shared.tensors import accumulator
from polymix.structured.base import init_
from polymix.structured.cost import Op, linear_op
from polymix.structured.dense import Dense


class LocalState(NamedTuple):
    """Keys and values of the last window - 1 real tokens, and the number of tokens seen.

    Keys (after rotary) and values are (B, window - 1, heads, d), at least float32, the newest last, with zeros in
    front while there are fewer tokens.
    """

    keys: Tensor
    values: Tensor
    count: Tensor  # type: ignore[assignment]  # (B,) real tokens seen, int64


class LocalMixer(TokenMixer):
    """Local attention: softmax attention over the last `window` tokens, with a state of that length.

        y_i = softmax(q_i Kᵀ / √d) V over the tokens i - window + 1 … i     per head; W_o joins the heads

    It has the parameters of softmax attention, under the same names, and up to N = window the same causal output. The
    window counts real tokens of a token's own segment; padding is skipped. `rotary` rotates queries and keys by their
    positions (RoPE, channel pairs (k, k + d/2)). Without it, order within the window does not matter.

    Shapes: (B, N, D) -> (B, N, D), d = D / heads.
    State: 2 (window - 1) D numbers.
    Source: PoM, Sec. 4.1 (the attention of its hybrid).
    """

    name = "local"
    capabilities = Capabilities(causal=True, values=True, masks=frozenset({"padding", "segments"}), recurrent=True,
                                sequence="halo")  # fmt: skip
    config: LocalConfig

    def __init__(self, config: LocalConfig, dim: int, **kw: Any) -> None:
        super().__init__(config, dim)
        self.heads = head_count(config.heads, dim)
        self.width = dim // self.heads
        if config.rotary is not None and self.width % 2:
            allowed = f"None with {self.heads} heads of {self.width} channels each"
            raise OptionError(
                "rotary",
                config.rotary,
                allowed,
                "Rotary positions need an even number of channels per head; change heads.",
            )
        self.qkv = Heads(dim, self.heads, config.bias, **kw)
        self.proj = Dense(dim, dim, config.bias, **kw)
        # a mean over few tokens is larger than attention's over all: √(e / window), if below one
        init_(self.proj.weight, dim, min(1.0, INIT_STD * max(config.window / math.e, 1.0) ** 0.5))

    def mix(self, x: Tensor, context: Tensor, call: MixerCall) -> Tensor:
        both = x if call.values is None else torch.cat((x, call.values), dim=-1)  # they are moved together
        if isinstance(call.segments, Tensor):
            y = _by_segment(both, call.segments, call.mask, lambda both, ids: self._attend(both, ids=ids)[0])
        else:
            y = without_padding(both, call.mask, lambda both, _: self._attend(both)[0])
        return self.proj(y)

    def scan(self, x: Tensor, state: LocalState | None, mask: Tensor | None) -> tuple[Tensor, LocalState]:
        ends: list[LocalState] = []

        def run(x: Tensor, real: Tensor | None) -> Tensor:
            y, k, v = self._attend(x, state)
            ends.append(self._next(k, v, state, real))
            return y

        return self.proj(without_padding(x, mask, run)), ends[0]

    def halo(self) -> tuple[int, int]:
        return self.config.window - 1, 0

    def _attend(
        self, x: Tensor, state: LocalState | None = None, ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The outputs of all heads (B, N, D), and the keys and values (B, N, heads, d).

        x: (B, N, D), or (B, N, 2D) with what the values are computed from behind it.
        """
        x, values = x[..., : self.dim], x[..., self.dim :] if x.shape[-1] > self.dim else None
        q, k, v = self.qkv(x, x, values)
        if self.config.rotary is not None:
            place = torch.arange(x.shape[1], device=x.device)
            place = place if state is None else place + state.count[:, None]
            turns = rotary(place.unsqueeze(-1), self.width, axes=1, heads=None, base=self.config.rotary)
            q, k = (rotate(part, turns, axes=1) for part in (q, k))
        return self._over(q, k, v, state, ids), k, v

    def _over(self, q: Tensor, k: Tensor, v: Tensor, state: LocalState | None, ids: Tensor | None) -> Tensor:
        past = None if state is None else Past(state.keys.to(k.dtype), state.values.to(v.dtype), state.count)
        scale = q.shape[-1] ** -0.5
        return local_attention(q, k, v, window=self.config.window, scale=scale, past=past, segments=ids).flatten(-2)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False,
        cross: bool = False, state: LocalState | None = None, segments: Tensor | None = None,
    ) -> tuple[Tensor, LocalState | None]:  # fmt: skip
        """As `TokenMixer.attend`, in order whatever `causal` says. Positions are the matter of whoever projects.

        segments: (B, N), ids of packed sequences; without a state.
        """
        ends = list[LocalState]()
        x = torch.cat([part.transpose(1, 2).flatten(2) for part in (q, k, v)], dim=-1)  # they are moved together

        def run(x: Tensor, real: Tensor | None, ids: Tensor | None = None) -> Tensor:
            q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in x.chunk(3, dim=-1))
            if causal:
                ends.append(self._next(k, v, state, real))
            return self._over(q, k, v, state, ids)

        if segments is None:
            y = without_padding(x, mask, run)
        else:
            y = _by_segment(x, segments, mask, lambda x, ids: run(x, None, ids))
        return y.unflatten(-1, (self.heads, -1)).transpose(1, 2), ends[0] if causal and segments is None else None

    def _next(self, k: Tensor, v: Tensor, state: LocalState | None, real: Tensor | None) -> LocalState:
        batch, n = k.shape[:2]
        if state is None:
            empty = k.new_zeros(self._shape(batch), dtype=accumulator(k.dtype))
            state = LocalState(empty, empty, torch.zeros(batch, dtype=torch.int64, device=k.device))
        keys, values = (
            next_window(after_window(part.flatten(2), window.flatten(2)), n, real).unflatten(2, (self.heads, -1))
            for part, window in ((k, state.keys), (v, state.values))
        )
        return LocalState(keys, values, state.count + (n if real is None else real.sum(1)))

    def _shape(self, batch: int) -> tuple[int, int, int, int]:
        return batch, self.config.window - 1, self.heads, self.width

    def state_spec(self, batch: int) -> StateSpec:
        shape = self._shape(batch)
        return StateSpec(LocalState, shape, shape, Counts((batch,)))

    def named_matrices(self, n: int, grid: tuple[int, ...] | None) -> dict[str, Any]:
        return self.qkv.named_matrices(self.proj)

    def cost_ops(self, n: int, grid: tuple[int, ...] | None = None) -> list[Op]:
        window = self.config.window
        shape = (self.heads, n, n) if n <= window else (self.heads * math.ceil(n / window), window, 2 * window)
        return [self.qkv.op(n), Op("attention", (*shape, self.width)), linear_op(n, self.proj)]


def _by_segment(x: Tensor, segments: Tensor, mask: Tensor | None, run: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """`run(x, ids)` on tokens sorted by segment, padding last, with outputs back in the original order."""
    order = segments.argsort(dim=1, stable=True)
    ids, real = segments.gather(1, order), None if mask is None else mask.gather(1, order)
    packed = ids if real is None else ids.gather(1, compact(real))
    y = without_padding(take(x, order), real, lambda x, _: run(x, packed))
    return torch.empty_like(y).scatter(1, order.unsqueeze(-1).expand_as(y), y)


@register(LocalMixer)
@dataclass(frozen=True, kw_only=True)
class LocalConfig(HeadsConfig):
    """Options of local attention.

    Args:
        window: number of tokens that each token sees, itself included.
        rotary: base of the rotary angles, usually 1e4; None for no rotary positions.
    """

    name: ClassVar[str] = "local"
    output: ClassVar[str] = "softmax attention over the last `window` tokens"
    cost_formula: ClassVar[str] = "4 N D² + 4 ⌈N / window⌉ window² D; 4 N D² + 2 N² D if N ≤ window"
    sees: ClassVar[str] = "the last tokens"
    is_attention: ClassVar[bool] = True
    equal_widths: ClassVar[bool] = True
    attends_apart: ClassVar[bool] = True
    sees_all: ClassVar[str] = "softmax, which sees all tokens"
    window: int = 128
    rotary: float | None = None

    @property
    def attends(self) -> bool:
        return True

    @property
    def causal_by_build(self) -> bool:
        return True

    @property
    def reach(self) -> int:
        return self.window

    @property
    def rotary_base(self) -> float | None:
        return self.rotary

    def for_rotary(self, base: float | None) -> LocalConfig:
        return self.changed(rotary=base) if self.rotary is None else self

    def check(self) -> None:
        if self.heads is not None:
            check_int("heads", self.heads, 1)
        check_int("window", self.window, 1)
        if self.rotary is not None:
            check_number("rotary", self.rotary, 1.0, math.inf, "a base of at least 1", 1e4)
