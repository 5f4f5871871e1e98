"""Poly-NL: the non-local block as a polynomial of third order, in linear time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from polymix import ops
from polymix.errors import OptionError, check_choice, check_divides, check_int
from polymix.mixers.checks import MixerCall
from polymix.mixers.config import MixerConfig
from polymix.mixers.inheritance import AttentionMaps, Sources, add_sources, copy_map, first_rows
from polymix.mixers.mixer import INIT_STD, Polynomial, TokenMixer
from polymix.mixers.registry import Capabilities, register
from polymix.mixers.states import Place, PooledState, Summary, count_tokens
from polymix.ops import pooled
from polymix.ops.dispatch import IMPLS
from polymix.ops.pooled import PolyNlWeights
from polymix.ops.shared.tensors import Linear
from polymix.structured.cost import Op, linear_op
from polymix.structured.dense import Dense, affine

_LAST_WEIGHTS = "W_3 W_out"


class PolyNlMixer(TokenMixer):
    """Poly-NL: the non-local block as a polynomial of degree 3.

        Y = (Ψ(X W_1 ⊙ X W_2) ⊙ X) W_3,   Z = αX + βY     Ψ: the mean over all positions

    `reduction` > 1 puts the whole block in a bottleneck: X becomes X W_in + b_in of r = D / reduction channels, and the
    output Z W_out + b_out. So the paper reads, which places "the block" between the two; `alpha_inside=False` takes αX
    at full width instead: αX + β (Y W_out + b_out).
    `order` 2 drops W_2. `order` "2+3" adds ProdPoly's second-order term X W_p ⊙ X to Y. α starts at 0 and β at 1,
    because the residual connection of a host already adds X; set α to 1 in a host without one. With values of their
    own (`values=`), W_2 reads them in place of X.

    Raises: OptionError for a reduction that does not divide D.

    Shapes: (B, N, D) -> (B, N, D), or (B, D, H, W) -> (B, D, H, W).
    Source: Poly-NL, Eq. 9-10, Sec. 5.1.2 (bottleneck) and 5.1.4 (orders), Table 1a (cost).
    """

    name = "poly_nl"
    capabilities = Capabilities(values=True, masks=frozenset({"padding"}), sequence="sum")
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
        if "W_p" in self.parts:  # this term is not averaged over tokens: scale it to the size of the averaged one
            with torch.no_grad():
                self.product.weight[-inner:] *= INIT_STD
        self.proj = Dense(inner, inner, bias, **kw)
        self.out = Dense(inner, dim, bias, **kw) if config.reduction > 1 else None
        self.capabilities = replace(type(self).capabilities, values=config.order != 2)  # order 2 has no W_2
        self.alpha = nn.Parameter(torch.zeros((), **kw))
        self.beta = nn.Parameter(torch.ones((), **kw))

    def mix(self, x: Tensor, context: Tensor, call: MixerCall) -> Tensor:
        weights, values = self._weights(self.merged().get(_LAST_WEIGHTS)), call.values
        options: dict[str, Any] = {"order": self.config.order, "mask": call.mask, "impl": self.config.impl}
        if self.into is None or self.out is None or not self.config.alpha_inside:
            return ops.poly_nl(x, weights, values=values, **options)
        weights, values = weights._replace(into=None, out=None), None if values is None else self.into(values)
        y: Tensor = self.out(ops.poly_nl(self.into(x), weights, values=values, **options))
        return y

    def summary(self, x: Tensor, mask: Tensor | None = None, place: Place | None = None, start: Any = None) -> Summary:
        x, weights = self._inner(x)
        total = pooled.poly_nl_summary(x, weights, order=self.config.order, mask=mask)
        return Summary(PooledState(total, count_tokens(x, mask)))

    def read_state(
        self, x: Tensor, state: PooledState, mask: Tensor | None = None, place: Place | None = None
    ) -> Tensor:
        inner, weights = self._inner(x)
        mean = state.total / state.count.clamp_min(1).unsqueeze(-1)
        y = pooled.poly_nl_read(inner, mean, weights, order=self.config.order)
        return y if inner is x or self.out is None else self.out(y)

    def _inner(self, x: Tensor) -> tuple[Tensor, PolyNlWeights]:
        """The tokens that the equation reads, and its weights; in the bottleneck, if αX is taken there."""
        weights = self._weights()
        if self.into is None or not self.config.alpha_inside:
            return x, weights
        return self.into(x), weights._replace(into=None, out=None)

    def _weights(self, merged: Linear | None = None) -> PolyNlWeights:
        into, out = (None if part is None else affine(part) for part in (self.into, self.out))
        product, proj = (affine(part) for part in (self.product, self.proj))
        return PolyNlWeights(product, proj, self.alpha, self.beta, into, out, merged)

    def merge(self) -> dict[str, Linear]:
        if self.out is None or "W_p" in self.parts or self.config.alpha_inside:  # αX W_in is added between the maps
            return {}
        return {_LAST_WEIGHTS: self._weights().last()}

    @property
    def polynomial(self) -> Polynomial:
        degree = 2 if self.config.order == 2 else 3
        plain = self.config.order != "2+3" and not self.config.bias and not self.alpha.item()
        return Polynomial(degree, homogeneous=plain)

    @torch.no_grad()
    def inherit(self, attention: AttentionMaps) -> Sources:
        """Copy W_k into W_1, W_v into W_2 and W_o into W_3; nothing with a reduction."""
        inherited: Sources = {}
        if self.into is not None:
            return inherited
        parts = {"W_1": attention.key, "W_2": attention.value}
        for i, name in enumerate(self.parts):
            part, rows = parts.get(name), slice(i * self.dim, (i + 1) * self.dim)
            if part is not None and part.weight.shape[0] == self.dim:
                sources = copy_map(part, self.product.weight[rows], first_rows(self.product.bias, rows))
                add_sources(inherited, "product", sources)
        if attention.out is not None and attention.out.weight.shape == self.proj.weight.shape:
            add_sources(inherited, "proj", copy_map(attention.out, self.proj.weight, self.proj.bias))
        return inherited

    def output_map(self) -> nn.Linear | None:
        inside = self.out is not None and self.config.alpha_inside
        return super().output_map() if inside or not self.alpha.item() else None  # else αX is added after that map

    def no_weight_decay(self) -> set[str]:
        return {"alpha", "beta"}

    def named_matrices(self, n: int, grid: tuple[int, ...] | None) -> dict[str, Any]:
        count = len(self.parts)
        weights = dict(zip(self.parts, (w.t() for w in self.product.weight.chunk(count)), strict=True))
        bias = (None,) * count if self.product.bias is None else self.product.bias.chunk(count)
        biases = {name.replace("W", "b"): b for name, b in zip(self.parts, bias, strict=True)}
        matrices: dict[str, Any] = {"W_2": None, "b_2": None, **weights, **biases}
        matrices.update(W_3=self.proj.weight.t(), b_3=self.proj.bias, alpha=self.alpha, beta=self.beta)
        for name, layer in (("in", self.into), ("out", self.out)):
            if layer is not None:
                matrices |= {f"W_{name}": layer.weight.t(), f"b_{name}": layer.bias}
        return matrices

    def cost_ops(self, n: int, grid: tuple[int, ...] | None = None) -> list[Op]:
        layers = (self.into, self.product, self.proj, self.out)
        return [linear_op(n, layer) for layer in layers if layer is not None]


@register(PolyNlMixer)
@dataclass(frozen=True, kw_only=True)
class PolyNlConfig(MixerConfig):
    """Options of Poly-NL.

    Args:
        reduction: bottleneck factor; 1 for no bottleneck.
        alpha_inside: with a reduction, αX is taken inside the bottleneck; False: at full width.
        order: 3, 2, or "2+3" for the sum of both.
    """

    name: ClassVar[str] = "poly_nl"
    output: ClassVar[str] = "αX + β (Ψ(X W₁ ⊙ X W₂) ⊙ X) W₃"
    cost_formula: ClassVar[str] = (
        "3 N r²; 2 N r² if order = 2; 4 N r² if order = 2+3; plus 2 N D r if reduction > 1; where r = D / reduction"
    )
    sees: ClassVar[str] = "everything"
    forms: ClassVar[Mapping[str, Mapping[str, Any]]] = {  # of Section 5.1.2, and of Eq. 9
        "paper": {"bias": True, "reduction": 4}, "equations": {"bias": False, "reduction": 1},
    }  # fmt: skip
    own_values: ClassVar[bool] = False  # the equation has one input
    reduction: int = 1
    alpha_inside: bool = True
    order: int | str = 3

    def check(self) -> None:
        check_int("reduction", self.reduction, 1)
        check_choice("alpha_inside", self.alpha_inside, (True, False))
        if self.reduction == 1 and not self.alpha_inside:
            got = "False without a bottleneck"
            raise OptionError("alpha_inside", got, "True", "Use reduction=2 or more, or leave it out.")
        check_choice("order", self.order, (3, 2, "2+3"))
