"""Performer, softmax attention by positive random features (FAVOR+)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from polymix.errors import check_choice, check_int
from polymix.mixers.config import HeadsConfig
from polymix.mixers.heads_mixer import HeadsMixer
from polymix.mixers.mixer import INIT_STD
from polymix.mixers.registry import Capabilities, register
from polymix.mixers.states import Counts, StateSpec
from polymix.ops.related.linear_attention import (
    LinearState,
    linear_attention,
    linear_causal,
    linear_pool,
    linear_read,
)
from polymix.ops.related.performer import (
    PerformerState,
    orthogonal_features,
    performer,
    performer_causal,
    performer_pool,
    performer_read,
    relu_features,
)
from polymix.structured.cost import Op, linear_op

EPS = 1e-20  # avoids 0 / 0 if nothing is visible; elsewhere negligible beside the features


class PerformerMixer(HeadsMixer):
    """Performer: softmax attention approximated by positive random features (FAVOR+).

        Y = φ(Q)(φ(K)ᵀ V) / (φ(Q) Σ_j φ(k_j))     per head; W_o joins the heads
        softmax   φ(x)_m = exp(ω_m·x' - |x'|²/2), x' = x d^-¼, so that E[φ(q)·φ(k)] = exp(q·k/√d)
        relu      φ(x)_m = relu(ω_m·x') + 0.001

    The ω are random normal vectors, orthogonal within every d of them, drawn from `seed` and kept in the state dict.
    Each exponential is taken relative to the largest in its sum (in the causal form, of the past), so nothing
    overflows and no denominator vanishes. `redraw()` draws new ω from the same stream; call it between training
    steps. The forward does not draw, because a checkpointed layer would draw again in its backward. With the causal
    form torch.export needs a fixed length.

    Shapes: (B, N, D) -> (B, N, D), d = D / heads.
    State: m (d + 2) numbers per head for m features.
    Source: Choromanski et al. (2021).
    """

    name = "performer"
    capabilities = Capabilities(
        causal=True, cross=True, values=True, masks=frozenset({"padding"}), recurrent=True, sequence="sum"
    )
    config: PerformerConfig
    omega: Tensor
    draws: Tensor

    def __init__(self, config: PerformerConfig, dim: int, **kw: Any) -> None:
        super().__init__(config, dim)
        # 2 d positive features weight the tokens less evenly than softmax does; relu features almost equally.
        self.add_projections(0.6 if config.kernel == "softmax" else 14 * INIT_STD, **kw)
        self.features = config.features or 2 * (dim // self.heads)
        like = self.proj.weight
        self.register_buffer(
            "omega", torch.empty(self.features, dim // self.heads, device=like.device, dtype=like.dtype)
        )
        self.register_buffer("draws", torch.zeros((), dtype=torch.int64, device=like.device))
        if not like.is_meta:
            self._draw(0)

    def redraw(self) -> None:
        """Replace ω by the next draw of its stream. The number of draws is saved, for resumed runs."""
        self.draws += 1
        self._draw(int(self.draws))

    def _draw(self, number: int) -> None:
        stream = torch.Generator().manual_seed(self.config.seed)
        seed = torch.randint(2**31, (number + 1,), generator=stream, device="cpu")[number]
        generator = torch.Generator().manual_seed(int(seed))
        with torch.no_grad():
            self.omega.copy_(orthogonal_features(self.features, self.omega.shape[1], generator))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False,
        cross: bool = False, state: Any = None,
    ) -> tuple[Tensor, PerformerState | LinearState | None]:  # fmt: skip
        omega = self.omega.to(q.dtype)
        if self.config.kernel == "softmax":
            if causal:
                return performer_causal(q, k, v, omega, mask=mask, state=state)
            return performer(q, k, v, omega, mask=mask), None
        q, k = relu_features(q, omega), relu_features(k, omega)
        if causal:
            return linear_causal(q, k, v, mask=mask, state=state, eps=EPS)
        return linear_attention(q, k, v, mask=mask, eps=EPS), None

    def pool(self, k: Tensor, v: Tensor, mask: Tensor | None) -> PerformerState | LinearState:
        omega = self.omega.to(k.dtype)
        if self.config.kernel == "softmax":
            return performer_pool(k, v, omega, mask=mask)
        return linear_pool(relu_features(k, omega), v, mask=mask)

    def ask(self, q: Tensor, state: Any) -> Tensor:
        omega = self.omega.to(q.dtype)
        if self.config.kernel == "softmax":
            return performer_read(q, state, omega)
        return linear_read(relu_features(q, omega), state, eps=EPS)

    def state_spec(self, batch: int) -> StateSpec:
        shape = (batch, self.heads, self.features, self.dim // self.heads + 1)
        if self.config.kernel == "relu":
            return StateSpec(LinearState, shape, Counts((batch,)))
        return StateSpec(PerformerState, shape[:3], shape)

    def named_matrices(self, n: int, grid: tuple[int, ...] | None) -> dict[str, Any]:
        return {**super().named_matrices(n, grid), "omega": self.omega}

    def cost_ops(self, n: int, grid: tuple[int, ...] | None = None) -> list[Op]:
        d, m = self.dim // self.heads, self.features
        project = Op("matmul", (self.heads, n, d, m))
        pool, ask = Op("matmul", (self.heads, m, n, d + 1)), Op("matmul", (self.heads, n, m, d + 1))
        return [self.qkv.op(n), project, project, pool, ask, linear_op(n, self.proj)]


@register(PerformerMixer)
@dataclass(frozen=True, kw_only=True)
class PerformerConfig(HeadsConfig):
    """Options of Performer.

    Args:
        features: number of features m per head; None for 2 d. The softmax kernel's error falls as 1 / √m.
        kernel: "softmax" or "relu".
        seed: seed of the random features.
    """

    name: ClassVar[str] = "performer"
    output: ClassVar[str] = "positive orthogonal random features"
    cost_formula: ClassVar[str] = "4 N D² + 2 N m (2 D + heads); where m = features or 2 d"
    sees: ClassVar[str] = "everything, the past"
    features: int | None = None
    kernel: str = "softmax"
    seed: int = 0

    @property
    def attends(self) -> bool:
        return True

    def check(self) -> None:
        if self.features is not None:
            check_int("features", self.features, 1)
        check_choice("kernel", self.kernel, ("softmax", "relu"))
        check_int("seed", self.seed, 0, 2**32 - 1)
