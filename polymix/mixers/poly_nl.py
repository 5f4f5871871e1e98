"""Poly-NL, the non-local block as a third-order polynomial."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polymix.errors import check_choice, check_divides, check_int
from polymix.mixers.base import INIT_STD, Capabilities, MixerConfig, Polynomial, TokenMixer
from polymix.mixers.checks import Call
from polymix.mixers.registry import register
from polymix.ops.blocked import pooled as blocked
from polymix.ops.blocked.common import Linear
from polymix.ops.common import count_real, scaled_linear
from polymix.ops.dispatch import IMPLS
from polymix.ops.pooled import mean_of_products, mean_over_tokens, moments_pay, pooled_spread
from polymix.ops.pooled_linear import linear_pairs, linear_scaled, wide
from polymix.structured.cost import Op, linear_op
from polymix.structured.dense import Dense

_LAST = "W_3 W_out"


class PolyNlMixer(TokenMixer):
    """Y = (Ψ(X W_1 ⊙ X W_2) ⊙ X) W_3,  Z = αX + βY, Ψ the mean over positions spread back (Poly-NL, Eq. 9).

    `reduction` r > 1 puts the block between a bottleneck X W_in (D -> D/r) and an expansion Y W_out (PL-037). `order`
    2 drops W_2 (PL-016); "2+3" adds ProdPoly's second-order term X W_p ⊙ X to Y (PL-017). α starts at 0 and β at 1,
    since a host's residual connection already carries X; set α to 1 where there is none.

    Shapes: (B, N, D) or (B, D, H, W), returned alike. Cost: 3 N D² multiply-adds at r = 1 and order 3, a product of
    N (D/r)² more or less at the other orders, and 2 N D²/r for the bottleneck. Padding masks;
    permutation-equivariant. Source: PL-006 … PL-008, PL-016, PL-017, PL-037.
    """

    name = "poly_nl"
    capabilities = Capabilities(masks=frozenset({"padding"}))
    feature_maps = True
    impls = IMPLS
    config: PolyNlConfig

    def __init__(self, config: PolyNlConfig, dim: int, **kw: Any) -> None:
        super().__init__(config, dim)
        check_divides("reduction", config.reduction, "dim", dim)
        inner, bias = dim // config.reduction, config.bias
        self.parts = {2: ("W_1",), 3: ("W_1", "W_2"), "2+3": ("W_1", "W_2", "W_p")}[config.order]
        self.into = Dense(dim, inner, bias, **kw) if config.reduction > 1 else None
        self.product = Dense(inner, len(self.parts) * inner, bias, **kw)  # W_1, W_2, W_p read the same tokens
        if "W_p" in self.parts:  # not averaged over tokens, so scaled to what the averaged part comes to
            with torch.no_grad():
                self.product.weight[-inner:] *= INIT_STD
        self.proj = Dense(inner, inner, bias, **kw)
        self.out = Dense(inner, dim, bias, **kw) if config.reduction > 1 else None
        self.alpha = nn.Parameter(torch.zeros((), **kw))
        self.beta = nn.Parameter(torch.ones((), **kw))

    def mix(self, x: Tensor, context: Tensor, call: Call) -> Tensor:
        why = None if self.config.order == 3 else "it is for order 3"
        impl = self.choose(x, blocked=why, native=why or wide(x), triton=None)
        if impl == "blocked":
            into = None if self.into is None else (self.into.weight, self.into.bias)
            last = self.merged().get(_LAST) or self._last()
            alpha, beta = self.alpha.item(), self.beta.item()
            return blocked.poly_nl(x, into, (self.product.weight, self.product.bias), last, alpha, beta, call.mask)
        inner = x if self.into is None else self.into(x)
        product: dict[str, Tensor] = {}
        both = self.product.weight, self.product.bias
        if why is None and impl != "triton" and moments_pay(inner, inner.shape[2], inner.dtype):
            pooled = mean_of_products(inner, *both, call.mask, impl=impl)
        elif impl == "native":
            sums = linear_pairs(inner, *both, None, call.mask, impl=impl)
            pooled = (sums / count_real(inner, call.mask)).unsqueeze(1)
        else:
            product = dict(zip(self.parts, self.product(inner).chunk(len(self.parts), dim=-1), strict=True))
            pooled = mean_over_tokens(product["W_1"], call.mask, product.get("W_2"), impl=impl)
        if impl == "native":
            return self._scaled(x, inner, pooled.squeeze(1))
        linear = self.merged().get(_LAST) or (self.proj.weight, self.proj.bias)
        if impl == "triton":
            y = F.linear(pooled_spread(inner.unsqueeze(2), pooled, None, impl=impl).squeeze(2), *linear)
        else:
            y = scaled_linear(inner, pooled.to(inner.dtype), *linear)
        if "W_p" in product:
            y = y + product["W_p"] * inner
        if self.out is not None and _LAST not in self.merged():
            y = self.out(y)
        return self.alpha * x + self.beta * y

    def _scaled(self, x: Tensor, inner: Tensor, pooled: Tensor) -> Tensor:
        """αX + βY of what was pooled, in one operator."""
        weight, bias = self.merged().get(_LAST) or self._last()
        scale, bias, whole = self.beta * pooled, None if bias is None else self.beta * bias, self.into is None
        y = linear_scaled(inner, scale, weight, bias, self.alpha if whole else None, impl="native")
        return y if whole else y.addcmul_(x, self.alpha)  # y is nobody else's

    def _last(self) -> Linear:
        """W_3, and W_out after it where there is a reduction, as one map."""
        weight, bias = self.proj.weight, self.proj.bias
        if self.out is None:
            return weight, bias
        return self.out.weight @ weight, None if bias is None else F.linear(bias, self.out.weight, self.out.bias)

    def merge(self) -> dict[str, Linear]:
        return {} if self.out is None or "W_p" in self.parts else {_LAST: self._last()}

    @property
    def polynomial(self) -> Polynomial:
        degree = 2 if self.config.order == 2 else 3
        plain = self.config.order != "2+3" and not self.config.bias and not self.alpha.item()
        return Polynomial(degree, homogeneous=plain)

    def no_weight_decay(self) -> set[str]:
        return {"alpha", "beta"}

    def letters(self, n: int, grid: tuple[int, ...] | None) -> dict[str, Any]:
        count = len(self.parts)
        weights = dict(zip(self.parts, (w.t() for w in self.product.weight.chunk(count)), strict=True))
        bias = (None,) * count if self.product.bias is None else self.product.bias.chunk(count)
        biases = {name.replace("W", "b"): b for name, b in zip(self.parts, bias, strict=True)}
        letters: dict[str, Any] = {"W_2": None, "b_2": None, **weights, **biases}
        letters.update(W_3=self.proj.weight.t(), b_3=self.proj.bias, alpha=self.alpha, beta=self.beta)
        for name, layer in (("in", self.into), ("out", self.out)):
            if layer is not None:
                letters |= {f"W_{name}": layer.weight.t(), f"b_{name}": layer.bias}
        return letters

    def ops(self, n: int, grid: tuple[int, ...] | None = None) -> list[Op]:
        layers = (self.into, self.product, self.proj, self.out)
        return [linear_op(n, layer) for layer in layers if layer is not None]


@register(PolyNlMixer)
@dataclass(frozen=True, kw_only=True)
class PolyNlConfig(MixerConfig):
    """Options of Poly-NL. reduction: bottleneck factor, 1 for none. order: 3, 2, or "2+3" for both."""

    name: ClassVar[str] = "poly_nl"
    reduction: int = 1
    order: int | str = 3

    def check(self) -> None:
        check_int("reduction", self.reduction, 1)
        check_choice("order", self.order, (3, 2, "2+3"))
