"""QT's compact form with its linear maps: what a context pools to, and what a query's tokens make of it.

As operators they hold neither queries, keys and values nor their features, and compute them again in the backward.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.ops.common import accumulator
from polymix.ops.library import Operator
from polymix.ops.linear_attention import hide


def _features(x: Tensor, order: int) -> Tensor:
    """[1, x, x ⊙ x] cut after `order`, without coefficients: (…, d) -> (…, 1 + order · d)."""
    return torch.cat([torch.ones_like(x[..., :1]), x, x * x][: order + 1], dim=-1)


def coefficients(scale: Tensor, d: int, order: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What the sums of each feature are multiplied with, for `scale` (α, β, γ) as (3, heads, 1, 1): (heads, F, 1)."""
    alpha, beta, gamma = scale.to(dtype).square().unbind()
    parts = [gamma, ((4 / d) ** 0.5 * beta).expand(-1, d, -1), alpha.expand(-1, d, -1)]
    return torch.cat(parts[: order + 1], dim=1)


def _pool(x: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor | None, heads: int, order: int) -> Tensor:
    """Σ_n [1, k_n, k_n ⊙ k_n] ⊗ [v_n, 1], (B, heads, 1 + order · d, d + 1) in float32 at least."""
    parts = F.linear(x, weight, bias).to(accumulator(x.dtype)).unflatten(-1, (2, heads, -1))
    k, v = (hide(part.transpose(1, 2), mask) for part in parts.unbind(2))
    return _features(k, order).transpose(-1, -2) @ hide(F.pad(v, (0, 1), value=1.0), mask)


def _spread(
    x: Tensor, weight: Tensor, bias: Tensor | None, moments: Tensor, least: Tensor, last: Tensor,
    last_bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """y_n = W_o (numerators / denominators) + b_o, both [1, q_n, q_n ⊙ q_n] · moments a head, (B, M, D')."""
    heads, features, d = *moments.shape[1:3], moments.shape[3] - 1
    q = F.linear(x, weight, bias).unflatten(-1, (heads, d)).transpose(1, 2).to(moments.dtype)
    weighted = _features(q, (features - 1) // d) @ moments
    y = weighted[..., :-1] / torch.maximum(weighted[..., -1:], least.view(-1, 1, 1, 1).to(moments.dtype))
    return F.linear(y.transpose(1, 2).flatten(2).to(x.dtype), last, last_bias)


# x (B, N, D); weight (2D, D): W_k, then W_v, for a spread (D, D): W_q; bias as long; mask (B, N); moments as `qt_pool`
# has them, with their coefficients; least (B,), below which no denominator falls; last (D', D); last_bias (D').
qt_pool = Operator(
    "qt_pool", "(Tensor x, Tensor weight, Tensor? bias, Tensor? mask, int heads, int order) -> Tensor", _pool,
    "qt_linear.pool", (0, 1, 2),
)  # fmt: skip
qt_spread = Operator(
    "qt_spread", "(Tensor x, Tensor weight, Tensor? bias, Tensor moments, Tensor least, Tensor last, "
    "Tensor? last_bias) -> Tensor", _spread, "qt_linear.spread", (0, 1, 2, 3, 5, 6),
)  # fmt: skip
