"""PADRe's recursion: the weighted sum of Z_1 … Z_d from Y_1 … Y_d, in any of the bases."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor

from polymix.ops.bases import BASES
from polymix.ops.reference import NORM_EPS


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
