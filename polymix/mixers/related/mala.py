"""Magnitude-aware linear attention (MALA)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from polymix.mixers.mixer import INIT_STD
from polymix.mixers.registry import Capabilities, register
from polymix.mixers.related.features import GatedConfig, GatedMixer
from polymix.mixers.states import Counts, StateSpec
from polymix.ops.related.linear_attention import FEATURE_MAPS
from polymix.ops.related.mala import MalaState, mala, mala_causal, mala_pool, mala_read
from polymix.ops.shared.tensors import accumulator

SPREAD = 0.14  # of the output before W_o, measured at 196 tokens


class MalaMixer(GatedMixer):
    """Magnitude-aware linear attention (MALA): the length of a query decides how unequal its weights are.

        y_i = Σ_j (s_ij (1 + 1 / (z_i + 1e-6)) - z_i) v_j / n_i       per head; W_o joins the heads
        s_ij = φ(q_i)·φ(k_j) / √d,   z_i = Σ_j s_ij / n_i,   φ(x) = elu(x) + 1

    The sums run over the n_i tokens j that token i sees. The division of linear attention cancels the length of φ(q).
    Here a longer query adds (s_ij - z_i) / n_i to the weights s_ij / (z_i n_i) of linear attention: they still sum to
    1, but those below the mean may become negative. This is what the authors' code computes for all tokens.

    Their block also rotates q and k (but not in z) and adds a depthwise convolution of V, and has the gate: with `gate`
    what W_o reads is multiplied by X W_g + b_g. The causal form works in chunks of 128 tokens; torch.export then needs
    a fixed length.

    Shapes: (B, N, D) -> (B, N, D), d = D / heads.
    State: d (d + 2) numbers per head.
    Source: Fan, Huang, Ai and He (2025), Rectifying Magnitude Neglect in Linear Attention, ICCV, arXiv 2507.00698.
    """

    name = "mala"
    capabilities = Capabilities(
        causal=True, cross=True, values=True, masks=frozenset({"padding"}), recurrent=True, sequence="sum"
    )
    config: MalaConfig

    def __init__(self, config: MalaConfig, dim: int, **kw: Any) -> None:
        super().__init__(config, dim)
        self.add_projections(INIT_STD / SPREAD, **kw)

    def query_features(self, q: Tensor) -> Tensor:
        return self.key_features(q) * q.shape[-1] ** -0.5

    def key_features(self, k: Tensor) -> Tensor:
        return FEATURE_MAPS["elu+1"](k)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False,
        cross: bool = False, state: MalaState | None = None,
    ) -> tuple[Tensor, MalaState | None]:  # fmt: skip
        dtype = accumulator(v.dtype)
        q, k = self.query_features(q.to(dtype)), self.key_features(k.to(dtype))
        return mala_causal(q, k, v, mask=mask, state=state) if causal else (mala(q, k, v, mask=mask), None)

    def pool(self, k: Tensor, v: Tensor, mask: Tensor | None) -> MalaState:
        return mala_pool(self.key_features(k.to(accumulator(k.dtype))), v, mask=mask)

    def ask(self, q: Tensor, state: MalaState) -> Tensor:
        return mala_read(self.query_features(q.to(state.moments.dtype)), state)

    def state_spec(self, batch: int) -> StateSpec:
        d = self.dim // self.heads
        return StateSpec(MalaState, (batch, self.heads, d, d + 1), (batch, self.heads, d), Counts((batch,)))


@register(MalaMixer)
@dataclass(frozen=True, kw_only=True)
class MalaConfig(GatedConfig):
    """Options of magnitude-aware linear attention."""

    name: ClassVar[str] = "mala"
    output: ClassVar[str] = "linear attention whose weights keep the query's length"
    cost_formula: ClassVar[str] = "4 N D² + 2 N D (d + 1); plus N D² if gate"
    sees: ClassVar[str] = "everything, the past, a context"
