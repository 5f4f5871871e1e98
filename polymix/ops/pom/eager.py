"""PoM in plain PyTorch: polynomials of the context tokens, summed over the tokens that each query sees, and gated.

H_i = reduce_j Σ_{p=1..k} α_p ⊙ h(W_h c_j + b_h)^p,   y_i = W_o [σ(W_s x_i + b_s) ⊙ H_i] + b_o   (PoM, Eq. 1, 2, 4)
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

AXES = {"1d": 1, "2d": 2}  # the number of axes of the rotary positions


class PomWeights(NamedTuple):
    """The parameters of a PoM layer."""

    poly: Linear  # W_h, b_h
    gate: Linear  # W_s, b_s
    proj: Linear  # W_o, b_o
    alpha: Tensor  # α (E, k)
    times: Tensor | None = None  # (heads), the decay times; None for no decay


class PomOptions(NamedTuple):
    """The options of a PoM layer."""

    activation: str = "gelu"  # h
    gate: str = "sigmoid"  # σ
    reduction: str = "mean"  # or "sum"
    rotary: str | None = None  # None, "1d" or "2d"
    heads: int | None = None  # the number of scalar gates; None for one gate per channel


class PomState(NamedTuple):
    """The state of a recurrent PoM. Its size does not depend on the number of tokens seen."""

    total: Tensor  # (B, E) Σ_j Σ_p α_p ⊙ h_j^p, in float32 or wider
    count: Tensor  # type: ignore[assignment]  # (B,) the number of real tokens seen, int64

    def merge(self, later: PomState, carry: Tensor | None = None) -> PomState:
        """The state after both parts of a sequence; carry: what `later` has left of earlier sums, (B, heads)."""
        if carry is None:
            return PomState(self.total + later.total, self.count + later.count)
        total = (self.total.unflatten(-1, (carry.shape[1], -1)) * carry.unsqueeze(-1)).flatten(1)
        return PomState(total + later.total, self.count * carry + later.count)


# -- polynomial terms of the context


def _activated(h: Tensor, mask: Tensor | None, activation: str) -> Tensor:
    """Apply the activation, and zero padding: the polynomials have no constant term and stay zero there."""
    h = FUNCTIONS[activation](h)
    return h if mask is None else h.masked_fill(~mask.unsqueeze(-1), 0.0)


def _power_sums(h: Tensor, degree: int) -> Tensor:
    """Σ_n h_n^p for p = 1 … degree, (B, degree, E) in float32 or wider, without an (N, E, degree) intermediate."""
    dtype, power = accumulator(h.dtype), h
    sums = [h.sum(1, dtype=dtype)]
    for _ in range(1, degree):
        power = power * h
        sums.append(power.sum(1, dtype=dtype))
    return torch.stack(sums, dim=1)


def powers(x: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor | None, activation: str, degree: int) -> Tensor:
    """Σ_n h_n^p for p = 1 … degree with h = act(x Wᵀ + b), (B, degree, E) in float32 or wider."""
    return _power_sums(_activated(F.linear(x, weight, bias), mask, activation), degree)


def terms(
    h: Tensor, alpha: Tensor, mask: Tensor | None, cos: Tensor | None, sin: Tensor | None, activation: str, axes: int
) -> Tensor:
    """Σ_p α_p ⊙ act(h)^p by Horner's rule, rotated by cos and sin if given: (B, N, E)."""
    h, alpha = _activated(h, mask, activation), alpha.to(h.dtype)
    total = alpha[:, -1] * h
    for p in range(alpha.shape[1] - 2, -1, -1):
        total = (total + alpha[:, p]) * h
    return total if cos is None or sin is None else rotate(total, (cos, sin), axes=axes)


def pool(
    h: Tensor, alpha: Tensor, mask: Tensor | None, cos: Tensor | None, sin: Tensor | None, activation: str, axes: int
) -> Tensor:
    """The sum of the terms over all tokens, (B, E) in float32 or wider."""
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
    """The running sum of the terms, (B, N, E), over the tokens in `order`, restarting at each index `first`."""
    sorted_terms = terms(h, alpha, mask, cos, sin, activation, axes).to(accumulator(h.dtype))
    if order is not None:
        sorted_terms = sorted_terms.gather(1, order.unsqueeze(-1).expand_as(sorted_terms))
    running = sorted_terms.cumsum(1) if first is None else _segmented_cumsum(sorted_terms, first)
    return running if start is None else running + start[:, None]


def _segmented_cumsum(terms: Tensor, start: Tensor) -> Tensor:
    """The running sum (B, N, E) that restarts at index start[i], the beginning of token i's segment.

    Uses doubling, O(N log N). A difference of two plain running sums would leak rounding errors between segments.
    """
    n = terms.shape[1]
    index = torch.arange(n, device=terms.device)
    reach = 1
    while reach < n:
        earlier = F.pad(terms[:, :-reach], (0, 0, reach, 0))
        inside = (index - reach >= start).unsqueeze(-1)
        terms = terms + earlier.masked_fill(~inside, 0.0)
        reach *= 2
    return terms


# -- sums over the tokens that each query sees


class Terms(NamedTuple):
    """The polynomial terms of the context tokens, evaluated lazily, and the two ways of summing them."""

    h: Tensor  # (B, N, E), before the activation
    alpha: Tensor  # (E, k)
    activation: str
    mask: Tensor | None  # (B, N), True for real tokens
    turns: Turns | None  # cosines and sines (B or 1, N, E / 2)
    axes: int  # of the rotary positions
    pool: Callable[..., Tensor] = pool  # `pool` of this module, or an operator with the same arguments
    scan: Callable[..., Tensor] = scan  # likewise

    def values(self) -> Tensor:
        """The terms, (B, N, E)."""
        cos, sin = self.turns or (None, None)
        return terms(self.h, self.alpha, self.mask, cos, sin, self.activation, self.axes)

    def pooled(self) -> Tensor:
        """The sum of the terms, (B, E) in float32 or wider."""
        cos, sin = self.turns or (None, None)
        return self.pool(self.h, self.alpha, self.mask, cos, sin, self.activation, self.axes)

    def running(
        self, *, order: Tensor | None = None, first: Tensor | None = None, start: Tensor | None = None
    ) -> Tensor:
        """The running sum of the terms, (B, N, E) in float32 or wider; see `scan`."""
        cos, sin = self.turns or (None, None)
        return self.scan(self.h, self.alpha, start, self.mask, cos, sin, order, first, self.activation, self.axes)


def _over_ranges(terms: Terms, ranges: Ranges, segmented: bool) -> tuple[Tensor, Tensor]:
    """The sum and the count of the terms that each query sees, read from the running sum at the range's end."""
    running = terms.running(order=ranges.order, first=ranges.first if segmented else None)
    last = (ranges.stop - 1).clamp_min(0).unsqueeze(-1).expand(*ranges.stop.shape, running.shape[-1])
    empty = (ranges.stop == ranges.start).unsqueeze(-1)
    total = running.gather(1, last).masked_fill(empty, 0.0)
    if terms.mask is None:
        return total, ranges.stop - ranges.start
    seen = F.pad(terms.mask.gather(1, ranges.order).cumsum(1), (1, 0))
    return total, seen.gather(1, ranges.stop) - seen.gather(1, ranges.start)


def _unsort(x: Tensor, order: Tensor) -> Tensor:
    """Undo the sorting of x (B, N, …) by `order` (B, N)."""
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
        terms: of the context; their mask marks padding.
        queries: M, the number of query tokens (N unless the context is separate).
        visible: an arbitrary boolean mask (B, M, N).
        causal: 0, 1, or K for block-causal.
        segments: ids (B, N), or (query ids (B, M), context ids (B, N)) with a separate context.
        state: the state after the previous chunk, which ended with a block; causal only, without segments.
    Returns:
        The total (B, M or 1, E) and the count of tokens seen (B or 1, M or 1). Cost: O(N E); O(N E log N) with
        segments; O(M N E) with an arbitrary mask.
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
        if state is not None:
            total, count = total + state.total[:, None], count + state.count[:, None]
        return _unsort(total, ranges.order), _unsort(count, ranges.order)
    if causal:
        count = (torch.arange(n, device=device) + 1)[None] if padding is None else padding.cumsum(1)
        if state is None:
            return terms.running(), count
        return terms.running(start=state.total), count + state.count[:, None]
    count = torch.full((1, 1), n, device=device) if padding is None else padding.sum(1, keepdim=True)
    return terms.pooled()[:, None], count


def after(terms: Terms, state: PomState | None) -> PomState:
    """The state after all tokens of the terms."""
    total, batch = terms.pooled(), terms.h.shape[0]
    everything = torch.full((batch,), terms.h.shape[1], device=total.device)
    count = everything if terms.mask is None else terms.mask.sum(1)
    return PomState(total, count) if state is None else PomState(total + state.total, count + state.count)


# -- the gate


def turns_at(position: Tensor | None, width: int, options: PomOptions, heads: int | None = None) -> Turns | None:
    """The rotation of `width` features at positions (N), (B, N) or (N, 2): cos and sin (B or 1, N, width / 2)."""
    if position is None:
        return None
    cos, sin = rotary(position, width, axes=AXES[options.rotary or "1d"], heads=heads)
    return (cos, sin) if cos.ndim == 3 else (cos[None], sin[None])


def token_positions(
    x: Tensor, context: Tensor, options: PomOptions, mask: Tensor | None, grid: tuple[int, ...] | None,
    segments: Segments | None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """The positions of the queries and of the context tokens, counting real tokens only; None without rotary.

    On a grid, tokens in front of it are at (0, 0), where nothing is rotated.
    """
    if options.rotary is None:
        return None, None
    if grid is not None:
        position = grid_positions(grid, x.shape[1], x.device)
        return position, position
    if context is not x:
        queries, keys = segments if isinstance(segments, tuple) else (None, None)
        return positions(x.shape[1], None, queries, x.device), positions(context.shape[1], mask, keys, x.device)
    assert not isinstance(segments, tuple)
    position = positions(x.shape[1], mask, segments, x.device)
    return position, position


def grid_positions(grid: tuple[int, ...], tokens: int, device: torch.device) -> Tensor:
    """Rows and columns (N, 2) of tokens, the last of which lie on a grid; (0, 0) for those in front of it."""
    places = torch.cartesian_prod(*(torch.arange(size, device=device) for size in grid))
    return torch.cat((places.new_zeros(tokens - len(places), 2), places))


def gate_totals(
    x: Tensor, weights: PomWeights, options: PomOptions, total: Tensor, count: Tensor, position: Tensor | None,
    apply: Callable[..., Tensor] = linear,
) -> Tensor:  # fmt: skip
    """Compute W_o [σ(W_s x + b_s) ⊙ H] + b_o, where H is the total, or the total over the count for a mean.

    A gate with fewer features than E has one scalar per head. A query that sees no tokens gets H = 0.

    Args:
        x: (B, N, D).
        weights: the maps W_s and W_o.
        options: the gate, the reduction and the rotary positions.
        total: (B, N or 1, E).
        count: (B or 1, N or 1), the number of tokens seen.
        position: rotates the gate; None without rotary.
        apply: `linear`, or another function that applies a linear map.
    """
    gate = GATES[options.gate](apply(x, *weights.gate))
    width, inner = gate.shape[-1], total.shape[-1]
    turns = turns_at(position, width, options, options.heads)
    gate = gate if turns is None else rotate(gate, turns, axes=AXES[options.rotary or "1d"])
    if options.reduction == "mean":
        total = total / count.clamp_min(1).unsqueeze(-1).to(total.dtype)
    total = total.to(gate.dtype)
    if width == inner and total.shape[1] == 1 and apply is linear:
        return scaled_linear(gate, total, *weights.proj)
    if width != inner:
        total, gate = total.unflatten(-1, (width, -1)), gate.unsqueeze(-1)
        return apply((gate * total).flatten(-2), *weights.proj)
    return apply(gate * total, *weights.proj)
