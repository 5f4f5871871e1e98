"""FeatureMixer: linear attention by features of queries and keys. Each mixer says what its features are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from polymix.errors import check_choice
from polymix.mixers.config import HeadsConfig
from polymix.mixers.heads_mixer import HeadsMixer
from polymix.mixers.states import Counts, StateSpec
from polymix.ops.related.linear_attention import (
    LinearState,
    linear_attention,
    linear_causal,
    linear_pool,
    linear_read,
)
from polymix.ops.shared.tensors import accumulator
from polymix.structured.cost import Op, linear_op
from polymix.structured.dense import Dense

EPS = 1e-6


class FeatureMixer(HeadsMixer):
    """Base of mixers with y_i = φ_q(q_i) Σ_j φ_k(k_j)ᵀ v_j / (φ_q(q_i) · Σ_j φ_k(k_j) + 1e-6 n_i) per head.

    The n_i tokens j are those that token i sees. Without `normalize`, y_i = φ_q(q_i) Σ_j φ_k(k_j)ᵀ v_j / n_i.
    """

    config: HeadsConfig
    normalize = True

    def query_features(self, q: Tensor) -> Tensor:
        """φ_q of q (B, heads, N, d), in float32 or wider: (B, h, N, F)."""
        raise NotImplementedError

    def key_features(self, k: Tensor) -> Tensor:
        """φ_k, as `query_features`."""
        raise NotImplementedError

    @property
    def moments(self) -> tuple[int, int, int]:
        """How many sums of φ_k(k) ⊗ v there are, F, and the channels of v."""
        d = self.dim // self.heads
        return self.heads, d, d

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False,
        cross: bool = False, state: Any = None,
    ) -> tuple[Tensor, Any]:  # fmt: skip
        dtype = accumulator(v.dtype)
        q, k = self.query_features(q.to(dtype)), self.key_features(k.to(dtype))
        options: dict[str, Any] = {"mask": mask, "normalize": self.normalize, "eps": EPS}
        if causal:
            return linear_causal(q, k, v, state=state, **options)
        return linear_attention(q, k, v, **options), None

    def pool(self, k: Tensor, v: Tensor, mask: Tensor | None) -> Any:
        return linear_pool(self.key_features(k.to(accumulator(k.dtype))), v, mask=mask, normalize=self.normalize)

    def ask(self, q: Tensor, state: Any) -> Tensor:
        return linear_read(self.query_features(q.to(state.moments.dtype)), state, normalize=self.normalize, eps=EPS)

    def state_spec(self, batch: int) -> StateSpec:
        heads, features, width = self.moments
        return StateSpec(LinearState, (batch, heads, features, width + self.normalize), Counts((batch,)))

    def cost_ops(self, n: int, grid: tuple[int, ...] | None = None) -> list[Op]:
        heads, features, width = self.moments
        width += self.normalize
        pool, ask = Op("matmul", (heads, features, n, width)), Op("matmul", (heads, n, features, width))
        return [self.qkv.op(n), pool, ask, linear_op(n, self.proj)]


class GatedMixer(FeatureMixer):
    """A FeatureMixer with `gate`: Y ⊙ (X W_g + b_g) in front of W_o. At init the gates are 1."""

    config: GatedConfig
    gate: nn.Linear | None

    def add_projections(self, std: float, heads: int | None = None, **kw: Any) -> None:
        super().add_projections(std, heads, **kw)
        self.gate = Dense(self.dim, self.dim, **kw) if self.config.gate else None
        if self.gate is not None:
            nn.init.zeros_(self.gate.weight)
            nn.init.ones_(self.gate.bias)  # type: ignore[arg-type]

    def output(self, x: Tensor, y: Tensor) -> Tensor:
        if self.gate is not None:
            y = y * self.gate(x).unflatten(-1, (y.shape[1], -1)).transpose(1, 2)
        return super().output(x, y)

    def named_matrices(self, n: int, grid: tuple[int, ...] | None) -> dict[str, Any]:
        gate = {} if self.gate is None else {"W_g": self.gate.weight.t(), "b_g": self.gate.bias}
        return {**super().named_matrices(n, grid), **gate}

    def cost_ops(self, n: int, grid: tuple[int, ...] | None = None) -> list[Op]:
        gate = [] if self.gate is None else [linear_op(n, self.gate)]
        return [*super().cost_ops(n, grid), *gate]


@dataclass(frozen=True, kw_only=True)
class GatedConfig(HeadsConfig):
    """Base of configs with a gate.

    Args:
        gate: a linear map of each token, with a bias, is a factor of what W_o reads. A layer that projects for the
            mixer cannot take it.
    """

    gate: bool = False

    @property
    def attends(self) -> bool:
        return not self.gate

    def check(self) -> None:
        check_choice("gate", self.gate, (True, False))
