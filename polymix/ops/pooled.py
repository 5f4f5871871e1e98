"""The pooled products of Poly-NL and Poly-SA: one vector a sequence (and head) that every token multiplies."""

from __future__ import annotations

from torch import Tensor

from polymix.ops.common import accumulator, sigma


def mean_over_tokens(x: Tensor, mask: Tensor | None) -> Tensor:
    """Ψ, not yet spread back: the mean of x (B, N, …) over the real tokens, (B, 1, …); zero where there is none."""
    dtype = accumulator(x.dtype)
    if mask is None:
        return x.mean(1, keepdim=True, dtype=dtype)
    weight = mask.reshape(*mask.shape, *(1,) * (x.ndim - 2))
    count = weight.sum(1, keepdim=True).clamp_min(1)
    return x.masked_fill(~weight, 0.0).sum(1, keepdim=True, dtype=dtype) / count


def poly_sa(
    q: Tensor, k: Tensor, v: Tensor, p_1: Tensor | None, p_2: Tensor | None, *, kind: str, mask: Tensor | None = None
) -> Tensor:
    """Y = Q ⊙ p₁ σ(p₂ᵀ(K ⊙ V)) a head; without p₁ and p₂ Y = Q ⊙ σ(mean(K ⊙ V)).

    q, k, v (B, N, h, d); p_1, p_2 (h, N); mask (B, N), only without positions. Cost O(N h d), no product at all.
    """
    if p_2 is None:
        pooled = mean_over_tokens(k * v, mask)
    else:
        weighted = k * v * p_2.t()[..., None].to(v.dtype)
        pooled = weighted.sum(1, keepdim=True, dtype=accumulator(v.dtype))
    gate = sigma(pooled, kind).to(q.dtype)  # (B, 1, h, d)
    if mask is not None:  # a row of padding alone pools nothing: softmax of zeros would still answer 1/d
        gate = gate.masked_fill(~mask.any(1)[:, None, None, None], 0.0)
    y = q * gate
    return y if p_1 is None else y * p_1.t()[..., None].to(q.dtype)
