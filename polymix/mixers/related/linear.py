"""Linear attention with a positive feature map."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from polymix.errors import OptionError, check_choice
from polymix.mixers.config import HeadsConfig
from polymix.mixers.heads import Heads, head_count
from polymix.mixers.heads_mixer import HeadsMixer
from polymix.mixers.mixer import INIT_STD, Polynomial
from polymix.mixers.registry import Capabilities, register
from polymix.mixers.states import Counts, StateSpec
from polymix.ops.related.linear_attention import (
    FEATURE_MAPS,
    LinearState,
    linear_attention,
    linear_causal,
    linear_pool,
    linear_read,
)
from polymix.ops.shared.tensors import accumulator
from polymix.structured.base import init_
from polymix.structured.cost import Op, linear_op
from polymix.structured.dense import Dense

EPS = 1e-6
# E[φ(q)φ(k)] and E[φ²] for a channel of normal q and k, which give the spread of φ(q)·φ(k) without a denominator.
_MOMENTS = {"elu+1": (1.35, 1.97), "relu": (0.16, 0.5), "identity": (0.0, 1.0)}


class LinearMixer(HeadsMixer):
    """Linear attention: the similarity φ(q)·φ(k) replaces the softmax.

        y_i = φ(q_i) Σ_j φ(k_j)ᵀ v_j / (φ(q_i) · Σ_j φ(k_j) + 1e-6 n_i)     per head; W_o joins the heads

    The sums run over the n_i tokens j that token i sees. φ is elu(x) + 1 or relu(x). Without `normalize` there is no
    denominator: y_i = φ(q_i) Σ_j φ(k_j)ᵀ v_j / (n_i √d), a mean, which keeps its scale when the length changes. φ may
    then also be the identity, which makes the mixer a polynomial of degree 3. The causal form works in chunks of 128
    tokens; torch.export then needs a fixed length.

    Shapes: (B, N, D) -> (B, N, D), d = D / heads.
    State: d (d + 1) numbers per head.
    Source: Katharopoulos et al. (2020), Eq. 4-7.
    """

    name = "linear"
    capabilities = Capabilities(
        causal=True, cross=True, values=True, masks=frozenset({"padding"}), recurrent=True, sequence="sum"
    )
    config: LinearConfig

    def __init__(self, config: LinearConfig, dim: int, **kw: Any) -> None:
        super().__init__(config, dim)
        self.heads = head_count(config.heads, dim)
        self.qkv = Heads(dim, self.heads, config.bias, **kw)
        self.proj = Dense(dim, dim, config.bias, **kw)
        spread = 1 / 14  # for a mean of 196 values, weighted or not
        if not config.normalize:
            (mean, square), d = _MOMENTS[config.feature_map], dim // self.heads
            spread *= (square**2 + (d - 1) * mean**2) ** 0.5
        init_(self.proj.weight, dim, INIT_STD / spread)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False,
        cross: bool = False, state: LinearState | None = None,
    ) -> tuple[Tensor, LinearState | None]:  # fmt: skip
        feature_map, dtype = FEATURE_MAPS[self.config.feature_map], accumulator(v.dtype)
        q, k = feature_map(q.to(dtype)), feature_map(k.to(dtype))
        q = q if self.config.normalize else q * q.shape[-1] ** -0.5
        options: dict[str, Any] = {"mask": mask, "normalize": self.config.normalize, "eps": EPS}
        return (
            linear_causal(q, k, v, state=state, **options) if causal else (linear_attention(q, k, v, **options), None)
        )

    def pool(self, k: Tensor, v: Tensor, mask: Tensor | None) -> LinearState:
        k = FEATURE_MAPS[self.config.feature_map](k.to(accumulator(k.dtype)))
        return linear_pool(k, v, mask=mask, normalize=self.config.normalize)

    def ask(self, q: Tensor, state: LinearState) -> Tensor:
        q = FEATURE_MAPS[self.config.feature_map](q.to(state.moments.dtype))
        q = q if self.config.normalize else q * q.shape[-1] ** -0.5
        return linear_read(q, state, normalize=self.config.normalize, eps=EPS)

    def state_spec(self, batch: int) -> StateSpec:
        d = self.dim // self.heads
        return StateSpec(LinearState, (batch, self.heads, d, d + self.config.normalize), Counts((batch,)))

    @property
    def polynomial(self) -> Polynomial:
        return (
            Polynomial(3, homogeneous=not self.config.bias) if self.config.feature_map == "identity" else Polynomial()
        )

    def named_matrices(self, n: int, grid: tuple[int, ...] | None) -> dict[str, Any]:
        return self.qkv.named_matrices(self.proj)

    def cost_ops(self, n: int, grid: tuple[int, ...] | None = None) -> list[Op]:
        d = self.dim // self.heads
        width = d + self.config.normalize
        pool, ask = Op("matmul", (self.heads, d, n, width)), Op("matmul", (self.heads, n, d, width))
        return [self.qkv.op(n), pool, ask, linear_op(n, self.proj)]


@register(LinearMixer)
@dataclass(frozen=True, kw_only=True)
class LinearConfig(HeadsConfig):
    """Options of linear attention.

    Args:
        feature_map: φ: "elu+1", "relu", or "identity" (only with normalize=False).
        normalize: divide by the sum of the similarities.
    """

    name: ClassVar[str] = "linear"
    output: ClassVar[str] = "linear attention, φ of elu + 1 or relu"
    cost_formula: ClassVar[str] = "4 N D² + 2 N D (d + 1); minus 2 N D if not normalize"
    sees: ClassVar[str] = "everything, the past"
    forms: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {"bias": True}, "equations": {"bias": False}}
    feature_map: str = "elu+1"
    normalize: bool = True

    @property
    def attends(self) -> bool:
        return True

    def check(self) -> None:
        check_choice("feature_map", self.feature_map, FEATURE_MAPS)
        check_choice("normalize", self.normalize, (True, False))
        if self.feature_map == "identity" and self.normalize:
            allowed = "normalize=False with feature_map='identity', as its similarities may sum to zero"
            raise OptionError("normalize", True, allowed, "Pass normalize=False, or use a positive feature map.")
