"""Quadratic-Taylor attention in plain PyTorch: softmax's exp(s) becomes 1 + s + s²/2, so the keys are pooled once."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.ops.shared.causal_sums import causal_sums, chunk_size, first_tokens, hide, in_chunks
from polymix.ops.shared.symmetric import symmetric_power
from polymix.ops.shared.tensors import accumulator, without_autocast

GUARD = 1e-3  # the denominator is at least GUARD times the number of tokens seen


class QtState(NamedTuple):
    """The state of a recurrent QT, Σ_j φ(k_j) ⊗ [v_j, 1]. Its size does not depend on the number of tokens seen."""

    moments: Tensor  # (B, heads, F, d + 1), in float32 or wider
    count: Tensor  # type: ignore[assignment]  # (B,) the number of real tokens seen, int64

    def merge(self, later: QtState, carry: Tensor | None = None) -> QtState:
        """The state after both parts of a sequence; nothing is forgotten, so that `carry` is None."""
        return QtState(self.moments + later.moments, self.count + later.count)


def taylor_features(x: Tensor, form: str, order: int, scale: Tensor | None = None) -> Tensor:
    """Compute the features φ(x) with ⟨φ(q), φ(k)⟩ = similarity(q, k).

    full:     the similarity is 1 + s + s²/2 up to `order`, with s = q·k/√d. F is 1, 1 + d or 1 + d + d(d+1)/2,
              because each symmetric pair of channels occurs once.
    compact:  φ(x) = [γ, β (4/d)^¼ x_i, α x_i²] up to `order`. F is 1, 1 + d or 1 + 2d.

    Args:
        x: (…, d).
        form: "full" or "compact".
        order: 0, 1 or 2.
        scale: (α, β, γ) of the compact form, (3, heads, 1, 1).
    Returns:
        (…, F).
    """
    d = x.shape[-1]
    one = torch.ones_like(x[..., :1])
    if form == "compact":
        assert scale is not None
        weights = factors(scale, d, order, x.dtype)  # (heads, F, 1)
        return torch.cat([one, x, x * x][: order + 1], dim=-1) * weights.view(
            -1, *(1,) * (x.ndim - 3), weights.shape[1]
        )
    x = x * d**-0.25
    parts = [one, x]
    if order == 2:
        parts.append(symmetric_power(x * 0.5**0.25, 2))  # x_i²/√2 once, x_i x_j for i < j
    return torch.cat(parts[: order + 1], dim=-1)


def _similarity(q: Tensor, k: Tensor, order: int) -> Tensor:
    """⟨φ(q), φ(k)⟩ of every pair in the full form, computed without features."""
    s = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    return (torch.ones_like(s), 1 + s, 1 + s + s * s / 2)[order]


def feature_size(d: int, form: str, order: int) -> int:
    """F, the number of features of a head of d channels."""
    quadratic = d if form == "compact" else d * (d + 1) // 2
    return (1, 1 + d, 1 + d + quadratic)[order]


def quotient(weighted: Tensor, least: Tensor) -> Tensor:
    """Divide sums of [v, 1], (…, d + 1), by their last entry, which counts as at least `least`: (…, d)."""
    return weighted[..., :-1] / torch.maximum(weighted[..., -1:], least)


def least(count: Tensor, dtype: torch.dtype) -> Tensor:
    """The lower bound of the denominators, for queries that see `count` tokens; positive even for none."""
    return GUARD * count.clamp_min(1).to(dtype)


# -- the compact form, computed power by power without storing all features


def _power_moments(k: Tensor, v: Tensor, mask: Tensor | None, order: int) -> Tensor:
    """Σ_n [1, k_n, k_n ⊙ k_n] ⊗ [v_n, 1] up to `order`: (B, h, N, d) -> (B, h, 1 + order · d, d + 1)."""
    keys, values = hide(k, mask), hide(v, mask)
    count = values.new_full((1,), k.shape[2]) if mask is None else mask.sum(1).to(values.dtype)
    count = count[:, None, None, None].expand(*k.shape[:2], 1, 1)
    parts = [torch.cat((values.sum(2, keepdim=True), count), -1)]
    for power in (keys, keys * keys)[:order]:
        parts.append(torch.cat((power.transpose(-1, -2) @ values, power.sum(2).unsqueeze(-1)), -1))
    return torch.cat(parts, dim=2)


def _power_query(q: Tensor, moments: Tensor) -> Tensor:
    """[1, q, q ⊙ q] · moments: (B, h, M, d) -> (B, h, M, d + 1)."""
    d = q.shape[-1]
    first, *rest = moments.split([1, d, d][: 1 + (moments.shape[2] - 1) // d], dim=2)
    total = first
    for power, moment in zip((q, q * q), rest, strict=False):
        total = total + power @ moment
    return total.expand(-1, -1, q.shape[2], -1)


def factors(scale: Tensor, d: int, order: int, dtype: torch.dtype, power: int = 1) -> Tensor:
    """The factors γ, β (4/d)^¼ and α of the compact features to a power, (heads, F, 1); scale is (3, heads, 1, 1)."""
    alpha, beta, gamma = (scale.to(dtype) ** power).unbind()
    parts = [gamma, ((4 / d) ** (power / 4) * beta).expand(-1, d, -1), alpha.expand(-1, d, -1)]
    return torch.cat(parts[: order + 1], dim=1)


def coefficients(scale: Tensor, d: int, order: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The factors of the products of compact features in the similarity, (heads, F, 1): those of φ, squared."""
    return factors(scale, d, order, dtype, power=2)


# -- definitions of the operators


def moments(k: Tensor, v: Tensor, scale: Tensor | None, mask: Tensor | None, form: str, order: int) -> Tensor:
    """Σ_n φ(k_n) ⊗ [v_n, 1]: (B, h, N, d) -> (B, h, F, d + 1), in float32 or wider."""
    dtype = accumulator(k.dtype)
    k, v = k.to(dtype), v.to(dtype)
    if form == "full":
        values = hide(F.pad(v, (0, 1), value=1.0), mask)
        return taylor_features(hide(k, mask), form, order).transpose(-1, -2) @ values
    assert scale is not None
    return factors(scale, k.shape[-1], order, dtype) * _power_moments(k, v, mask, order)


def query(q: Tensor, moments: Tensor, scale: Tensor | None, form: str, order: int) -> Tensor:
    """φ(q) · moments: (B, h, M, d) -> (B, h, M, d + 1), in float32 or wider."""
    q = q.to(moments.dtype)
    if form == "full":
        return taylor_features(q, form, order) @ moments
    assert scale is not None
    return _power_query(q, factors(scale, q.shape[-1], order, moments.dtype) * moments)


def pool(x: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor | None, heads: int, order: int) -> Tensor:
    """Σ_n [1, k_n, k_n ⊙ k_n] ⊗ [v_n, 1] of k, v = x Wᵀ + b: (B, heads, 1 + order · d, d + 1), float32 or wider."""
    parts = F.linear(x, weight, bias).to(accumulator(x.dtype)).unflatten(-1, (2, heads, -1))
    k, v = (part.transpose(1, 2) for part in parts.unbind(2))
    with without_autocast(x.device):
        return _power_moments(k, v, mask, order)


def spread(
    x: Tensor, weight: Tensor, bias: Tensor | None, moments: Tensor, least: Tensor, last: Tensor,
    last_bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """W_o (numerator / denominator) + b_o with both = [1, q, q ⊙ q] · moments and q = x Wᵀ + b: (B, M, D')."""
    heads, d = moments.shape[1], moments.shape[3] - 1
    q = F.linear(x, weight, bias).unflatten(-1, (heads, d)).transpose(1, 2).to(moments.dtype)
    with without_autocast(x.device):
        y = quotient(_power_query(q, moments), least.view(-1, 1, 1, 1).to(moments.dtype))
    return F.linear(y.transpose(1, 2).flatten(2).to(x.dtype), last, last_bias)


def causal(
    q: Tensor, k: Tensor, v: Tensor, scale: Tensor | None, start: Tensor | None, mask: Tensor | None, form: str,
    order: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """φ(q_n) (start + Σ_{j ≤ n} φ(k_j) ⊗ [v_j, 1]), (B, h, N, d + 1), and the moments after the last token."""
    dtype, n = accumulator(q.dtype), q.shape[2]
    size = chunk_size(n)
    keys, values = hide(k.to(dtype), mask), hide(F.pad(v.to(dtype), (0, 1), value=1.0), mask)
    # The padding of the last chunk has the value [0, 0], so it adds nothing.
    queries, keys, values = (in_chunks(part, size) for part in (q.to(dtype), keys, values))
    query_features, key_features = (taylor_features(part, form, order, scale) for part in (queries, keys))
    similarity = _similarity(queries, keys, order) if form == "full" else None
    weighted, end = causal_sums(query_features, key_features, values, start, similarity)
    return first_tokens(weighted, n).contiguous(), end
