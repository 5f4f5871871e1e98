"""The pooled products of Poly-NL and Poly-SA: one vector a sequence (and head) that every token multiplies."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from polymix.ops.common import accumulator, sigma
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
    count = x.shape[1] if mask is None else mask.sum(1).clamp_min(1)[:, None, None]
    x, times = x.unsqueeze(2), None if times is None else times.unsqueeze(2)
    return pooled_product(x, times, None, mask, impl=impl) / count


def mean_of_products(x: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor | None) -> Tensor:
    """mean(X W_1 ⊙ X W_2) by the tokens' second moment S about their mean μ: w_1ᵀ S w_2 + (w_1ᵀμ + b_1)(w_2ᵀμ + b_2).

    x (B, N, D); weight (2E, D) and bias (2E) as nn.Linear's, W_1 then W_2; mask (B, N). Returns (B, 1, E). Cost:
    N D² + D² E multiply-adds instead of 2 N D E. About zero, a large mean would swallow S.
    """
    count = x.shape[1] if mask is None else mask.sum(1).clamp_min(1)[:, None, None]
    hidden = None if mask is None else ~mask.unsqueeze(-1)
    centre = (x if hidden is None else x.masked_fill(hidden, 0.0)).sum(1, keepdim=True) / count
    apart = x - centre if hidden is None else (x - centre).masked_fill(hidden, 0.0)
    w_1, w_2 = weight.chunk(2)
    about = (w_1 @ (apart.mT @ apart) * w_2).sum(-1).unsqueeze(1) / count
    first, second = F.linear(centre, weight, bias).chunk(2, dim=-1)
    product = first * second
    return about + (product if mask is None else product.masked_fill(~mask.any(1)[:, None, None], 0.0))


def poly_sa_gate(
    k: Tensor, v: Tensor, p_2: Tensor | None, *, kind: str, mask: Tensor | None = None, impl: str = "eager"
) -> Tensor:
    """σ(p₂ᵀ(K ⊙ V)) a head, or σ(mean(K ⊙ V)) without p₂: what Poly-SA multiplies every query with, (B, h, d).

    k, v (B, N, h, d); p_2 (h, N); mask (B, N), only without positions. Cost O(N h d), no product at all.
    """
    pooled = pooled_product(k, v, p_2, mask, impl=impl)
    if p_2 is None:
        pooled = pooled / (k.shape[1] if mask is None else mask.sum(1).clamp_min(1)[:, None, None])
    gate = sigma(pooled, kind)
    if mask is not None:  # a row of padding alone pools nothing: softmax of zeros would still answer 1/d
        gate = gate.masked_fill(~mask.any(1)[:, None, None], 0.0)
    return gate
