"""PADRe's recursion: the weighted sum of Z_1 … Z_d from Y_1 … Y_d, in any of the bases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from operator import add
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from polymix.ops.bases import BASES
from polymix.ops.depthwise import depthwise_conv
from polymix.ops.library import Operator
from polymix.ops.reference import NORM_EPS


def _step(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    y: Tensor | None,
    grid: Sequence[int],
    causal: bool,
    dilation: int,
) -> Tensor:
    """(depthwise(x) + bias) ⊙ y: x (B, N, D), or as many tokens more in front as a causal kernel reaches back."""
    z = depthwise_conv(x, weight, tuple(grid), causal=causal, dilation=dilation)
    z = z if bias is None else z + bias.to(z.dtype)
    return z if y is None else z * y


padre_step = Operator(
    "padre_step",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor? y, SymInt[] grid, bool causal, int dilation) -> Tensor",
    _step, "padre.step", (0, 1, 2, 3),
)  # fmt: skip


class Convolution(NamedTuple):
    """A depthwise map over the tokens: weight (D, 1, *kernel), bias (D) or None."""

    weight: Tensor
    bias: Tensor | None
    causal: bool
    dilation: int

    def before(self, x: Tensor) -> Tensor:
        """x (B, N, D) with the zeros in front that a causal kernel reaches back to."""
        return F.pad(x, (0, 0, (self.weight.shape[-1] - 1) * self.dilation, 0)) if self.causal else x


class Factor(NamedTuple):
    """The tokens under a channel map (weight as nn.Linear's, bias), then a token map; None where there is none."""

    channel: tuple[Tensor, Tensor | None] | None
    token: Convolution | None


Apply = Callable[[Factor, Tensor, Tensor | None], Tensor]


def monomials(
    x: Tensor, first: Factor, steps: Sequence[tuple[Factor | None, Factor]], apply: Apply
) -> Iterator[Tensor]:
    """Z_1 … Z_d of `factored`; apply(factor, u, z) is the factor of u, ⊙ z where that is given."""
    z = apply(first, x, None)
    yield z
    for left, right in steps:
        z = apply(right, x, z if left is None else apply(left, z, None))
        yield z


def factored(
    x: Tensor,
    first: Factor,
    steps: Sequence[tuple[Factor | None, Factor]],
    weights: Sequence[Tensor | float],
    grid: tuple[int, ...],
    *,
    impl: str,
) -> Tensor:
    """Σ_i W_i ⊙ Z_i with Z_1 = first(X) and Z_{i+1} = C_i(Z_i D_i) ⊙ A_{i+1}(X B_{i+1}), by `padre_step`.

    steps: (the map of Z_i, None where `first` holds it already; the map of X). weights: W_1 … W_d, or 0.0 where a
    degree does not enter the sum and 1.0 where it enters as it is. (B, N, D) -> (B, N, D).
    """

    def apply(factor: Factor, u: Tensor, times: Tensor | None) -> Tensor:
        u = u if factor.channel is None else F.linear(u, *factor.channel)
        token = factor.token
        if token is None:
            return u if times is None else u * times
        options = (list(grid), token.causal, token.dilation)
        return padre_step(token.before(u), token.weight, token.bias, times, *options, impl=impl)

    terms = (
        z if isinstance(w, float) else w * z
        for w, z in zip(weights, monomials(x, first, steps, apply), strict=True)
        if not (isinstance(w, float) and w == 0.0)
    )
    return reduce(add, terms)


def normalise(y: Tensor, kind: str | None, heads: int) -> Tensor:
    """RMS or layer norm of each head's channels of y (B, N, D), without learned scales; None leaves y alone."""
    if kind is None:
        return y
    norm = F.rms_norm if kind == "rms" else F.layer_norm
    split = y.unflatten(-1, (heads, -1))
    return norm(split, split.shape[-1:], eps=NORM_EPS).flatten(-2)


def chain(
    ys: Sequence[Tensor],
    mix: Callable[[int, Tensor], Tensor],
    *,
    terms: Sequence[int],
    weight: Tensor | None = None,
    basis: str = "monomial",
) -> Tensor:
    """Σ_{i in terms} W_i ⊙ Z_i with Z_1 = Y_1, Z_{i+1} = a_i mix_i(Z_i) ⊙ Y_{i+1} - b_i Z_{i-1}, Z_0 = 1 (Eq. 2, 3, 6).

    Args:
        ys: Y_1 … Y_d, (B, N, D) each.
        mix: (i, Z_i) -> C_i Z_i D_i, from i = 1.
        terms: the degrees that enter the sum, in order. weight: W of those, (terms, D) or (terms, N, D); None is ones.
    Returns:
        (B, N, D). Cost: d Hadamard products beside what `mix` costs.
    """
    total: Tensor | None = None
    before: Tensor | float = 1.0
    z = ys[0]
    for i, y in enumerate(ys, start=1):
        if i > 1:
            a, b = BASES[basis](i - 1)
            new = mix(i - 1, z) * y
            new = new if a == 1 else a * new
            z, before = (new if b == 0 else new - b * before), z
        if i in terms:
            term = z if weight is None else weight[terms.index(i)] * z
            total = term if total is None else total + term
    assert total is not None
    return total
