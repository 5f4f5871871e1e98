"""ProdPoly (Π-nets): a polynomial of each token by itself, through a recursion of Hadamard products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from polymix.errors import OptionError, check_choice, check_int
from polymix.mixers.checks import MixerCall
from polymix.mixers.config import MixerConfig
from polymix.mixers.mixer import INIT_STD, Polynomial, TokenMixer
from polymix.mixers.registry import Capabilities, register
from polymix.structured.base import init_
from polymix.structured.cost import Op, linear_op
from polymix.structured.dense import Dense


class ProdPolyMixer(TokenMixer):
    """ProdPoly (Π-nets): a polynomial of degree d of each token by itself, by a recursion of Hadamard products.

        coupled  x_1 = z U_1,            x_n = (z U_n) ⊙ x_{n-1} + x_{n-1},      Y = x_d C + b_C
        nested   x_1 = (z U_1) ⊙ ω_1,    x_n = (z U_n) ⊙ (x_{n-1} S_n + ω_n),    Y = x_d C + b_C
        product  x_1 = z,                x_n = (z U_n + b_n) ⊙ x_{n-1},          Y = x_d

    No token sees another. The first two are the coupled and the nested CP decomposition of the polynomial's
    coefficients with R = `rank` channels. The third is the Poly-NL paper's form of ProdPoly, X W_p ⊙ X at degree 2,
    for any degree. ω are the biases of the nested form; without `bias`, ω_1 = 1 and the others are 0. For generic
    weights the degree is exactly d. The polynomial is unbounded, so normalise the tokens when d is large.

    The output does not shrink with N as attention's does. It starts with the spread of attention's output over 196
    tokens.

    Shapes: (B, N, D) or (B, D, H, W), returned alike.
    Source: Chrysos et al. (2020); Poly-NL, Sec. 5.1.4.
    """

    name = "prodpoly"
    # Not "arbitrary": such a mask may hide a token from itself, which would leave nothing.
    capabilities = Capabilities(
        causal=True,
        masks=frozenset({"padding", "block_causal", "segments"}),
        isolates_future=True,
        isolates_segments=True,
    )
    feature_maps = True
    config: ProdPolyConfig

    def __init__(self, config: ProdPolyConfig, dim: int, **kw: Any) -> None:
        super().__init__(config, dim)
        degree, product = config.degree, config.decomposition == "product"
        self.rank = dim if product else config.rank or dim
        self.count = degree - 1 if product else degree  # number of maps U, which share one product
        self.maps = Dense(dim, self.count * self.rank, config.bias and product, **kw)
        nested = config.decomposition == "nested"
        self.nest = nn.ModuleList(Dense(self.rank, self.rank, False, **kw) for _ in range(degree - 1 if nested else 0))
        self.omega = nn.Parameter(torch.zeros(degree, self.rank, **kw)) if nested and config.bias else None
        self.out = None if product else Dense(self.rank, dim, config.bias, **kw)
        with torch.no_grad():
            if self.omega is not None:
                self.omega[0].fill_(1.0)
            if self.out is not None:  # each factor 1 + u of the coupled form doubles the variance
                growth = 2 ** ((degree - 1) / 2) if config.decomposition == "coupled" else 1.0
                init_(self.out.weight, self.rank, INIT_STD / growth)
            else:
                self.maps.weight[-self.rank :] *= INIT_STD

    def mix(self, x: Tensor, context: Tensor, call: MixerCall) -> Tensor:
        factors = self.maps(x).unflatten(-1, (self.count, self.rank)).unbind(-2)
        if self.config.decomposition == "product":
            y = x
            for factor in factors:
                y = factor * y
            return y
        assert self.out is not None
        y = factors[0]
        if self.config.decomposition == "coupled":
            for factor in factors[1:]:
                y = factor * y + y
            return self.out(y)
        omega = self.omega
        y = y if omega is None else y * omega[0].to(y.dtype)
        for n, (factor, nest) in enumerate(zip(factors[1:], self.nest, strict=True), start=1):
            inner = nest(y)
            y = factor * (inner if omega is None else inner + omega[n].to(inner.dtype))
        return self.out(y)

    @property
    def polynomial(self) -> Polynomial:
        lower = self.config.decomposition == "coupled" and self.config.degree > 1
        return Polynomial(self.config.degree, homogeneous=not lower and not self.config.bias)

    def no_weight_decay(self) -> set[str]:
        return set() if self.omega is None else {"omega"}

    def named_matrices(self, n: int, grid: tuple[int, ...] | None) -> dict[str, Any]:
        """U: [U_1 … U_d], product form [U_2 … U_d]. S: [S_2 … S_d]. omega: (d, R)."""
        bias = self.maps.bias
        letters: dict[str, Any] = {
            "U": [weight.t() for weight in self.maps.weight.chunk(self.count)],
            "b_U": None if bias is None else list(bias.chunk(self.count)),
            "S": [nest.dense() for nest in self.nest if isinstance(nest, Dense)], "omega": self.omega,
            "C": None, "b_C": None,
        }  # fmt: skip
        return letters if self.out is None else letters | {"C": self.out.dense(), "b_C": self.out.bias}

    def cost_ops(self, n: int, grid: tuple[int, ...] | None = None) -> list[Op]:
        return [linear_op(n, layer) for layer in (self.maps, *self.nest, self.out) if layer is not None]


@register(ProdPolyMixer)
@dataclass(frozen=True, kw_only=True)
class ProdPolyConfig(MixerConfig):
    """Options of ProdPoly.

    Args:
        degree: 1 to 8; at least 2 for the product form.
        decomposition: "coupled", "nested" or "product".
        rank: R; None for D. The product form has no rank.
    """

    name: ClassVar[str] = "prodpoly"
    output: ClassVar[str] = "Π-nets: a polynomial of each token"
    cost_formula: ClassVar[str] = (
        "(degree + 1) N D R; plus (degree - 1) N R² if decomposition = nested; "
        "(degree - 1) N D² if decomposition = product; where R = rank or D"
    )
    sees: ClassVar[str] = "itself"
    degree: int = 2
    decomposition: str = "coupled"
    rank: int | None = None

    def check(self) -> None:
        check_choice("decomposition", self.decomposition, ("coupled", "nested", "product"))
        product = self.decomposition == "product"
        check_int("degree", self.degree, 2 if product else 1, 8)
        if self.rank is not None:
            check_int("rank", self.rank, 1)
            if product:
                raise OptionError("rank", self.rank, 'None with decomposition="product"', "Leave rank out.")
