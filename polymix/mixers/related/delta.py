"""DeltaMixer: a memory that each token corrects, and that fades. Its subclasses say how fast."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polymix.errors import check_choice, check_int
from polymix.mixers.checks import MixerCall
from polymix.mixers.config import HeadsConfig
from polymix.mixers.heads_mixer import HeadsMixer
from polymix.mixers.mixer import INIT_STD
from polymix.mixers.states import StateSpec
from polymix.ops.related.delta_rule import CHUNK, delta_rule
from polymix.ops.shared.sequences import causal_conv, next_window, without_padding
from polymix.ops.shared.tensors import accumulator
from polymix.structured.base import init_
from polymix.structured.conv import conv_matrix
from polymix.structured.cost import Op, linear_op
from polymix.structured.dense import Dense

UNIT_EPS, NORM_EPS = 1e-6, 1e-5  # as in fla
STEPS = (1e-3, 0.1)  # softplus(b_a) starts between these, evenly on a log scale, as in Mamba
RATES = (1.0, 16.0)  # and A between these


class DeltaState(NamedTuple):
    """The memory S (B, heads, d, d) and the convolution's last k - 1 inputs (B, k - 1, 3 D), at least in float32."""

    memory: Tensor
    window: Tensor


class DeltaMixer(HeadsMixer):
    """Base of mixers with S ← diag(a_t) S, S ← S + β_t k_t (v_t - k_tᵀ S)ᵀ, y_t = q_tᵀ S; see `delta_rule`.

    torch.compile makes one graph for sequences of up to 16 tokens, which are one chunk, and one for all longer ones.
    """

    config: DeltaConfig
    spread: ClassVar[float]  # of what W_o reads, at init
    channels_fade_apart: ClassVar[bool]  # a token sets a decay for each channel; False: for each head

    def __init__(self, config: DeltaConfig, dim: int, **kw: Any) -> None:
        super().__init__(config, dim)
        self.add_projections(INIT_STD / self.spread, **kw)
        d, k = dim // self.heads, config.conv_kernel
        self.conv = nn.Parameter(torch.empty(3 * dim, 1, k, **kw))
        init_(self.conv, k)
        self.beta = Dense(dim, self.heads, **kw)
        self.A_log = nn.Parameter(torch.empty(self.heads, **kw))
        self.dt_bias = nn.Parameter(torch.empty(dim if self.channels_fade_apart else self.heads, **kw))
        self.norm = nn.Parameter(torch.ones(d, **kw))
        with torch.no_grad():
            self.A_log.uniform_(*RATES).log_()
            steps = self.dt_bias.uniform_(*(math.log(step) for step in STEPS)).exp()
            self.dt_bias.copy_(steps + torch.log(-torch.expm1(-steps)))  # the inverse of softplus
        self.decay, self.gate = self.maps(dim, **kw)

    def maps(self, dim: int, **kw: Any) -> tuple[nn.Module, nn.Module | None]:
        """The map of tokens to the decays, and to the gates; None without `gate`."""
        raise NotImplementedError

    def opened(self, gate: Tensor) -> Tensor:
        """The factor that a gate stands for."""
        raise NotImplementedError

    def mix(self, x: Tensor, context: Tensor, call: MixerCall) -> Tensor:
        return self.scan(x, None, call.mask)[0]

    def scan(self, x: Tensor, state: DeltaState | None, mask: Tensor | None) -> tuple[Tensor, DeltaState]:
        ends = []

        def run(x: Tensor, real: Tensor | None) -> Tensor:
            qkv, seen = causal_conv(self.qkv.qkv(x), self.conv, None, None if state is None else state.window)
            wide = accumulator(x.dtype)
            parts = F.silu(qkv.to(wide)).chunk(3, -1)
            q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
            memory = None if state is None else state.memory
            beta = self.beta(x).to(wide).sigmoid().mT.unsqueeze(-1)
            y, memory = delta_rule(
                _unit(q) * q.shape[-1] ** -0.5, _unit(k), v, self._log_decay(x), beta, mask=real, state=memory
            )
            ends.append(DeltaState(memory, next_window(seen, x.shape[1], real).to(wide)))
            y = y * (y.square().mean(-1, keepdim=True) + NORM_EPS).rsqrt() * self.norm.to(wide)
            y = y.transpose(1, 2).flatten(-2)
            return (y if self.gate is None else y * self.opened(self.gate(x).to(wide))).to(qkv.dtype)

        return self.proj(without_padding(x, mask, run)), ends[0]

    def _log_decay(self, x: Tensor) -> Tensor:
        """-A softplus(x W_a + b_a): (B, heads, N, d), or (B, heads, N, 1) for one decay a head."""
        wide = accumulator(x.dtype)
        # Softplus itself fails in compiled backwards: its gradient there has other strides than PyTorch expects.
        steps = F.logsigmoid(-(self.decay(x).to(wide) + self.dt_bias.to(wide)))
        return self.A_log.to(wide).exp()[:, None, None] * steps.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def state_spec(self, batch: int) -> StateSpec:
        d = self.dim // self.heads
        return StateSpec(DeltaState, (batch, self.heads, d, d), (batch, self.config.conv_kernel - 1, 3 * self.dim))

    def no_weight_decay(self) -> set[str]:
        return {"A_log", "dt_bias", "norm"}

    def named_matrices(self, n: int, grid: tuple[int, ...] | None) -> dict[str, Any]:
        return {
            **super().named_matrices(n, grid), "T": conv_matrix(self.conv, (n,), causal=True),
            "W_beta": self.beta.weight.t(), "b_beta": self.beta.bias, "A": self.A_log.exp(), "b_a": self.dt_bias,
            "gain": self.norm, **_weights("a", self.decay), **_weights("g", self.gate),
        }  # fmt: skip

    def cost_ops(self, n: int, grid: tuple[int, ...] | None = None) -> list[Op]:
        d, c = self.dim // self.heads, CHUNK
        chunks = self.heads * -(-n // c)
        maps = [layer for part in (self.beta, self.decay, self.gate) if part is not None for layer in _layers(part)]
        pairs = Op("matmul", (chunks, c, d, c))
        if self.channels_fade_apart:
            pairs = Op("elementwise", (chunks * 2 * c * c * d,))
        return [
            self.qkv.op(n), Op("depthwise", (n,), (self.config.conv_kernel,), 3 * self.dim),
            *(linear_op(n, layer) for layer in maps), pairs, pairs,
            Op("matmul", (chunks, 1, c * (c - 1) // 2, c)),  # the inverse, row by row
            Op("matmul", (chunks, c, c, 2 * d)), Op("matmul", (chunks, c, c, 2 * d)),
            Op("matmul", (chunks, d, c, 2 * d)), Op("elementwise", (chunks * d**3,)), Op("matmul", (chunks, c, d, d)),
            linear_op(n, self.proj),
        ]  # fmt: skip


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + UNIT_EPS).rsqrt()


def _layers(part: nn.Module) -> list[Any]:
    return list(part) if isinstance(part, nn.Sequential) else [part]


def _weights(letter: str, part: nn.Module | None) -> dict[str, Any]:
    """W of one linear layer, or W_1 and W_2 of two, and the bias of the last, if there is one."""
    layers = [] if part is None else _layers(part)
    names = [""] if len(layers) == 1 else range(1, len(layers) + 1)
    matrices = {f"W_{letter}{name}": layer.weight.t() for name, layer in zip(names, layers, strict=True)}
    return matrices | ({f"b_{letter}": layers[-1].bias} if layers and layers[-1].bias is not None else {})


@dataclass(frozen=True, kw_only=True)
class DeltaConfig(HeadsConfig):
    """Base of configs of delta rules.

    Args:
        bias: of W_q, W_k, W_v and W_o. The other maps have the biases of the equation.
        conv_kernel: taps of the causal convolution of queries, keys and values; 1 leaves a factor for each channel.
        gate: multiply the normalised output by gates of the token.
    """

    sees: ClassVar[str] = "the past"
    sees_all: ClassVar[str] = "a bidirectional mixer"
    forms: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    conv_kernel: int = 4
    gate: bool = True

    @property
    def causal_by_build(self) -> bool:
        return True

    def check(self) -> None:
        check_int("conv_kernel", self.conv_kernel, 1)
        check_choice("gate", self.gate, (True, False))
