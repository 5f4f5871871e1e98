"""A mixer written in PADRe's form: a sum of chains (PADRe, Eq. 1-7), over another sum if it is rational."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polymix.errors import ShapeError
from polymix.mixers.mixer import Polynomial, TokenMixer

F64 = torch.float64
Maps = Sequence[Tensor | None]


@dataclass(frozen=True)
class Chain:
    """One chain of PADRe, whose output is gain · Z_d.

        Y_i = A_i (X B_i + b_i) + c_i,   Z_1 = Y_1,   Z_{i+1} = (C_i Z_i D_i) ⊙ Y_{i+1}

    Missing and None entries are identities (A, C, D) or zero (b, c).

    Args:
        B: d channel maps (D, E). b: their biases.
        A: d token maps, (N, N) or (E, N, N). c: biases after them.
        C: d - 1 token maps. D: d - 1 channel maps (E, E).
        gain: factor of the output.
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

    def named_matrices(self, n: int) -> dict[str, Any]:
        """The chain's matrices for n tokens, by the letters of PADRe's Eq. 1-6."""
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
        def entry(maps: Maps, i: int) -> Tensor | None:
            return maps[i] if i < len(maps) else None

        z = x
        for i in range(self.degree):
            y = _plus(_mix_tokens(entry(self.A, i), _plus(x @ self.B[i], entry(self.b, i))), entry(self.c, i))
            if i:
                D = entry(self.D, i - 1)
                z = _mix_tokens(entry(self.C, i - 1), z if D is None else z @ D) * y
            else:
                z = y
        return self.gain * z


def _mix_tokens(matrix: Tensor | None, x: Tensor) -> Tensor:
    """A X for A (N, N), or for (E, N, N) with a matrix per channel; X for None."""
    if matrix is None:
        return x
    return torch.einsum("mn,bnd->bmd" if matrix.ndim == 2 else "dmn,bnd->bmd", matrix, x)


def _plus(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias


def shift(dim: int, heads: int, r: int) -> Tensor:
    """P with (X P)_c = X_{c + r}, where the channels of each head wrap around."""
    d = dim // heads
    target = torch.arange(dim)
    source = target // d * d + (target % d + r) % d
    return torch.zeros(dim, dim, dtype=F64).index_put((source, target), torch.ones(dim, dtype=F64))


def _same(x: Tensor) -> Tensor:
    return x


@dataclass(eq=False)
class PadreForm(nn.Module):
    """O = U [Σ chains / (Σ below + constant)] V + bias in float64: a mixer's function, or an approximation of it.

    Attributes:
        chains: the numerator.
        below: chains of the denominator; None for a polynomial. constant: added to them.
        U: token map (N, N) or (E, N, N) after the quotient.
        V: channel map after it (PADRe, Eq. 7). bias: of the output.
        heads: number of different denominators, whose quotients V adds.
        of: which function this is a form of, in words. exact: whether it equals that function.
        target: that function. inputs: brings the mixer's input to the target's.
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
    inputs: Callable[[Tensor], Tensor] = field(default=_same)

    def __post_init__(self) -> None:
        super().__init__()  # after the fields, so that none of them is registered as a parameter or module

    def forward(self, x: Tensor) -> Tensor:
        dim, n = self.chains[0].B[0].shape[0], self.tokens
        if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[-1] != dim or (n and x.shape[1] != n):
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ShapeError("x", got, f"(B, {n or 'N'}, {dim})", "A form is for one number of tokens.")
        x = x.to(torch.float64)
        y = torch.stack([chain(x) for chain in self.chains]).sum(0)
        if self.below is not None:
            parts = [chain(x) for chain in self.below]
            y = y / (torch.stack(parts).sum(0) + self.constant if parts else self.constant)
        y = _mix_tokens(self.U, y)
        y = y if self.V is None else y @ self.V
        return _plus(y, self.bias)

    @property
    def tokens(self) -> int | None:
        """The number of tokens that the matrices are for; None if all are identities."""
        maps = [m for chain in self.chains for m in (*chain.A, *chain.C) if m is not None]
        return maps[0].shape[-1] if maps else None

    @property
    def degree(self) -> int:
        """The degree of the numerator."""
        return max(chain.degree for chain in self.chains)

    @property
    def polynomial(self) -> Polynomial:
        """What the form is as a function of its input."""
        if self.below:
            below = max(chain.degree for chain in self.below)
            return Polynomial(rational=(self.degree + below * (self.heads - 1), below * self.heads))
        degrees = {chain.degree for chain in self.chains}
        plain = self.bias is None and all(m is None for chain in self.chains for m in (*chain.b, *chain.c))
        return Polynomial(self.degree, homogeneous=plain and len(degrees) == 1)

    def error(self, x: Tensor) -> float:
        """The root mean square error against `target` at a mixer's input x, relative to the target."""
        assert self.target is not None
        u = self.inputs(x.to(torch.float64))
        with torch.no_grad():
            want = self.target(u)
            return ((self(u) - want).square().mean() / want.square().mean()).sqrt().item()


class FormArguments(NamedTuple):
    """The arguments of `as_padre` that only some mixers take."""

    x: Tensor | None = None
    order: int | None = None
    decay: str = "exact"


# A function of the mixer in float64, its matrices for n tokens, n, and the arguments.
Form = Callable[[Any, dict[str, Any], int, FormArguments], PadreForm]
FORMS: dict[type[TokenMixer], tuple[Form, tuple[str, ...]]] = {}


def register_form(mixer: type[TokenMixer], *takes: str) -> Callable[[Form], Form]:
    """Function decorator: `as_padre` writes mixers of this class with it.

    `takes` names the arguments of `FormArguments` that the function uses; as_padre rejects the others.
    """

    def add(form: Form) -> Form:
        FORMS[mixer] = form, takes
        return form

    return add
