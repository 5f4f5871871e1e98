"""PADRe, Eq. 1-7 and 11-20, written for reading next to the paper. Used by tests only.

The matrices have the paper's letters and come from a mixer's `matrices()`. Tokens are rows: x is (B, N, D), and a
channel map multiplies from the right, X B. A token map is (N, N), or (D, N, N) with one matrix per channel. A missing
bias is None.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polymix.ops.shared.reference import mix_tokens, plus

NORM_EPS = 1e-6


def normalise(y: Tensor, kind: str | None, heads: int) -> Tensor:
    """Apply RMS or layer norm to each head's channels, without learned scales."""
    if kind is None:
        return y
    y = y.unflatten(-1, (heads, -1))
    if kind == "layer":
        y = y - y.mean(-1, keepdim=True)
    return (y / (y.square().mean(-1, keepdim=True) + NORM_EPS).sqrt()).flatten(-2)


def coefficients(basis: str, i: int) -> tuple[float, float]:
    """a_i and b_i in T_{i+1} = a_i y T_i - b_i T_{i-1}."""
    return {"monomial": (1, 0), "chebyshev": (2, 1), "legendre": ((2 * i + 1) / (i + 1), i / (i + 1)),
            "hermite": (1, i)}[basis]  # fmt: skip


def padre(
    x: Tensor,
    A: Sequence[Tensor], B: Sequence[Tensor], C: Sequence[Tensor], D: Sequence[Tensor],
    b_A: Sequence[Tensor | None], b_B: Sequence[Tensor | None],
    b_C: Sequence[Tensor | None], b_D: Sequence[Tensor | None],
    W: Sequence[Tensor], L: Tensor | None, U: Tensor | None = None, V: Tensor | None = None,
    Q: Sequence[Tensor] = (), S: Tensor | None = None,
    *, normalize: str | None = None, heads: int = 1, basis: str = "monomial", eps: float = 1e-3,
    pattern: str | None = None, contexts: Sequence[Tensor] = (), degrees: bool = False,
) -> Tensor | list[Tensor]:  # fmt: skip
    """PADRe, Eq. 1-7; with contexts, Eq. 11-14; with a denominator, Eq. 15-20.

    With `degrees`, returns the list Z_1 … Z_d instead of the output.
    """
    d = len(W)
    inputs = dict(zip("abcdefghijklmnop", (x, *contexts), strict=False))
    letters = pattern or "a" * len(A)
    Y = [
        normalise(plus(mix_tokens(A[i], plus(inputs[letters[i]] @ B[i], b_B[i])), b_A[i]), normalize, heads)
        for i in range(len(A))
    ]  # Eq. 1, 15

    def chain(first: int, count: int, at: int) -> list[Tensor]:
        """Z_1 … Z_count from the Y starting at index `first` and the C and D starting at index `at`."""
        Z = [torch.ones_like(Y[0]), Y[first]]
        for i in range(1, count):  # Eq. 2, 3
            j = at + i - 1
            a, b = coefficients(basis, i)
            mixed = plus(mix_tokens(C[j], plus(Z[i] @ D[j], b_D[j])), b_C[j])
            Z.append(a * mixed * Y[first + i] - b * Z[i - 1])
        return Z[1:]

    Z = chain(0, d, 0)
    if degrees:
        return Z
    P = torch.stack([W[i] * Z[i] for i in range(d)]).sum(0)  # Eq. 6
    P = plus(P, L)
    if S is not None:  # Eq. 18-20
        denominator = chain(d, len(Q), d - 1)
        R = torch.stack([Q[k] * denominator[k] for k in range(len(Q))]).sum(0) + S
        P = P / (R**2 + eps if eps else R)
    if U is not None:  # Eq. 7
        P = mix_tokens(U, P)
    return P if V is None else P @ V
