"""A function written as PADRe: a sum of chains of Eq. 1-7, over another sum where it is rational."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from polymix.errors import ShapeError
from polymix.mixers.mixer import Polynomial
from polymix.ops.padre import reference
from polymix.ops.shared import reference as maps

Maps = Sequence[Tensor | None]


@dataclass(frozen=True)
class Chain:
    """One chain of PADRe, of which only the last Z counts: gain · Z_d.

        Y_i = A_i (X B_i + b_i) + c_i,   Z_1 = Y_1,   Z_{i+1} = (C_i Z_i D_i) ⊙ Y_{i+1}

    B: d matrices (D, E); b, c: their biases before and after the token map. A: token maps, (N, N) or (E, N, N), C:
    d - 1 of them, D: d - 1 channel maps (E, E); None is the identity.
    """

    B: Sequence[Tensor]
    b: Maps = ()
    A: Maps = ()
    C: Maps = ()
    c: Maps = ()
    D: Maps = ()
    gain: float = 1.0

    @property
    def degree(self) -> int:
        return len(self.B)

    def letters(self, n: int) -> dict[str, Any]:
        """The letters that Eq. 1-6 are written in, for n tokens."""
        d, like = self.degree, self.B[0]
        width = self.B[0].shape[1]
        eye, narrow = (torch.eye(size, dtype=like.dtype) for size in (n, width))
        zero, ones = like.new_zeros(n, width), like.new_ones(n, width)

        def filled(maps: Maps, count: int, default: Tensor | None) -> list[Tensor | None]:
            return [default if m is None else m for m in (*maps, *(None,) * (count - len(maps)))]

        none = [None] * (d - 1)
        return {
            "A": filled(self.A, d, eye), "B": list(self.B), "C": filled(self.C, d - 1, eye),
            "D": filled(self.D, d - 1, narrow),
            "b_A": filled(self.c, d, None), "b_B": filled(self.b, d, None), "b_C": none, "b_D": none,
            "W": [zero] * (d - 1) + [self.gain * ones], "L": None,
        }  # fmt: skip

    def __call__(self, x: Tensor) -> Tensor:
        out = reference.padre(x, **self.letters(x.shape[1]))
        assert isinstance(out, Tensor)
        return out


def _whole(x: Tensor) -> Tensor:
    return x


@dataclass(eq=False)
class PadreForm(nn.Module):
    """O = U [Σ chains / (Σ below + constant)] V + bias, in float64: a mixer's own function, or its approximation.

    chains: the numerator. below: the denominator's chains, None for a polynomial. U: a token map (N, N) or (E, N, N)
    after the quotient, V: a channel map (Eq. 7), which adds quotients of `heads` different denominators. `of` says of
    which function it is a form; `inputs` brings a mixer's input to that function's, `target` is the function itself.
    """

    chains: Sequence[Chain]
    V: Tensor | None = None
    bias: Tensor | None = None
    U: Tensor | None = None
    below: Sequence[Chain] | None = None
    constant: float = 0.0
    heads: int = 1
    of: str = "the mixer"
    exact: bool = True
    target: Callable[[Tensor], Tensor] | None = None
    inputs: Callable[[Tensor], Tensor] = field(default=_whole)

    def __post_init__(self) -> None:
        super().__init__()  # after the fields: none of them is a parameter or a module

    def forward(self, x: Tensor) -> Tensor:
        dim, n = self.chains[0].B[0].shape[0], self.tokens
        if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[-1] != dim or (n and x.shape[1] != n):
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ShapeError("x", got, f"(B, {n or 'N'}, {dim})", "A form is of one number of tokens.")
        x = x.to(torch.float64)
        y = torch.stack([chain(x) for chain in self.chains]).sum(0)
        if self.below is not None:
            parts = [chain(x) for chain in self.below]
            y = y / (torch.stack(parts).sum(0) + self.constant if parts else self.constant)
        y = y if self.U is None else maps.mix_tokens(self.U, y)
        y = y if self.V is None else y @ self.V
        return maps.plus(y, self.bias)

    @property
    def tokens(self) -> int | None:
        """The number of tokens that its matrices are for; None where all are identities."""
        maps = [m for chain in self.chains for m in (*chain.A, *chain.C) if m is not None]
        return maps[0].shape[-1] if maps else None

    @property
    def degree(self) -> int:
        """Of the numerator."""
        return max(chain.degree for chain in self.chains)

    @property
    def polynomial(self) -> Polynomial:
        """What the form declares to be."""
        if self.below:
            below = max(chain.degree for chain in self.below)
            return Polynomial(rational=(self.degree + below * (self.heads - 1), below * self.heads))
        degrees = {chain.degree for chain in self.chains}
        plain = self.bias is None and all(m is None for chain in self.chains for m in (*chain.b, *chain.c))
        return Polynomial(self.degree, homogeneous=plain and len(degrees) == 1)

    def error(self, x: Tensor) -> float:
        """Root mean square of the difference to the true function at a mixer's input x, over the function's own."""
        assert self.target is not None
        u = self.inputs(x.to(torch.float64))
        with torch.no_grad():
            want = self.target(u)
            return ((self(u) - want).square().mean() / want.square().mean()).sqrt().item()
