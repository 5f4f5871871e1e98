"""PoM's state: a polynomial of every context token, reduced over the tokens that a query may see."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.ops.common import ACTIVATIONS, Turns, accumulator, rotate, without_autocast
from polymix.ops.library import Operator
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


def _activated(h: Tensor, mask: Tensor | None, activation: str) -> Tensor:
    """Zero at padding: a polynomial without constant term stays zero there."""
    h = ACTIVATIONS[activation](h)
    return h if mask is None else h.masked_fill(~mask.unsqueeze(-1), 0.0)


def _terms(
    h: Tensor, alpha: Tensor, mask: Tensor | None, cos: Tensor | None, sin: Tensor | None, activation: str, axes: int
) -> Tensor:
    terms = polynomial(_activated(h, mask, activation), alpha.to(h.dtype))
    return terms if cos is None or sin is None else rotate(terms, (cos, sin), axes=axes)


def _pool(
    h: Tensor, alpha: Tensor, mask: Tensor | None, cos: Tensor | None, sin: Tensor | None, activation: str, axes: int
) -> Tensor:
    """Σ_j of the terms, (B, E); α after the sums where nothing turns, so that there is no (N, E, k) intermediate."""
    dtype = accumulator(h.dtype)
    if cos is not None:
        return _terms(h, alpha, mask, cos, sin, activation, axes).sum(1, dtype=dtype)
    h = power = _activated(h, mask, activation)
    total = alpha[:, 0] * h.sum(1, dtype=dtype)
    for p in range(1, alpha.shape[1]):
        power = power * h
        total = total + alpha[:, p] * power.sum(1, dtype=dtype)
    return total


def _scan(
    h: Tensor, alpha: Tensor, start: Tensor | None, mask: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    order: Tensor | None, first: Tensor | None, activation: str, axes: int,
) -> Tensor:  # fmt: skip
    """The running sum of the terms, (B, N, E), over the tokens in `order`, anew at every `first`."""
    terms = _terms(h, alpha, mask, cos, sin, activation, axes).to(accumulator(h.dtype))
    if order is not None:
        terms = terms.gather(1, order.unsqueeze(-1).expand_as(terms))
    running = terms.cumsum(1) if first is None else _segmented_cumsum(terms, first)
    return running if start is None else running + start[:, None]


def _segmented_cumsum(terms: Tensor, start: Tensor) -> Tensor:
    """Running sum (B, N, E) that begins anew at index start[i] of each token's segment.

    By doubling, O(N log N): a difference of two plain running sums would let one segment's size show in another.
    """
    n = terms.shape[1]
    place = torch.arange(n, device=terms.device)
    reach = 1
    while reach < n:
        earlier = F.pad(terms[:, :-reach], (0, 0, reach, 0))
        inside = (place - reach >= start).unsqueeze(-1)
        terms = terms + earlier.masked_fill(~inside, 0.0)
        reach *= 2
    return terms


_SHARED = "Tensor? mask, Tensor? cos, Tensor? sin"
_PLACES = "Tensor? order, Tensor? first"
pom_pool = Operator(
    "pom_pool", f"(Tensor h, Tensor alpha, {_SHARED}, str activation, int axes) -> Tensor", _pool, "pom.pool", (0, 1)
)
pom_scan = Operator(
    "pom_scan",
    f"(Tensor h, Tensor alpha, Tensor? start, {_SHARED}, {_PLACES}, str activation, int axes) -> Tensor",
    _scan, "pom.scan", (0, 1, 2),
)  # fmt: skip


class Terms(NamedTuple):
    """The terms Σ_p α_p ⊙ act(h_j)^p of the context tokens, turned by their positions; not yet computed.

    h (B, N, E), alpha (E, k), mask (B, N) over real tokens, turns cos and sin (B or 1, N, E / 2).
    """

    h: Tensor
    alpha: Tensor
    activation: str
    mask: Tensor | None
    turns: Turns | None
    axes: int
    impl: str

    def values(self) -> Tensor:
        cos, sin = self.turns or (None, None)
        return _terms(self.h, self.alpha, self.mask, cos, sin, self.activation, self.axes)

    def pooled(self) -> Tensor:
        """Their sum, (B, E) in float32 at least."""
        turns = self.turns or (None, None)
        return pom_pool(self.h, self.alpha, self.mask, *turns, self.activation, self.axes, impl=self.impl)

    def running(
        self, *, order: Tensor | None = None, first: Tensor | None = None, start: Tensor | None = None
    ) -> Tensor:
        """Their running sum, (B, N, E) in float32 at least."""
        turns = self.turns or (None, None)
        return pom_scan(
            self.h, self.alpha, start, self.mask, *turns, order, first, self.activation, self.axes, impl=self.impl
        )


def _over_ranges(terms: Terms, ranges: Ranges, segmented: bool) -> tuple[Tensor, Tensor]:
    """Sum and count of the terms that each query sees: the running sum of its segment, read at its stop."""
    running = terms.running(order=ranges.order, first=ranges.first if segmented else None)
    last = (ranges.stop - 1).clamp_min(0).unsqueeze(-1).expand(*ranges.stop.shape, running.shape[-1])
    nothing = (ranges.stop == ranges.start).unsqueeze(-1)
    total = running.gather(1, last).masked_fill(nothing, 0.0)
    if terms.mask is None:
        return total, ranges.stop - ranges.start
    seen = F.pad(terms.mask.gather(1, ranges.order).cumsum(1), (1, 0))
    return total, seen.gather(1, ranges.stop) - seen.gather(1, ranges.start)


def _unsort(x: Tensor, order: Tensor) -> Tensor:
    index = order.reshape(*order.shape, *(1,) * (x.ndim - 2)).expand_as(x)
    return torch.empty_like(x).scatter(1, index, x)


def divide(total: Tensor, count: Tensor, reduction: str) -> Tensor:
    """total / count for a mean, total for a sum; rows that saw nothing are zero either way."""
    return total if reduction == "sum" else total / count.clamp_min(1).unsqueeze(-1).to(total.dtype)


def pom_reduce(
    terms: Terms,
    *,
    queries: int,
    visible: Tensor | None = None,
    causal: int = 0,
    segments: Segments | None = None,
    state: PomState | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum the terms over the context that each query sees.

    Args:
        terms: of the context; their mask is padding.
        queries: M, the number of query tokens (N unless the context is separate).
        visible: (B, M, N) boolean, an arbitrary mask.
        causal: 0, 1, or K for block-causal.
        segments: ids (B, N), or (query ids (B, M), context ids (B, N)) with a separate context.
        state: what came before; causal = 1 only.
    Returns:
        total (B, M or 1, E) and count (B or 1, M or 1). Cost O(N E), O(N E log N) with segments,
        O(M N E) with an arbitrary mask.
    """
    h, padding = terms.h, terms.mask
    n, device = h.shape[1], h.device
    if visible is not None:
        seen = dense_mask(queries, n, visible, causal, segments, device)
        assert seen is not None
        weight, dtype = seen.expand(h.shape[0], queries, n), accumulator(h.dtype)
        with without_autocast(device):
            return weight.to(dtype) @ terms.values().to(dtype), weight.sum(-1)
    if isinstance(segments, tuple):
        return _over_ranges(terms, cross_ranges(*segments), segmented=True)
    if segments is not None or causal > 1:
        ids = segments if segments is not None else torch.zeros(h.shape[:2], dtype=torch.int64, device=device)
        ranges = visible_ranges(ids, padding, causal)
        total, count = _over_ranges(terms, ranges, segmented=segments is not None)
        return _unsort(total, ranges.order), _unsort(count, ranges.order)
    if causal:
        count = (torch.arange(n, device=device) + 1)[None] if padding is None else padding.cumsum(1)
        if state is None:
            return terms.running(), count
        return terms.running(start=state.total), count + state.count[:, None]
    count = torch.full((1, 1), n, device=device) if padding is None else padding.sum(1, keepdim=True)
    return terms.pooled()[:, None], count
