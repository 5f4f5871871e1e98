"""Three-term recurrences of the polynomial bases that a PADRe chain may be built in."""

from __future__ import annotations

import math
from collections.abc import Callable

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
