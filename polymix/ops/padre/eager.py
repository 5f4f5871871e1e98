"""PADRe in plain PyTorch: the recursion Z_{i+1} = (C_i Z_i D_i) ⊙ Y_{i+1} from Y_i = A_i X B_i, in any of the bases."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.ops.shared.depthwise import depthwise_conv
from polymix.ops.shared.tensors import Linear

NORM_EPS = 1e-6
# Z_{i+1} = a_i (C_i Z_i D_i) ⊙ Y_{i+1} - b_i Z_{i-1} with Z_0 = 1, Z_1 = Y_1: with identities for C_i and D_i and one
# Y for all, Z_i is the basis' own polynomial of degree i in Y. Hermite's are the probabilists' (He_1 = y), the one
# family of the two that begins with Z_1 = Y_1.
BASES: dict[str, Callable[[int], tuple[float, float]]] = {
    "monomial": lambda i: (1.0, 0.0),
    "chebyshev": lambda i: (2.0, 1.0),
    "legendre": lambda i: ((2 * i + 1) / (i + 1), i / (i + 1)),
    "hermite": lambda i: (1.0, float(i)),
}
# How widely Y spreads at init: Chebyshev's and Legendre's polynomials are tame on [-1, 1] alone, Hermite's are
# orthogonal under a unit normal.
SPREAD = {"monomial": 1.0, "chebyshev": 0.5, "legendre": 0.5, "hermite": 1.0}


def size(basis: str, i: int) -> float:
    """How large Z_i comes out at init beside Z_1: Hermite's polynomial of degree i has the variance i! under a unit
    normal, the others stay near 1."""
    return math.sqrt(math.factorial(i)) if basis == "hermite" else 1.0


def step(
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


class Convolution(NamedTuple):
    """A depthwise map over the tokens: weight (D, 1, *kernel), bias (D) or None."""

    weight: Tensor
    bias: Tensor | None
    causal: bool
    dilation: int


Map = Callable[[Tensor], Tensor]


class PadreMaps(NamedTuple):
    """The linear maps of a PADRe; None is the identity.

    project: X -> [X B_1, X B_2, …], or None where `shared` does it. shared: the dense ones among B, (m D, D). A, C:
    over the tokens. D: over the channels. why_general: why some map is a function only, which kernels cannot take, or
    None.
    """

    project: Callable[[Tensor], Sequence[Tensor]] | None
    A: Sequence[Convolution | Map | None]
    C: Sequence[Convolution | Map | None]
    D: Sequence[Linear | Map | None]
    shared: Linear | None = None
    why_general: str | None = None

    def with_first(self, merged: Linear | None) -> PadreMaps:
        """With `merged`, from `merged_first`, for the shared maps; D_1 is part of it. As before where that is None."""
        return self if merged is None else self._replace(shared=merged, D=(None, *self.D[1:]))


class PadreTerms(NamedTuple):
    """How the Z_i are built and summed: P = Σ_{i in terms} W_i ⊙ Z_i + L, over R² + ε where there is a denominator.

    degree: d. terms: those of 1 … d that enter, in order. weight: W of those, (terms, D) or (terms, N, D); None is
    ones. constant: L. Q (e, D) or (e, N, D) and S: R = Σ_k Q_k ⊙ Z'_k + S, a second chain on Y_{d+1} … Y_{d+e}.
    """

    degree: int
    terms: Sequence[int]
    weight: Tensor | None = None
    constant: Tensor | None = None
    Q: Tensor | None = None
    S: Tensor | None = None
    basis: str = "monomial"
    normalize: str | None = None
    heads: int = 1
    eps: float = 1e-3


def normalise(y: Tensor, kind: str | None, heads: int) -> Tensor:
    """RMS or layer norm of each head's channels of y (B, N, D), without learned scales; None leaves y alone."""
    if kind is None:
        return y
    norm = F.rms_norm if kind == "rms" else F.layer_norm
    split = y.unflatten(-1, (heads, -1))
    return norm(split, split.shape[-1:], eps=NORM_EPS).flatten(-2)


def pad(part: Convolution, u: Tensor) -> Tensor:
    """u (B, N, D) with the zeros in front that a causal kernel reaches back to."""
    return F.pad(u, (0, 0, (part.weight.shape[-1] - 1) * part.dilation, 0)) if part.causal else u


def apply(
    part: Convolution | Map | None, u: Tensor, times: Tensor | None, grid: tuple[int, ...], step: Callable[..., Tensor]
) -> Tensor:
    """A token map of u, ⊙ times where that is given."""
    if isinstance(part, Convolution):
        u = pad(part, u) if part.causal else u
        return step(u, part.weight, part.bias, times, list(grid), part.causal, part.dilation)
    y = u if part is None else part(u)
    return y if times is None else y * times


def chain(
    us: Sequence[Tensor], maps: PadreMaps, first: int, terms: PadreTerms, wanted: Sequence[int], weight: Tensor | None,
    grid: tuple[int, ...], step: Callable[..., Tensor],
) -> Tensor:  # fmt: skip
    """Σ_{i in wanted} W_i ⊙ Z_i with Z_1 = Y_1, Z_{i+1} = a_i (C_i Z_i D_i) ⊙ Y_{i+1} - b_i Z_{i-1}, Z_0 = 1.

    us: U_i = X B_i, of which A_i makes Y_i, (B, N, D) each. first: the place in `maps` of their A; their C and D begin
    at first, less one for a second chain.
    """
    total: Tensor | None = None
    z, offset = us[0], first - (first > 0)
    before: Tensor | float = 1.0
    for i, u in enumerate(us, start=1):
        token, mixed = maps.A[first + i - 1], None
        if i > 1:
            channel = maps.D[offset + i - 2]
            if channel is not None:
                mixed = F.linear(z, *channel) if isinstance(channel, tuple) else channel(z)
            mixed = apply(maps.C[offset + i - 2], z if mixed is None else mixed, None, grid, step)
        if terms.normalize is None:
            new = apply(token, u, mixed, grid, step)
        else:
            new = normalise(apply(token, u, None, grid, step), terms.normalize, terms.heads)
            new = new if mixed is None else new * mixed
        a, b = (1.0, 0.0) if i == 1 else BASES[terms.basis](i - 1)
        new = new if a == 1 else a * new
        z, before = (new if b == 0 else new - b * before), z if i > 1 else 1.0
        if i in wanted:
            term = z if weight is None else weight[wanted.index(i)] * z
            total = term if total is None else total + term
    assert total is not None
    return total


def polynomial(
    x: Tensor, maps: PadreMaps, terms: PadreTerms, grid: tuple[int, ...], step: Callable[..., Tensor] = step
) -> Tensor:
    """P, or P / (R² + ε): Eq. 1-6 and 15-20. `step` is the function above, or an operator on the same arguments.

    x (B, N, D). Returns (B, N, D). Cost: that of the maps, and 2 d - 1 passes over the tokens.
    """
    if maps.project is not None:
        us = maps.project(x)
    else:
        assert maps.shared is not None
        us = F.linear(x, *maps.shared).chunk(len(maps.A), dim=-1)
    d = terms.degree
    p = chain(us[:d], maps, 0, terms, terms.terms, terms.weight, grid, step)
    p = p if terms.constant is None else p + terms.constant
    if terms.S is None:
        return p
    r = chain(us[d:], maps, d, terms, range(1, len(us) - d + 1), terms.Q, grid, step) + terms.S
    return p / (r * r + terms.eps)  # kept away from zero


def merged_first(maps: PadreMaps, terms: PadreTerms) -> Linear | None:
    """The shared map with B_1 D_1 in the place of B_1, where Z_1 = X B_1 is used for nothing but Z_1 D_1."""
    plain = terms.basis == "monomial" or terms.degree == 2
    alone = plain and terms.degree > 1 and 1 not in terms.terms and terms.normalize is None and terms.heads == 1
    if not alone or maps.shared is None or maps.A[0] is not None or not isinstance(maps.D[0], tuple):
        return None
    (weight, bias), (last, last_bias) = maps.shared, maps.D[0]
    dim = last.shape[1]
    merged = torch.cat((last @ weight[:dim], weight[dim:]))
    if bias is None:
        return merged, None
    return merged, torch.cat((F.linear(bias[:dim], last, last_bias), bias[dim:]))
