"""Higher-order linear attention of second order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from polymix.mixers.config import HeadsConfig
from polymix.mixers.heads import head_count
from polymix.mixers.heads_mixer import HeadsMixer
from polymix.mixers.mixer import INIT_STD, Polynomial
from polymix.mixers.registry import Capabilities, register
from polymix.mixers.states import Counts, Place, StateSpec, Summary
from polymix.ops.related.hla import HlaState, HlaSummary, hla, hla_causal, hla_read, hla_summary
from polymix.structured.cost import Op, linear_op


class HlaMixer(HeadsMixer):
    """Second-order higher-order linear attention (HLA): a value counts as far as two queries see the same keys.

        Y = (A Aᵀ) V / n²,    A = Q Kᵀ / √d                                 per head; W_o joins the heads
        Y = ((A ⊙ L)(A ⊙ L)ᵀ ⊙ L) V / (n_i (n_i + 1) / 2)                   causal, with L the lower triangle of ones
        y_i = Σ_{m ≤ j ≤ i} (q_i·k_m)(q_j·k_m) v_j / d, over the number of these pairs, token by token

    Neither form computes an N × N matrix: Y = Q (KᵀK)(QᵀV), and in causal order y_i = q_i H_i with H_i = H_{i-1} + S_i
    q_i v_iᵀ and S_i = S_{i-1} + k_i k_iᵀ, in chunks of 128 tokens. The masked form is exact. torch.export then needs a
    fixed length. It is a polynomial of degree 5.

    The paper's sums have no denominator; dividing by the number of pairs keeps the scale when the length changes. Its
    optional division by the sum of the weights is left out: they have both signs, so their sum passes through zero. A
    separate context is not taken, since the queries of the values' tokens play a part.

    Raises: OptionError for a number of heads that does not divide D.

    Shapes: (B, N, D) -> (B, N, D), d = D / heads.
    State: 2 d² numbers per head.
    Source: Zhang, Qin and Gu (2025), Higher-order Linear Attention, arXiv 2510.27258.
    """

    name = "hla"
    capabilities = Capabilities(causal=True, values=True, masks=frozenset({"padding"}), recurrent=True, sequence="sum")
    config: HlaConfig

    def __init__(self, config: HlaConfig, dim: int, **kw: Any) -> None:
        super().__init__(config, dim)
        # Over 196 tokens, an entry of QᵀV / n has the variance 1/D (the maps are of the same tokens) + 1/196.
        spread = ((1 / dim + 1 / 196) * (head_count(config.heads, dim) / dim + 1 / 196)) ** 0.5
        self.add_projections(INIT_STD / spread, **kw)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False,
        cross: bool = False, state: HlaState | None = None,
    ) -> tuple[Tensor, HlaState | None]:  # fmt: skip
        return hla_causal(q, k, v, mask=mask, state=state) if causal else (hla(q, k, v, mask=mask), None)

    def summary(self, x: Tensor, mask: Tensor | None = None, place: Place | None = None, start: Any = None) -> Summary:
        q, k, v = (part.transpose(1, 2) for part in self.qkv(x, x))
        return Summary(hla_summary(q, k, v, mask=mask, causal=place is None or place.causal))

    def ask(self, q: Tensor, state: HlaSummary) -> Tensor:
        return hla_read(q, state)

    def state_spec(self, batch: int) -> StateSpec:
        d = self.dim // self.heads
        shape = (batch, self.heads, d, d)
        return StateSpec(HlaState, shape, shape, Counts((batch,)))

    @property
    def polynomial(self) -> Polynomial:
        return Polynomial(5, homogeneous=not self.config.bias)

    def cost_ops(self, n: int, grid: tuple[int, ...] | None = None) -> list[Op]:
        d = self.dim // self.heads
        pool, join = Op("matmul", (self.heads, d, n, d)), Op("matmul", (self.heads, d, d, d))
        return [self.qkv.op(n), pool, pool, join, Op("matmul", (self.heads, n, d, d)), linear_op(n, self.proj)]


@register(HlaMixer)
@dataclass(frozen=True, kw_only=True)
class HlaConfig(HeadsConfig):
    """Options of second-order HLA."""

    name: ClassVar[str] = "hla"
    output: ClassVar[str] = "(Q Kᵀ)(Q Kᵀ)ᵀ V, each product causal"
    cost_formula: ClassVar[str] = "4 N D² + 3 N D d + D d²"
    sees: ClassVar[str] = "everything, the past"
    forms: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {"bias": True}, "equations": {"bias": False}}

    @property
    def attends(self) -> bool:
        return True
