"""A linear map whose outputs are gated by what was pooled, then mapped back: how PoM and Poly-SA end."""

from __future__ import annotations

from torch import Tensor

from polymix.ops.dispatch import Operator
from polymix.ops.gated import eager
from polymix.ops.shared.tensors import Linear

linear_gated = Operator(
    "linear_gated",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor gate, Tensor? p, Tensor? last, Tensor? last_bias, str activation)"
    " -> Tensor",
    eager.gated, (0, 1, 2, 3, 4, 5, 6), native="polymix.ops.gated.native:gated",
)  # fmt: skip


def gated(
    x: Tensor, inner: Linear, gate: Tensor, outer: Linear | None, activation: str, *, p: Tensor | None = None,
    impl: str = "eager",
) -> Tensor:  # fmt: skip
    """y_n = (act(x_n Wᵀ + b) ⊙ gate ⊙ p_n) W_oᵀ + b_o.

    Args:
        x: (B, N, D). inner: W (E, D) and b. gate: (B, E), one row a sample. outer: W_o (D', E) and b_o; None: no map.
        p: (heads, N), a number for each token and each head's share of the E channels; None is ones.
    Returns:
        (B, N, D') in the type of x. The kernel never holds the inner map's outputs, and computes them again in the
        backward. Cost: N E (D + D') multiply-adds.
    """
    return linear_gated(x, *inner, gate, p, *(outer or (None, None)), activation, impl=impl)
