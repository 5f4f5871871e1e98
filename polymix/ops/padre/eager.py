"""PADRe in plain PyTorch: Y_i = A_i X B_i, Z_{i+1} = (C_i Z_i D_i) ⊙ Y_{i+1}, in any of the polynomial bases."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.ops.shared.depthwise import depthwise_conv
from polymix.ops.shared.prefix import PrefixMap
from polymix.ops.shared.tensors import Linear

NORM_EPS = 1e-6
# i -> (a_i, b_i) of Z_{i+1} = a_i (C_i Z_i D_i) ⊙ Y_{i+1} - b_i Z_{i-1}, with Z_0 = 1 and Z_1 = Y_1. If C_i and D_i
# are identities and all Y_i are equal, Z_i is the basis polynomial of degree i in Y. Hermite means the probabilists'
# polynomials, because He_1(y) = y as Z_1 = Y_1 requires (the physicists' H_1 is 2y).
BASES: dict[str, Callable[[int], tuple[float, float]]] = {
    "monomial": lambda i: (1.0, 0.0),
    "chebyshev": lambda i: (2.0, 1.0),
    "legendre": lambda i: ((2 * i + 1) / (i + 1), i / (i + 1)),
    "hermite": lambda i: (1.0, float(i)),
}
# The standard deviation of Y at initialisation: Chebyshev and Legendre polynomials are bounded on [-1, 1] only;
# Hermite polynomials are orthogonal under the unit normal distribution.
SPREAD = {"monomial": 1.0, "chebyshev": 0.5, "legendre": 0.5, "hermite": 1.0}


def size(basis: str, i: int) -> float:
    """The standard deviation of Z_i relative to Z_1 at initialisation.

    Under a unit normal, the Hermite polynomial of degree i has variance i!; the other bases stay near 1.
    """
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
    """Compute (depthwise(x) + bias) ⊙ y, the definition of the operator polymix::padre_step.

    Args:
        x: (B, N, D); if causal, with δ (k - 1) earlier tokens in front.
        weight: (D, 1, *kernel).
        bias: (D) or None.
        y: (B, N, D) or None for ones.
        grid: the sizes of the grid's axes, N = ∏ grid.
        causal: see `depthwise_conv`.
        dilation: δ.
    Returns:
        (B, N, D).
    """
    z = depthwise_conv(x, weight, tuple(grid), causal=causal, dilation=dilation)
    z = z if bias is None else z + bias.to(z.dtype)
    return z if y is None else z * y


class Convolution(NamedTuple):
    """A depthwise convolution over the tokens of a grid, which may have other tokens in front (class token, registers).

    weight: (D, 1, *kernel).
    bias: (D) or None, added to every token.
    causal, dilation: see `polymix.ops.shared.depthwise`.
    prefix: what happens to the P tokens in front of the grid; None if P = 0.
    mask: (B, P + N), True for real tokens; the others are read as zeros. None if all are real.
    """

    weight: Tensor
    bias: Tensor | None
    causal: bool
    dilation: int
    prefix: PrefixMap | None = None
    mask: Tensor | None = None

    @property
    def num_prefix_tokens(self) -> int:
        """P."""
        return 0 if self.prefix is None else len(self.prefix.own)

    def of_channels(self, group: slice) -> Convolution:
        """The same convolution of some channels."""
        prefix = None if self.prefix is None else PrefixMap(self.prefix.own[:, group], self.prefix.mean[:, group])
        bias = None if self.bias is None else self.bias[group]
        return self._replace(weight=self.weight[group], bias=bias, prefix=prefix)

    def hide(self, u: Tensor) -> Tensor:
        """u (B, P + N, D) with zeros for the tokens that are not real."""
        return u if self.mask is None else u.masked_fill(~self.mask.unsqueeze(-1), 0.0)

    def map_prefix(self, u: Tensor, shift: Tensor | None = None) -> Tensor:
        """The prefix tokens (B, P, D) of the result, for hidden u (B, P + N, D) plus shift (D)."""
        assert self.prefix is not None
        y = self.prefix(u, self.mask)
        y = y if shift is None else y + self.prefix.combine(shift, shift)
        return y if self.bias is None else y + self.bias.to(y.dtype)


Map = Callable[[Tensor], Tensor]


class PadreMaps(NamedTuple):
    """The linear maps of a PADRe layer; None is the identity.

    project: computes [X B_1, X B_2, …] from X; None if `shared` does.
    A, C: the token maps.
    D: the channel maps.
    shared: all B_i as one dense map (m D, D).
    unsupported: the reason why kernels cannot run these maps, such as "supports dense channel maps only", or None.
    """

    project: Callable[[Tensor], Sequence[Tensor]] | None
    A: Sequence[Convolution | Map | None]
    C: Sequence[Convolution | Map | None]
    D: Sequence[Linear | Map | None]
    shared: Linear | None = None
    unsupported: str | None = None


class PadreTerms(NamedTuple):
    """How the Z_i are built and summed: P = Σ_{i in terms} W_i ⊙ Z_i + L, divided by R² + ε with a denominator.

    degree: d, the highest degree.
    terms: the degrees in 1 … d that are summed, in order.
    weight: W_i of these terms, (terms, D) or (terms, N, D); None for ones.
    constant: L.
    Q, S: the denominator R = Σ_k Q_k ⊙ Z'_k + S, where Z' is a second chain on Y_{d+1} … Y_{d+e}; Q is (e, D) or
        (e, N, D).
    basis: "monomial", "chebyshev", "legendre" or "hermite".
    normalize: None, "rms" or "layer", applied to the channels of each head of Y_i.
    heads: the number of heads.
    eps: ε.
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
    """Apply RMS or layer norm to each head's channels of y (B, N, D), without learned scales; None returns y."""
    if kind is None:
        return y
    norm = F.rms_norm if kind == "rms" else F.layer_norm
    split = y.unflatten(-1, (heads, -1))
    return norm(split, split.shape[-1:], eps=NORM_EPS).flatten(-2)


def pad(part: Convolution, u: Tensor) -> Tensor:
    """Pad u (B, N, D) in front with the zeros that a causal kernel reaches back to."""
    return F.pad(u, (0, 0, (part.weight.shape[-1] - 1) * part.dilation, 0)) if part.causal else u


def apply(
    part: Convolution | Map | None, u: Tensor, times: Tensor | None, grid: tuple[int, ...], step: Callable[..., Tensor]
) -> Tensor:
    """Apply a token map to u, and multiply with `times` if given."""
    if isinstance(part, Convolution):
        u, p = part.hide(u), part.num_prefix_tokens
        if p:
            first = part.map_prefix(u)
            first = first if times is None else first * times[:, :p]
            u, times = u[:, p:], None if times is None else times[:, p:]
        y = step(pad(part, u), part.weight, part.bias, times, list(grid), part.causal, part.dilation)
        return torch.cat((first.to(y.dtype), y), dim=1) if p else y
    y = u if part is None else part(u)
    return y if times is None else y * times


def chain(
    us: Sequence[Tensor], maps: PadreMaps, first: int, terms: PadreTerms, degrees: Sequence[int], weight: Tensor | None,
    grid: tuple[int, ...], step: Callable[..., Tensor],
) -> Tensor:  # fmt: skip
    """Compute Σ_{i in degrees} W_i ⊙ Z_i for one chain of products.

        Z_0 = 1,  Z_1 = Y_1,  Z_{i+1} = a_i (C_i Z_i D_i) ⊙ Y_{i+1} - b_i Z_{i-1}

    Args:
        us: U_i = X B_i, (B, N, D) each; Y_i = A_i U_i.
        maps: A, C and D.
        first: the index in maps.A of the chain's first map: 0 for the numerator, d for the denominator. The chain's C
            and D start at index 0 or d - 1.
        terms: the basis, the normalisation and the heads.
        degrees: the degrees i that are summed.
        weight: W_i of these degrees; None for ones.
        grid: the sizes of the grid's axes.
        step: `step` of this module, or an operator with the same arguments.
    """
    total: Tensor | None = None
    z, offset = us[0], first - (first > 0)
    previous: Tensor | float = 1.0
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
        z, previous = (new if b == 0 else new - b * previous), z if i > 1 else 1.0
        if i in degrees:
            term = z if weight is None else weight[degrees.index(i)] * z
            total = term if total is None else total + term
    assert total is not None
    return total


def polynomial(
    x: Tensor, maps: PadreMaps, terms: PadreTerms, grid: tuple[int, ...], step: Callable[..., Tensor] = step
) -> Tensor:
    """Compute P, or with a denominator P / (R² + ε), or P / R at ε = 0 (PADRe, Eq. 1-6 and 15-20).

    `step` is the function of this module, or an operator with the same arguments. x and the result are (B, N, D).
    Cost: that of the maps, and 2 d - 1 passes over the tokens.
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
    return p / (r * r + terms.eps if terms.eps else r)
