"""PoM's state: a polynomial of every context token, reduced over the tokens that a query may see."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from polymix.ops.common import accumulator, without_autocast
from polymix.ops.visibility import Ranges, Segments, cross_ranges, dense_mask, visible_ranges


class PomState(NamedTuple):
    """What a recurrent PoM remembers: O(D_inner), whatever the number of tokens seen."""

    total: Tensor  # (B, E) Σ_j Σ_p α_p ⊙ h_j^p, float32 at least
    count: Tensor  # type: ignore[assignment]  # (B,) real tokens seen, int64


def polynomial(h: Tensor, alpha: Tensor) -> Tensor:
    """Σ_{p=1..k} α_p ⊙ h^p by Horner's rule: h (…, E), alpha (E, k) -> (…, E)."""
    total = alpha[:, -1] * h
    for p in range(alpha.shape[1] - 2, -1, -1):
        total = (total + alpha[:, p]) * h
    return total


def pooled_polynomial(h: Tensor, alpha: Tensor) -> Tensor:
    """Σ_j Σ_p α_p ⊙ h_j^p with α applied after the reduction: (B, N, E) -> (B, E), no (N, E, k) intermediate."""
    dtype = accumulator(h.dtype)
    power, total = h, alpha[:, 0] * h.sum(1, dtype=dtype)
    for p in range(1, alpha.shape[1]):
        power = power * h
        total = total + alpha[:, p] * power.sum(1, dtype=dtype)
    return total


def _segmented_cumsum(terms: Tensor, start: Tensor) -> Tensor:
    """Running sum (B, N, E) that begins anew at index start[i] of each token's segment.

    By doubling, O(N log N): a difference of two plain running sums would let one segment's size show in another.
    """
    n = terms.shape[1]
    place = torch.arange(n, device=terms.device)
    reach = 1
    while reach < n:
        earlier = torch.nn.functional.pad(terms[:, :-reach], (0, 0, reach, 0))
        inside = (place - reach >= start).unsqueeze(-1)
        terms = terms + earlier.masked_fill(~inside, 0.0)
        reach *= 2
    return terms


def _over_ranges(terms: Tensor, real: Tensor | None, ranges: Ranges, segmented: bool) -> tuple[Tensor, Tensor]:
    """Sum and count of the terms that each query sees: the running sum of its segment, read at its stop."""
    index = ranges.order.unsqueeze(-1).expand_as(terms)
    terms = terms.gather(1, index)
    running = _segmented_cumsum(terms, ranges.first) if segmented else terms.cumsum(1)
    last = (ranges.stop - 1).clamp_min(0).unsqueeze(-1).expand(*ranges.stop.shape, terms.shape[-1])
    nothing = (ranges.stop == ranges.start).unsqueeze(-1)
    total = running.gather(1, last).masked_fill(nothing, 0.0)
    if real is None:
        return total, ranges.stop - ranges.start
    seen = torch.nn.functional.pad(real.gather(1, ranges.order).cumsum(1), (1, 0))
    return total, seen.gather(1, ranges.stop) - seen.gather(1, ranges.start)


def _unsort(x: Tensor, order: Tensor) -> Tensor:
    index = order.reshape(*order.shape, *(1,) * (x.ndim - 2)).expand_as(x)
    return torch.empty_like(x).scatter(1, index, x)


def divide(total: Tensor, count: Tensor, reduction: str) -> Tensor:
    """total / count for a mean, total for a sum; rows that saw nothing are zero either way."""
    return total if reduction == "sum" else total / count.clamp_min(1).unsqueeze(-1).to(total.dtype)


def pom_reduce(
    terms: Tensor,
    *,
    queries: int,
    mask: Tensor | None = None,
    causal: int = 0,
    segments: Segments | None = None,
    state: PomState | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum the terms over the context that each query sees.

    Args:
        terms: (B, N, E), zero where a padding mask hides a token.
        queries: M, the number of query tokens (N unless the context is separate).
        mask: (B, N) padding or (B, M, N) arbitrary, boolean.
        causal: 0, 1, or K for block-causal.
        segments: ids (B, N), or (query ids (B, M), context ids (B, N)) with a separate context.
        state: what came before; causal = 1 only.
    Returns:
        total (B, M or 1, E) and count (B or 1, M or 1). Cost O(N E), O(N E log N) with segments,
        O(M N E) with an arbitrary mask.
    """
    dtype, n = accumulator(terms.dtype), terms.shape[1]
    padding = mask if mask is not None and mask.ndim == 2 else None
    if mask is not None and mask.ndim == 3:
        visible = dense_mask(queries, n, mask, causal, segments, terms.device)
        assert visible is not None
        weight = visible.expand(terms.shape[0], queries, n)
        with without_autocast(terms.device):
            return weight.to(dtype) @ terms.to(dtype), weight.sum(-1)
    if isinstance(segments, tuple):
        return _over_ranges(terms.to(dtype), padding, cross_ranges(*segments), segmented=True)
    if segments is not None or causal > 1:
        ids = segments if segments is not None else torch.zeros(terms.shape[:2], dtype=torch.int64, device=terms.device)
        ranges = visible_ranges(ids, mask, causal)
        total, count = _over_ranges(terms.to(dtype), padding, ranges, segmented=segments is not None)
        return _unsort(total, ranges.order), _unsort(count, ranges.order)
    if causal:
        total = terms.cumsum(1, dtype=dtype)
        count = (torch.arange(n, device=terms.device) + 1)[None] if padding is None else padding.cumsum(1)
        if state is not None:
            total, count = total + state.total[:, None], count + state.count[:, None]
        return total, count
    count = torch.full((1, 1), n, device=terms.device) if padding is None else padding.sum(1, keepdim=True)
    return terms.sum(1, keepdim=True, dtype=dtype), count
