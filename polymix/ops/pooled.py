"""The pooled products of Poly-NL and Poly-SA: one vector a sequence (and head) that every token multiplies."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.ops.common import accumulator, autocast_dtype, count_real, sigma, without_empty
from polymix.ops.library import Operator


def _pool(k: Tensor, v: Tensor | None, p_2: Tensor | None, mask: Tensor | None) -> Tensor:
    """Σ_n p_2[n] k_n ⊙ v_n over the real tokens: k, v (B, N, h, d), p_2 (h, N), mask (B, N) -> (B, h, d)."""
    x = k if v is None else k * v
    if p_2 is not None:
        x = x * p_2.t()[..., None].to(x.dtype)
    if mask is not None:
        x = x.masked_fill(~mask[:, :, None, None], 0.0)
    return x.sum(1, dtype=accumulator(x.dtype))


def _spread(q: Tensor, gate: Tensor, p_1: Tensor | None) -> Tensor:
    """q ⊙ gate ⊙ p_1[n]: q (B, N, h, d), gate (B, h, d), p_1 (h, N)."""
    y = q * gate[:, None].to(q.dtype)
    return y if p_1 is None else y * p_1.t()[..., None].to(q.dtype)


pooled_product = Operator(
    "pooled_product", "(Tensor k, Tensor? v, Tensor? p_2, Tensor? mask) -> Tensor", _pool, "pooled.pool", (0, 1, 2)
)
pooled_spread = Operator(
    "pooled_spread", "(Tensor q, Tensor gate, Tensor? p_1) -> Tensor", _spread, "pooled.spread", (0, 1, 2)
)


def mean_over_tokens(x: Tensor, mask: Tensor | None, times: Tensor | None = None, *, impl: str = "eager") -> Tensor:
    """Ψ, not yet spread back: the mean of x ⊙ times (B, N, D) over the real tokens, (B, 1, D); zero if none is real."""
    count = count_real(x, mask, ndim=3)
    x, times = x.unsqueeze(2), None if times is None else times.unsqueeze(2)
    return pooled_product(x, times, None, mask, impl=impl) / count


def moments_pay(x: Tensor, width: int, dtype: torch.dtype) -> bool:
    """Whether `mean_of_products` is the shorter way for the tokens of x (B, N, …) where they have this width and type.

    And exact enough: not in half-wide types.
    """
    if torch.compiler.is_compiling() or autocast_dtype(x.device):  # a graph should not depend on the length
        return False
    return dtype == accumulator(dtype) and x.shape[1] >= 2 * width


def _moments(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The mean μ of the real tokens of x (B, N, D), (B, D), and Σ (x_n - μ)(x_n - μ)ᵀ over them, (B, D, D)."""
    hidden = None if mask is None else ~mask.unsqueeze(-1)
    centre = (x if hidden is None else x.masked_fill(hidden, 0.0)).sum(1) / count_real(x, mask)
    apart = x - centre.unsqueeze(1)
    apart = apart if hidden is None else apart.masked_fill(hidden, 0.0)
    return centre, apart.mT @ apart


moments = Operator("moments", "(Tensor x, Tensor? mask) -> (Tensor, Tensor)", _moments, "poly_nl.moments", (0,))


def mean_of_products(
    x: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor | None, *, impl: str = "eager"
) -> Tensor:
    """mean(X W_1 ⊙ X W_2) by the tokens' second moment S about their mean μ: w_1ᵀ S w_2 + (w_1ᵀμ + b_1)(w_2ᵀμ + b_2).

    x (B, N, D); weight (2E, D) and bias (2E) as nn.Linear's, W_1 then W_2; mask (B, N). Returns (B, 1, E). Cost:
    N D² + D² E multiply-adds instead of 2 N D E. About zero, a large mean would swallow S.
    """
    centre, moment = moments(x, mask, impl=impl)
    return mean_from_moments(centre, moment, count_real(x, mask), weight, bias, mask).unsqueeze(1)


def mean_from_moments(
    centre: Tensor, moment: Tensor, count: Tensor | int, weight: Tensor, bias: Tensor | None, mask: Tensor | None
) -> Tensor:
    """The formula of `mean_of_products`, (B, E), from μ (B, D), Σ (x_n - μ)(x_n - μ)ᵀ (B, D, D) and `count_real`."""
    w_1, w_2 = weight.chunk(2)
    about = (w_1 @ moment * w_2).sum(-1) / count
    first, second = F.linear(centre, weight, bias).chunk(2, dim=-1)
    return about + without_empty(first * second, mask)  # the biases alone are no mean of anything


def poly_sa_gate(
    k: Tensor, v: Tensor, p_2: Tensor | None, *, kind: str, mask: Tensor | None = None, impl: str = "eager"
) -> Tensor:
    """σ(p₂ᵀ(K ⊙ V)) a head, or σ(mean(K ⊙ V)) without p₂: what Poly-SA multiplies every query with, (B, h, d).

    k, v (B, N, h, d); p_2 (h, N); mask (B, N), only without positions. Cost O(N h d), no product at all.
    """
    pooled = pooled_product(k, v, p_2, mask, impl=impl)
    return gate_of_sum(k, pooled, p_2, kind, mask)


def gate_of_sum(x: Tensor, pooled: Tensor, p_2: Tensor | None, kind: str, mask: Tensor | None) -> Tensor:
    """What `poly_sa_gate` makes of `pooled` (B, h, d), the sum over the tokens of x (B, N, …) with p_2 or without."""
    if p_2 is None:
        pooled = pooled / count_real(x, mask, ndim=3)
    return without_empty(sigma(pooled, kind), mask)  # softmax of the zeros that padding alone pools would answer 1/d
