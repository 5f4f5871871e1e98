"""PADRe, the polynomial attention drop-in replacement."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polymix.mixers.base import INIT_STD, Capabilities, TokenMixer
from polymix.mixers.checks import Call, check_grid
from polymix.mixers.padre_config import PadreConfig
from polymix.mixers.registry import register
from polymix.ops.common import accumulator
from polymix.ops.reference import NORM_EPS
from polymix.ops.visibility import compact
from polymix.structured.channel import BlockDiagonal, Dense, Fanout, Identity, channel_map
from polymix.structured.cost import Op, linear_op
from polymix.structured.token import DepthwiseConv


class PadreState(NamedTuple):
    """The last k - 1 inputs of every causal convolution, (B, k - 1, D) each, float32 at least."""

    windows: tuple[Tensor, ...]


class PadreMixer(TokenMixer):
    """A polynomial of degree d in the tokens, from linear maps and Hadamard products (PADRe, Eq. 1-6).

        Y_i = A_i (X B_i + b_B) + b_A                         i = 1 … d
        Z_1 = Y_1,   Z_{i+1} = (C_i (Z_i D_i + b_D) + b_C) ⊙ Y_{i+1}
        P   = Σ_{i in terms} W_i ⊙ Z_i + L

    B_i, D_i mix channels, A_i, C_i tokens: depthwise convolutions over a 1-D, 2-D or 3-D grid, causal in 1-D if
    asked. Without biases Z_i is homogeneous of degree i in X (Lemma 1). `heads` independent copies share the channels
    out among them: the channel maps are block-diagonal then.

    Shapes: (B, N, D) -> (B, N, D). Cost, preset "paper": (2d - 1) N D² multiply-adds for the channel maps, N D taps
    for each token map. State (causal): k - 1 tokens a convolution. A padding mask takes tokens out as if they were not
    there (1-D), or as if the grid ended there (2-D, 3-D); their own output is zero. Source: PD-001 … PD-031.
    """

    name = "padre"
    capabilities = Capabilities(causal=True, masks=frozenset({"padding"}), recurrent=True, grids=(1, 2, 3))
    config: PadreConfig

    def __init__(self, config: PadreConfig, dim: int, **kw: Any) -> None:
        super().__init__(config, dim)
        plan = config.plan(dim)
        self.axes = 1 if config.grid is None else len(config.grid)
        self.causal_by_build = config.causal
        self.terms = plan.terms

        def token_map(kind: str) -> DepthwiseConv | Identity:
            if kind == "identity":
                return Identity()
            return DepthwiseConv(
                dim,
                plan.kernel,
                causal=config.causal,
                num_prefix_tokens=config.num_prefix_tokens,
                bias=config.bias,
                **kw,
            )

        self.B = Fanout(plan.B, dim, config.heads, config.bias, **kw)
        self.A = nn.ModuleList(token_map(kind) for kind in plan.A)
        self.D = nn.ModuleList(channel_map(kind, dim, config.heads, config.bias, **kw) for kind in plan.D)
        self.C = nn.ModuleList(token_map(kind) for kind in plan.C)
        tokens = () if config.grid is None else (config.num_prefix_tokens + math.prod(config.grid),)
        sizes = {"ones": None, None: None, "channel": (dim,), "full": (*tokens, dim)}
        w, constant = sizes[config.weight], sizes[config.constant]
        self.W = None if w is None else nn.Parameter(torch.ones(len(self.terms), *w, **kw))
        self.L = None if constant is None else nn.Parameter(torch.zeros(*constant, **kw))
        self._scale_output(INIT_STD * len(self.terms) ** -0.5)
        full = "full" in (config.weight, config.constant)
        self.capabilities = Capabilities(
            causal=config.causal, masks=type(self).capabilities.masks, recurrent=config.causal and not full,
            any_length=not full, grids=(self.axes,),
        )  # fmt: skip

    def _scale_output(self, gain: float) -> None:
        """Every Z_i is linear in Y_1, so B_1 scales them all; in D_1 where Y_1 is normalised after B_1."""
        if self.config.normalize is None or not self.D:
            self.B.scale_(0, gain)
        elif isinstance(self.D[0], (Dense, BlockDiagonal)):
            with torch.no_grad():
                self.D[0].weight *= gain

    def mix(self, x: Tensor, context: Tensor, call: Call) -> Tensor:
        grid = self._grid(call, x)

        def run(x: Tensor, mask: Tensor | None) -> Tensor:
            return self._polynomial(x, self._mixer(grid, mask))

        if call.mask is None:
            return run(x, None)
        if self.axes == 1:
            return self._without_padding(x, call.mask, run)
        return run(x, call.mask).masked_fill(~call.mask.unsqueeze(-1), 0.0)

    def scan(self, x: Tensor, state: PadreState | None, mask: Tensor | None) -> tuple[Tensor, PadreState]:
        past = iter(self._start(x) if state is None else state.windows)
        windows: list[Tensor] = []

        def run(x: Tensor, real: Tensor | None) -> Tensor:
            return self._polynomial(x, self._recurrent_mixer(past, windows, real))

        p = run(x, None) if mask is None else self._without_padding(x, mask, run)
        return p, PadreState(tuple(windows))

    def _without_padding(self, x: Tensor, mask: Tensor, run: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """`run` on the real tokens of a sequence brought together behind the prefix; put back, zeros at padding."""
        p = self.config.num_prefix_tokens
        order = compact(mask[:, p:]) + p
        if p:
            order = torch.cat((torch.arange(p, device=mask.device).expand(len(mask), p), order), dim=1)
        real = mask.gather(1, order)
        y = run(_take(x, order), real).masked_fill(~real.unsqueeze(-1), 0.0)
        return torch.empty_like(y).scatter(1, order.unsqueeze(-1).expand_as(y), y)

    def _polynomial(self, x: Tensor, mix_tokens: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
        """The recursion, with token maps applied by `mix_tokens`."""
        total: Tensor | None = None
        z = x
        for i, xb in enumerate(self.B(x)):
            y = self._normalise(mix_tokens(self.A[i], xb))
            z = y if i == 0 else mix_tokens(self.C[i - 1], self.D[i - 1](z)) * y
            if i + 1 in self.terms:
                term = z if self.W is None else self.W[self.terms.index(i + 1)] * z
                total = term if total is None else total + term
        assert total is not None
        return total if self.L is None else total + self.L

    def _normalise(self, y: Tensor) -> Tensor:
        if self.config.normalize is None:
            return y
        norm = F.rms_norm if self.config.normalize == "rms" else F.layer_norm
        split = y.unflatten(-1, (self.config.heads, -1))
        return norm(split, split.shape[-1:], eps=NORM_EPS).flatten(-2)

    def _mixer(self, grid: tuple[int, ...], mask: Tensor | None) -> Callable[[nn.Module, Tensor], Tensor]:
        def mix_tokens(token_map: nn.Module, u: Tensor) -> Tensor:
            return token_map(u, grid, mask) if isinstance(token_map, DepthwiseConv) else u

        return mix_tokens

    def _recurrent_mixer(
        self, past: Iterator[Tensor], windows: list[Tensor], real: Tensor | None
    ) -> Callable[[nn.Module, Tensor], Tensor]:
        """Continue every convolution from its window and leave its next window in `windows`."""

        def mix_tokens(token_map: nn.Module, u: Tensor) -> Tensor:
            if not isinstance(token_map, DepthwiseConv):
                return u
            window = next(past)
            seen = torch.cat((window, u.to(window.dtype)), dim=1)  # (B, reach + N, D)
            if real is None:
                windows.append(seen[:, u.shape[1] :].clone())  # a view would keep the whole chunk alive
            else:  # the last `reach` tokens end where the real ones do, row by row
                last = torch.arange(token_map.reach, device=u.device) + real.sum(1, keepdim=True)
                windows.append(_take(seen, last))
            return token_map(u, (u.shape[1],), real, past=window)

        return mix_tokens

    def _convolutions(self) -> list[DepthwiseConv]:
        return [token_map for token_map in (*self.A, *self.C) if isinstance(token_map, DepthwiseConv)]

    def _start(self, x: Tensor) -> list[Tensor]:
        dtype = accumulator(x.dtype)
        return [x.new_zeros(x.shape[0], conv.reach, self.dim, dtype=dtype) for conv in self._convolutions()]

    def _grid(self, call: Call, x: Tensor) -> tuple[int, ...]:
        grid = (x.shape[1] - self.config.num_prefix_tokens,) if call.grid is None else call.grid
        return self.config.same_as_built(grid)

    def check_state(self, state: Any, x: Tensor) -> str | None:
        shapes = [(x.shape[0], conv.reach, self.dim) for conv in self._convolutions()]
        if isinstance(state, PadreState) and [tuple(window.shape) for window in state.windows] == shapes:
            return None
        return f"a PadreState with windows {shapes}"

    def no_weight_decay(self) -> set[str]:
        return {name for name in ("W", "L") if getattr(self, name) is not None}

    def letters(self, n: int, grid: tuple[int, ...] | None) -> dict[str, Any]:
        config, like = self.config, next(self.parameters())
        tokens = n - config.num_prefix_tokens
        grid = self.config.same_as_built(check_grid(self, grid, tokens) or (tokens,))

        def token(maps: nn.ModuleList) -> list[Tensor]:
            eye = torch.eye(n, device=like.device, dtype=like.dtype)
            return [m.dense(grid) if isinstance(m, DepthwiseConv) else eye for m in maps]

        eye = torch.eye(self.dim, device=like.device, dtype=like.dtype)
        B, b_B = zip(*(self.B.dense(i) for i in range(config.degree)), strict=True)
        D = [m.dense() for m in self.D if isinstance(m, (Dense, BlockDiagonal, Identity))]
        ones, zeros = like.new_ones(n, self.dim), like.new_zeros(n, self.dim)
        W = [zeros] * config.degree
        for place, i in enumerate(self.terms):
            W[i - 1] = ones if self.W is None else self.W[place].expand(n, self.dim)
        return {
            "A": token(self.A), "B": [eye if b is None else b for b in B],
            "C": token(self.C), "D": [eye if d is None else d for d in D],
            "b_A": [m.bias for m in self.A], "b_B": list(b_B),
            "b_C": [m.bias for m in self.C], "b_D": [m.bias for m in self.D],
            "W": W, "L": None if self.L is None else self.L.expand(n, self.dim), "U": None, "V": None,
        }  # fmt: skip

    def ops(self, n: int, grid: tuple[int, ...] | None = None) -> list[Op]:
        tokens = n - self.config.num_prefix_tokens
        grid = check_grid(self, grid, tokens) or (tokens,)
        channel = [m for m in (self.B.maps, *self.D) if isinstance(m, (Dense, BlockDiagonal))]
        return [linear_op(n, m) for m in channel] + [conv.op(grid) for conv in self._convolutions()]


def _take(x: Tensor, order: Tensor) -> Tensor:
    return x.gather(1, order.unsqueeze(-1).expand(*order.shape, x.shape[-1]))


register(PadreMixer)(PadreConfig)
