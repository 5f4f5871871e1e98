"""Quadratic-Taylor attention: softmax's exp(s) replaced by its expansion, so that keys and values pool once."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.ops.common import accumulator, without_autocast

CHUNK = 128  # tokens that see each other directly in the causal form; more costs N · CHUNK, less costs N / CHUNK states
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


def _similarity(q: Tensor, k: Tensor, form: str, order: int, scale: Tensor | None) -> Tensor:
    """⟨φ(q), φ(k)⟩ of every pair, by the shorter way: the full form needs no features for it."""
    if form == "compact":
        return taylor_features(q, form, order, scale) @ taylor_features(k, form, order, scale).transpose(-1, -2)
    s = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    return (torch.ones_like(s), 1 + s, 1 + s + s * s / 2)[order]


def feature_size(d: int, form: str, order: int) -> int:
    quadratic = d if form == "compact" else d * (d + 1) // 2
    return (1, 1 + d, 1 + d + quadratic)[order]


def normalise(weighted: Tensor, count: Tensor) -> Tensor:
    """(…, d + 1) sums of [v, 1] -> their quotient; zero where nothing was seen, the denominator never below GUARD."""
    floor = GUARD * count.clamp_min(1).to(weighted.dtype)
    return weighted[..., :-1] / torch.maximum(weighted[..., -1:], floor)


def _hide_padding(k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """k and [v, 1], both zero where a token is padding."""
    v = F.pad(v, (0, 1), value=1.0)
    if mask is None:
        return k, v
    hidden = ~mask[:, None, :, None]
    return k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)


def qt_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    form: str,
    order: int = 2,
    scale: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """φ(Q)(φ(K)ᵀV) / (φ(Q) Σ_j φ(K_j)): q (B, h, M, d), k and v (B, h, N, d), mask (B, N) -> (B, h, M, d).

    Sums are kept in float32 at least. Cost: (M + N) · F · (d + 1) multiply-adds a head, F = `feature_size`.
    """
    dtype = accumulator(q.dtype)
    with without_autocast(q.device):
        keys, values = _hide_padding(k.to(dtype), v.to(dtype), mask)
        moments = taylor_features(keys, form, order, scale).transpose(-1, -2) @ values  # (B, h, F, d + 1)
        weighted = taylor_features(q.to(dtype), form, order, scale) @ moments
        seen = torch.full((1,), k.shape[2], device=q.device) if mask is None else mask.sum(1)
        return normalise(weighted, seen[:, None, None, None]).to(q.dtype)


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
) -> tuple[Tensor, QtState]:
    """The causal form in chunks: within a chunk directly, before it through the running moments.

    Args and cost as `qt_attention`, with N · CHUNK · (F + d) more for the chunks. Returns the output and the
    state after the last token.
    """
    dtype, batch, n = accumulator(q.dtype), q.shape[0], q.shape[2]
    chunk = 1 if n == 1 else CHUNK  # not min(CHUNK, n), which would tie a compiled graph to one side of CHUNK
    real = torch.ones(batch, n, dtype=torch.bool, device=q.device) if mask is None else mask
    seen = real.cumsum(1)
    pad = -n % chunk
    with without_autocast(q.device):
        keys, values = _hide_padding(k.to(dtype), v.to(dtype), mask)
        queries, keys, values = (
            F.pad(part, (0, 0, 0, pad)).unflatten(2, (-1, chunk)) for part in (q.to(dtype), keys, values)
        )  # (B, h, chunks, chunk, ·); what pads the last chunk has the value [0, 0], so it adds nothing
        if scale is not None:
            scale = scale.unsqueeze(-1)  # (3, heads, 1, 1, 1)
        gained = taylor_features(keys, form, order, scale).transpose(-1, -2) @ values  # (B, h, chunks, F, d + 1)
        # The sum before each chunk comes from a shifted sum, never from a difference: that would let the future in.
        start = torch.zeros_like(gained[:, :, :1]) if state is None else state.moments[:, :, None]
        running = torch.cat((start, gained), dim=2).cumsum(2)
        before = running[:, :, :-1]
        inside = _similarity(queries, keys, form, order, scale).tril() @ values
        weighted = (inside + taylor_features(queries, form, order, scale) @ before).flatten(2, 3)[:, :, :n]
        if state is not None:
            seen = seen + state.count[:, None]
        out = normalise(weighted, seen[:, None, :, None]).to(q.dtype)
    return out, QtState(running[:, :, -1].clone(), seen[:, -1].clone())
