"""PoM in plain PyTorch: a polynomial of every context token, reduced over the tokens that a query sees, and gated.

H_i = reduce_j Σ_{p=1..k} α_p ⊙ h(W_h c_j + b_h)^p,   y_i = W_o [σ(W_s x_i + b_s) ⊙ H_i] + b_o
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.ops.shared.activations import FUNCTIONS, GATES
from polymix.ops.shared.masks import Ranges, Segments, cross_ranges, dense_mask, positions, visible_ranges
from polymix.ops.shared.rotary import Turns, rotary, rotate
from polymix.ops.shared.tensors import Linear, accumulator, linear, scaled_linear, without_autocast

AXES = {"1d": 1, "2d": 2}  # of rotary positions


class PomWeights(NamedTuple):
    """W_h, W_s and W_o with their biases, α (E, k), and the times (heads) of a PoM that forgets."""

    poly: Linear
    gate: Linear
    proj: Linear
    alpha: Tensor
    times: Tensor | None = None


class PomOptions(NamedTuple):
    """h, σ, "mean" or "sum"; None, "1d" or "2d"; the number of gates, None for one a channel."""

    activation: str = "gelu"
    gate: str = "sigmoid"
    reduction: str = "mean"
    rotary: str | None = None
    heads: int | None = None


class PomState(NamedTuple):
    """What a recurrent PoM remembers: O(D_inner), whatever the number of tokens seen."""

    total: Tensor  # (B, E) Σ_j Σ_p α_p ⊙ h_j^p, float32 at least
    count: Tensor  # type: ignore[assignment]  # (B,) real tokens seen, int64


# -- the terms of the context


def _activated(h: Tensor, mask: Tensor | None, activation: str) -> Tensor:
    """Zero at padding: a polynomial without constant term stays zero there."""
    h = FUNCTIONS[activation](h)
    return h if mask is None else h.masked_fill(~mask.unsqueeze(-1), 0.0)


def _power_sums(h: Tensor, degree: int) -> Tensor:
    """Σ_n h_n^p for p = 1 … degree, (B, degree, E) in float32 at least; no (N, E, degree) intermediate."""
    dtype, power = accumulator(h.dtype), h
    sums = [h.sum(1, dtype=dtype)]
    for _ in range(1, degree):
        power = power * h
        sums.append(power.sum(1, dtype=dtype))
    return torch.stack(sums, dim=1)


def powers(x: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor | None, activation: str, degree: int) -> Tensor:
    """Σ_n h_n^p for p = 1 … degree with h = act(x Wᵀ + b), (B, degree, E) in float32 at least."""
    return _power_sums(_activated(F.linear(x, weight, bias), mask, activation), degree)


def terms(
    h: Tensor, alpha: Tensor, mask: Tensor | None, cos: Tensor | None, sin: Tensor | None, activation: str, axes: int
) -> Tensor:
    """Σ_p α_p ⊙ act(h)^p by Horner's rule, turned by cos and sin where they are given: (B, N, E)."""
    h, alpha = _activated(h, mask, activation), alpha.to(h.dtype)
    total = alpha[:, -1] * h
    for p in range(alpha.shape[1] - 2, -1, -1):
        total = (total + alpha[:, p]) * h
    return total if cos is None or sin is None else rotate(total, (cos, sin), axes=axes)


def pool(
    h: Tensor, alpha: Tensor, mask: Tensor | None, cos: Tensor | None, sin: Tensor | None, activation: str, axes: int
) -> Tensor:
    """Σ_j of the terms, (B, E) in float32 at least."""
    if cos is not None:
        return terms(h, alpha, mask, cos, sin, activation, axes).sum(1, dtype=accumulator(h.dtype))
    return weigh(_power_sums(_activated(h, mask, activation), alpha.shape[1]), alpha)


def weigh(sums: Tensor, alpha: Tensor) -> Tensor:
    """Σ_p α_p ⊙ sums_p: (B, k, E) -> (B, E)."""
    return (sums * alpha.t()).sum(1)


def scan(
    h: Tensor, alpha: Tensor, start: Tensor | None, mask: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    order: Tensor | None, first: Tensor | None, activation: str, axes: int,
) -> Tensor:  # fmt: skip
    """The running sum of the terms, (B, N, E), over the tokens in `order`, started anew at every `first`."""
    each = terms(h, alpha, mask, cos, sin, activation, axes).to(accumulator(h.dtype))
    if order is not None:
        each = each.gather(1, order.unsqueeze(-1).expand_as(each))
    running = each.cumsum(1) if first is None else _segmented_cumsum(each, first)
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


# -- who sees which of them


class Terms(NamedTuple):
    """The terms of the context tokens, not yet computed, and the two sums that kernels take over them.

    h (B, N, E), alpha (E, k), mask (B, N) over real tokens, turns cos and sin (B or 1, N, E / 2). pool and scan: the
    functions above, or operators on the same arguments.
    """

    h: Tensor
    alpha: Tensor
    activation: str
    mask: Tensor | None
    turns: Turns | None
    axes: int
    pool: Callable[..., Tensor] = pool
    scan: Callable[..., Tensor] = scan

    def values(self) -> Tensor:
        cos, sin = self.turns or (None, None)
        return terms(self.h, self.alpha, self.mask, cos, sin, self.activation, self.axes)

    def pooled(self) -> Tensor:
        """Their sum, (B, E) in float32 at least."""
        cos, sin = self.turns or (None, None)
        return self.pool(self.h, self.alpha, self.mask, cos, sin, self.activation, self.axes)

    def running(
        self, *, order: Tensor | None = None, first: Tensor | None = None, start: Tensor | None = None
    ) -> Tensor:
        """Their running sum, (B, N, E) in float32 at least."""
        cos, sin = self.turns or (None, None)
        return self.scan(self.h, self.alpha, start, self.mask, cos, sin, order, first, self.activation, self.axes)


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


def reduce_terms(
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


# -- the gate


def turns_at(place: Tensor | None, width: int, options: PomOptions, heads: int | None = None) -> Turns | None:
    """Of `width` features at positions (N), (B, N) or in 2-D (N, 2): cos and sin (B or 1, N, width / 2)."""
    if place is None:
        return None
    cos, sin = rotary(place, width, axes=AXES[options.rotary or "1d"], heads=heads)
    return (cos, sin) if cos.ndim == 3 else (cos[None], sin[None])


def places(
    x: Tensor, context: Tensor, options: PomOptions, mask: Tensor | None, grid: tuple[int, ...] | None,
    segments: Segments | None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Positions of the queries and of the context tokens, which count real tokens; None without rotary."""
    if options.rotary is None:
        return None, None
    if grid is not None:
        rows, columns = (torch.arange(size, device=x.device) for size in grid)
        place = torch.cartesian_prod(rows, columns)  # (N, 2)
        return place, place
    if context is not x:
        queries, keys = segments if isinstance(segments, tuple) else (None, None)
        return positions(x.shape[1], None, queries, x.device), positions(context.shape[1], mask, keys, x.device)
    assert not isinstance(segments, tuple)
    place = positions(x.shape[1], mask, segments, x.device)
    return place, place


def gate_totals(
    x: Tensor, weights: PomWeights, options: PomOptions, total: Tensor, count: Tensor, place: Tensor | None
) -> Tensor:
    """W_o [σ(W_s x + b_s) ⊙ H] + b_o, H = total (B, N or 1, E) over count (B or 1, N or 1) tokens for a mean.

    A gate of fewer features than E gates as many heads; `place` turns it. A query that saw nothing gets H = 0.
    """
    gate = GATES[options.gate](linear(x, *weights.gate))
    width, inner = gate.shape[-1], total.shape[-1]
    turns = turns_at(place, width, options, options.heads)
    gate = gate if turns is None else rotate(gate, turns, axes=AXES[options.rotary or "1d"])
    if options.reduction == "mean":
        total = total / count.clamp_min(1).unsqueeze(-1).to(total.dtype)
    total = total.to(gate.dtype)
    if width == inner and total.shape[1] == 1:
        return scaled_linear(gate, total, *weights.proj)
    if width != inner:
        total, gate = total.unflatten(-1, (width, -1)), gate.unsqueeze(-1)
        return linear((gate * total).flatten(-2), *weights.proj)
    return linear(gate * total, *weights.proj)
