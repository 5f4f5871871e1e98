"""A linear map whose outputs are gated by a pooled vector and projected back: the output stage of PoM and Poly-SA."""

from __future__ import annotations

from torch import Tensor

from polymix.ops.gated import eager
from polymix.ops.native.arrays import KINDS
from polymix.ops.operator import Operator
from polymix.ops.shared.signature import Signature
from polymix.ops.shared.tensors import Linear

linear_gated = Operator(
    "linear_gated",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor gate, Tensor? p, Tensor? last, Tensor? last_bias, str activation)"
    " -> Tensor",
    eager.gated, (0, 1, 2, 3, 4, 5, 6),
    Signature("x: B, N, D; weight: E, D; bias: E; gate: B, E; p: H, N; last: F, E; last_bias: F",
              "=: B, N, E if last is None else F", "p is None or E % H == 0", f"activation in {KINDS}"),
    sums=(3,), native="polymix.ops.gated.native:gated",
)  # fmt: skip


def gated(
    x: Tensor, inner: Linear, gate: Tensor, outer: Linear | None, activation: str, *, p: Tensor | None = None,
    impl: str = "eager",
) -> Tensor:  # fmt: skip
    """Apply a linear map, gate its outputs with one vector per sample, and project back.

        y_n = (act(x_n Wᵀ + b) ⊙ gate ⊙ p_n) W_oᵀ + b_o

    The kernel does not store the outputs of the inner map; the backward computes them again.

    Args:
        x: (B, N, D).
        inner: W (E, D) and b (E) or None.
        gate: (B, E), one row per sample.
        outer: W_o (D', E) and b_o (D') or None; None for no projection.
        activation: a name in `polymix.ops.shared.activations.FUNCTIONS`.
        p: (heads, N), one factor per token and head, where a head is E / heads channels; None for ones.
        impl: "eager" or "native".
    Returns:
        (B, N, D') in the dtype of x. Cost: N E (D + D') multiply-adds.
    """
    return linear_gated(x, *inner, gate, p, *(outer or (None, None)), activation, impl=impl)
