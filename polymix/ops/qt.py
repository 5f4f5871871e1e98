"""Quadratic-Taylor attention: softmax's exp(s) replaced by its expansion, so that keys and values pool once."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.ops.common import accumulator, without_autocast
from polymix.ops.library import Operator
from polymix.ops.linear_attention import causal_sums, chunk_size, hide, in_chunks, seen_by_all, seen_by_each

GUARD = 1e-3  # the denominator never falls below GUARD times the number of tokens seen


class QtState(NamedTuple):
    """What a recurrent QT remembers: Σ_j φ(k_j) ⊗ [v_j, 1], whatever the number of tokens seen."""

    moments: Tensor  # (B, heads, F, d + 1), float32 at least
    count: Tensor  # type: ignore[assignment]  # (B,) real tokens seen, int64


def taylor_features(x: Tensor, form: str, order: int, scale: Tensor | None = None) -> Tensor:
    """φ(x) with ⟨φ(q), φ(k)⟩ = the similarity; x (…, d) -> (…, F).

    full:    1 + s + s²/2 cut after `order`, s = q·k/√d; F = 1, 1 + d, 1 + d + d(d+1)/2 (each symmetric pair once).
    compact: [γ, β (4/d)^¼ x_i, α x_i²] cut likewise; F = 1, 1 + d, 1 + 2d. `scale` is (α, β, γ) as (3, heads, 1, 1).
    """
    d = x.shape[-1]
    one = torch.ones_like(x[..., :1])
    if form == "compact":
        assert scale is not None
        alpha, beta, gamma = scale.to(x.dtype)
        parts = [gamma * one, beta * (4 / d) ** 0.25 * x, alpha * x * x]
        return torch.cat(parts[: order + 1], dim=-1)
    x = x * d**-0.25
    parts = [one, x]
    if order == 2:
        row, column = torch.triu_indices(d, d, device=x.device)
        weight = torch.ones_like(row, dtype=x.dtype).masked_fill(row == column, 0.5**0.5)
        parts.append(x[..., row] * x[..., column] * weight)  # x_i²/√2 once, x_i x_j for i < j
    return torch.cat(parts[: order + 1], dim=-1)


def _similarity(q: Tensor, k: Tensor, order: int) -> Tensor:
    """The full form's ⟨φ(q), φ(k)⟩ of every pair, which needs no features."""
    s = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    return (torch.ones_like(s), 1 + s, 1 + s + s * s / 2)[order]


def feature_size(d: int, form: str, order: int) -> int:
    quadratic = d if form == "compact" else d * (d + 1) // 2
    return (1, 1 + d, 1 + d + quadratic)[order]


def normalise(weighted: Tensor, count: Tensor) -> Tensor:
    """(…, d + 1) sums of [v, 1] -> their quotient; zero where nothing was seen, the denominator never below GUARD."""
    floor = GUARD * count.clamp_min(1).to(weighted.dtype)
    return weighted[..., :-1] / torch.maximum(weighted[..., -1:], floor)


def _moments(k: Tensor, v: Tensor, scale: Tensor | None, mask: Tensor | None, form: str, order: int) -> Tensor:
    """Σ_n φ(k_n) ⊗ [v_n, 1]: (B, h, N, d) -> (B, h, F, d + 1), float32 at least."""
    dtype = accumulator(k.dtype)
    keys, values = hide(k.to(dtype), mask), hide(v.to(dtype), mask)
    if form == "full":
        values = hide(F.pad(v.to(dtype), (0, 1), value=1.0), mask)
        return taylor_features(keys, form, order, scale).transpose(-1, -2) @ values
    # The powers of k one after the other, and their weights on the moments: no features side by side in memory.
    count = seen_by_all(k, mask).to(dtype).expand(*k.shape[:2], 1, 1)
    parts = [torch.cat((values.sum(2, keepdim=True), count), -1)]
    for power in (keys, keys * keys)[:order]:
        parts.append(torch.cat((power.transpose(-1, -2) @ values, power.sum(2).unsqueeze(-1)), -1))
    return torch.cat([w * part for w, part in zip(_weights(scale, k.shape[-1], dtype), parts, strict=False)], dim=2)


def _ask(q: Tensor, moments: Tensor, scale: Tensor | None, form: str, order: int) -> Tensor:
    """φ(q) · moments: (B, h, M, d) -> (B, h, M, d + 1), float32 at least."""
    q, d = q.to(moments.dtype), q.shape[-1]
    if form == "full":
        return taylor_features(q, form, order, scale) @ moments
    first, *rest = moments.split([1, d, d][: order + 1], dim=2)
    weights = _weights(scale, d, moments.dtype)
    total = weights[0] * first
    for power, weight, moment in zip((q, q * q), weights[1:], rest, strict=False):
        total = total + power @ (weight * moment)
    return total.expand(-1, -1, q.shape[2], -1)


def _weights(scale: Tensor | None, d: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """What the compact features are multiplied with, by degree: γ, β (4/d)^¼, α, each (heads, 1, 1)."""
    assert scale is not None
    alpha, beta, gamma = scale.to(dtype)
    return gamma, beta * (4 / d) ** 0.25, alpha


def _causal(
    q: Tensor, k: Tensor, v: Tensor, scale: Tensor | None, start: Tensor | None, mask: Tensor | None, form: str,
    order: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """φ(q_n) (start + Σ_{j ≤ n} φ(k_j) ⊗ [v_j, 1]) in chunks, (B, h, N, d + 1), and the moments after the last one."""
    dtype, n = accumulator(q.dtype), q.shape[2]
    size = chunk_size(n)
    keys, values = hide(k.to(dtype), mask), hide(F.pad(v.to(dtype), (0, 1), value=1.0), mask)
    # What pads the last chunk has the value [0, 0], so it adds nothing.
    queries, keys, values = (in_chunks(part, size) for part in (q.to(dtype), keys, values))
    if scale is not None:
        scale = scale.unsqueeze(-1)  # (3, heads, 1, 1, 1)
    asks, tells = (taylor_features(part, form, order, scale) for part in (queries, keys))
    similarity = _similarity(queries, keys, order) if form == "full" else None
    weighted, end = causal_sums(asks, tells, values, start, similarity)
    return weighted[:, :, :n].contiguous(), end


_FORM = "str form, int order"
qt_moments = Operator(
    "qt_moments", f"(Tensor k, Tensor v, Tensor? scale, Tensor? mask, {_FORM}) -> Tensor", _moments, "qt.moments",
    (0, 1, 2),
)  # fmt: skip
qt_ask = Operator("qt_ask", f"(Tensor q, Tensor moments, Tensor? scale, {_FORM}) -> Tensor", _ask, "qt.ask", (0, 1, 2))
qt_sums = Operator(
    "qt_causal",
    f"(Tensor q, Tensor k, Tensor v, Tensor? scale, Tensor? start, Tensor? mask, {_FORM}) -> (Tensor, Tensor)",
    _causal, "qt_causal.causal", (0, 1, 2, 3, 4),
)  # fmt: skip


def qt_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    form: str,
    order: int = 2,
    scale: Tensor | None = None,
    mask: Tensor | None = None,
    impl: str = "eager",
) -> Tensor:
    """φ(Q)(φ(K)ᵀV) / (φ(Q) Σ_j φ(K_j)): q (B, h, M, d), k and v (B, h, N, d), mask (B, N) -> (B, h, M, d).

    Sums are kept in float32 at least. Cost: (M + N) · F · (d + 1) multiply-adds a head, F = `feature_size`.
    """
    with without_autocast(q.device):
        moments = qt_moments(k, v, scale, mask, form, order, impl=impl)
        weighted = qt_ask(q, moments, scale, form, order, impl=impl)
        return normalise(weighted, seen_by_all(k, mask)).to(q.dtype)


def qt_causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    form: str,
    order: int = 2,
    scale: Tensor | None = None,
    mask: Tensor | None = None,
    state: QtState | None = None,
    impl: str = "eager",
) -> tuple[Tensor, QtState]:
    """The causal form in chunks: within a chunk directly, before it through the running moments.

    Args and cost as `qt_attention`, with N · CHUNK · (F + d) more for the chunks. Returns the output and the
    state after the last token.
    """
    seen = seen_by_each(k, mask, None if state is None else state.count)
    with without_autocast(q.device):
        start = None if state is None else state.moments
        weighted, end = qt_sums(q, k, v, scale, start, mask, form, order, impl=impl)
        out = normalise(weighted, seen[:, None, :, None]).to(q.dtype)
    return out, QtState(end, seen[:, -1].clone())
