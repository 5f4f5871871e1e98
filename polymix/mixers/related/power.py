"""Power attention: a power of the dot product in place of softmax's exponential."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from polymix.errors import OptionError, check_choice
from polymix.mixers.checks import MixerCall
from polymix.mixers.config import HeadsConfig
from polymix.mixers.heads import head_count
from polymix.mixers.heads_mixer import HeadsMixer
from polymix.mixers.mixer import INIT_STD, Polynomial
from polymix.mixers.registry import Capabilities, register
from polymix.mixers.states import Counts, Place, StateSpec, Summary
from polymix.ops.related.linear_attention import LinearState
from polymix.ops.related.power import power_attention, power_causal, power_pool, power_read, power_summary
from polymix.ops.shared.symmetric import symmetric_size
from polymix.ops.shared.tensors import accumulator
from polymix.structured.cost import Op, linear_op
from polymix.structured.dense import Dense

EPS = 1e-6
REMEMBERED = 4.0  # initial bias of the gates: their half-life is about 38 tokens


class PowerMixer(HeadsMixer):
    """Power attention: the similarity of q and k is a power of their dot product (symmetric power attention).

        y_i = Σ_j s_ij^p v_j / (Σ_j s_ij^p + 1e-6 n_i),    s_ij = q_i·k_j / √d      per head; W_o joins the heads
        φ(x) = the monomials of degree p of x d^-¼, times √(p! / ∏ m!):  φ(q)·φ(k) = s^p,   F = C(d + p - 1, p)

    The sums run over the n_i tokens j that token i sees; they are products with the moments Σ_j φ(k_j)ᵀ [v_j, 1]. The
    monomials x_i1 … x_ip, with the m of the multiplicities of their variables, stand for all orders of their factors:
    no feature occurs twice. Without `normalize` y_i = Σ_j s_ij^p v_j / n_i, a polynomial of degree 2 p + 1.

    With `gate` the weight of token j for token i is multiplied by ∏ γ_m over m = j + 1 … i, and n_i is the sum of these
    products: γ = σ(x W_g + b_g), one gate a head. The mixer is then causal. A layer that projects for it cannot take
    it, as the gates read x.

    F grows fast with d: with d = 64 it is 2,080 at degree 2, 45,760 at degree 3 and 766,480 at degree 4; with d = 16,
    136, 816 and 3,876. Where fewer than 2 F tokens see each other, all pairs cost less than the features: outside of
    graphs impl="auto" then sums over the pairs. The causal form works in chunks of 128 tokens; torch.export then needs
    a fixed length.

    Raises: OptionError for degree 3 with `normalize`, or heads that do not divide D.

    Shapes: (B, N, D) -> (B, N, D), d = D / heads.
    State: F (d + 1) numbers per head; F d without `normalize`.
    Source: Buckman, Gelada and Zhang (2024), Symmetric Power Transformers; Gelada et al. (2025), arXiv 2507.04239.
    """

    name = "power"
    capabilities = Capabilities(
        causal=True, cross=True, values=True, masks=frozenset({"padding"}), recurrent=True, sequence="sum"
    )
    config: PowerConfig

    def __init__(self, config: PowerConfig, dim: int, **kw: Any) -> None:
        super().__init__(config, dim)
        d = dim // head_count(config.heads, dim)
        spread = _moment(2 * config.degree, d) ** 0.5 / (_moment(config.degree, d) if config.normalize else 1) / 14
        self.add_projections(INIT_STD / spread, **kw)  # for a mean of 196 values, weighted or not
        self.gate = Dense(dim, self.heads, **kw) if config.gate else None
        if self.gate is not None:
            nn.init.constant_(self.gate.bias, REMEMBERED)  # type: ignore[arg-type]
            self.capabilities = replace(type(self).capabilities, cross=False, sequence="scan")

    def mix(self, x: Tensor, context: Tensor, call: MixerCall) -> Tensor:
        if self.gate is None:
            return super().mix(x, context, call)
        q, k, v = (part.transpose(1, 2) for part in self.qkv(x, context, call.values))
        return self._gated(x, q, k, v, call.mask, None)[0]

    def scan(self, x: Tensor, state: LinearState | None, mask: Tensor | None) -> tuple[Tensor, Any]:
        if self.gate is None:
            return super().scan(x, state, mask)
        q, k, v = (part.transpose(1, 2) for part in self.qkv(x, x))
        return self._gated(x, q, k, v, mask, state)

    def summary(self, x: Tensor, mask: Tensor | None = None, place: Place | None = None, start: Any = None) -> Summary:
        if self.gate is None:
            return super().summary(x, mask, place, start)
        _, k, v = (part.transpose(1, 2) for part in self.qkv(x, x))
        degree, normalize = self.config.degree, self.config.normalize
        return Summary(*power_summary(k, v, self._log_gates(x), degree, mask=mask, normalize=normalize))

    def _log_gates(self, x: Tensor) -> Tensor:
        """(B, heads, N), in float32 or wider."""
        assert self.gate is not None
        return F.logsigmoid(self.gate(x).to(accumulator(x.dtype))).transpose(1, 2)

    def _gated(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, state: LinearState | None
    ) -> tuple[Tensor, LinearState]:
        options = {"log_gates": self._log_gates(x), **self._options}
        y, state = power_causal(q, k, v, mask=mask, state=state, **options)
        return self.output(x, y), state

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False,
        cross: bool = False, state: LinearState | None = None,
    ) -> tuple[Tensor, LinearState | None]:  # fmt: skip
        if causal:
            return power_causal(q, k, v, mask=mask, state=state, **self._options)
        return power_attention(q, k, v, mask=mask, impl=self.config.impl, **self._options), None

    def pool(self, k: Tensor, v: Tensor, mask: Tensor | None) -> LinearState:
        return power_pool(k, v, self.config.degree, mask=mask, normalize=self.config.normalize)

    def ask(self, q: Tensor, state: LinearState) -> Tensor:
        return power_read(q, state, **self._options)

    @property
    def _options(self) -> dict[str, Any]:
        return {"degree": self.config.degree, "normalize": self.config.normalize, "eps": EPS}

    def state_spec(self, batch: int) -> StateSpec:
        d = self.dim // self.heads
        shape = (batch, self.heads, symmetric_size(d, self.config.degree), d + self.config.normalize)
        return StateSpec(LinearState, shape, Counts((batch,)) if self.gate is None else (batch, self.heads))

    @property
    def polynomial(self) -> Polynomial:
        if self.gate is not None:
            return Polynomial()
        power = 2 * self.config.degree
        if not self.config.normalize:
            return Polynomial(power + 1, homogeneous=not self.config.bias)
        return Polynomial(rational=(power * self.heads + 1, power * self.heads))  # W_o adds a quotient for each head

    def named_matrices(self, n: int, grid: tuple[int, ...] | None) -> dict[str, Any]:
        matrices = super().named_matrices(n, grid)
        if self.gate is not None:
            matrices.update(W_g=self.gate.weight.t(), b_g=self.gate.bias)
        return matrices

    def cost_ops(self, n: int, grid: tuple[int, ...] | None = None) -> list[Op]:
        d = self.dim // self.heads
        size, width = symmetric_size(d, self.config.degree), d + self.config.normalize
        pool, ask = Op("matmul", (self.heads, size, n, width)), Op("matmul", (self.heads, n, size, width))
        gate = [] if self.gate is None else [linear_op(n, self.gate)]
        return [self.qkv.op(n), *gate, pool, ask, linear_op(n, self.proj)]


def _moment(power: int, d: int) -> float:
    """E[s^power] for an even power of s = q·k / √d, with q and k of d independent normal channels."""
    return math.prod((2 * i + 1) * (1 + 2 * i / d) for i in range(power // 2))


@register(PowerMixer)
@dataclass(frozen=True, kw_only=True)
class PowerConfig(HeadsConfig):
    """Options of power attention.

    Args:
        degree: p, the power of q·k / √d: 2, 3 or 4.
        normalize: divide by the sum of the powers; not at degree 3, where they have both signs.
        gate: earlier tokens fade by gates that each token sets; the mixer is then causal.
    """

    name: ClassVar[str] = "power"
    output: ClassVar[str] = "attention with (q·k/√d)^p for exp"
    cost_formula: ClassVar[str] = (
        "4 N D² + 2 N F (D + heads); minus 2 N F heads if not normalize; plus N D heads if gate; "
        "where F = binomial(d + degree - 1, degree)"
    )
    sees: ClassVar[str] = "everything, the past, a context"
    sees_all: ClassVar[str] = "gate=False"
    forms: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {"bias": True}, "equations": {"bias": False}}
    degree: int = 2
    normalize: bool = True
    gate: bool = False

    @property
    def attends(self) -> bool:
        return not self.gate

    @property
    def causal_by_build(self) -> bool:
        return self.gate

    def check(self) -> None:
        check_choice("degree", self.degree, (2, 3, 4))
        check_choice("normalize", self.normalize, (True, False))
        check_choice("gate", self.gate, (True, False))
        if self.normalize and self.degree == 3:
            allowed = "normalize=False with degree=3, as the cubes may sum to zero"
            raise OptionError("normalize", True, allowed, "Pass normalize=False, or an even degree.")
