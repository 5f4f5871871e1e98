"""Which tokens each query sees: masks, causality and packed segments, as index ranges instead of an N×N mask.

In every mask, True marks a real token, one that takes part. `causal` is 0 (sees everything), 1 (causal) or K
(block-causal with blocks of K tokens; PoM, Eq. 7). Positions count real tokens only, so padding on either side of a
sequence changes nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

Segments = Tensor | tuple[Tensor, Tensor]
BROKEN = 1e4  # no layer computes such values on purpose, and their eighth power is still finite in float32


def zero_broken_padding(x: Tensor, mask: Tensor) -> Tensor:
    """x (B, N, D) with zeros in padded tokens that hold NaN, Inf or values of at least BROKEN.

    A product with zero does not remove them: outputs of padded tokens that nobody uses would turn the gradients of
    all parameters into NaN. Other padded tokens stay as they are, because as queries they have outputs of their own.
    """
    broken = ~(x.detach().abs().amax(-1) < BROKEN) & ~mask
    return x.masked_fill(broken.unsqueeze(-1), 0.0)


def as_padding(mask: Tensor) -> Tensor | None:
    """The padding mask (B, M) that says the same as a mask (B, N, M) whose rows are all equal; otherwise None.

    None too in graphs, which must not depend on values, under transforms, and on a GPU, where reading them would wait.
    Cost: B M for most masks with unequal rows; B N M bytes are read for equal ones, none for expanded masks (stride 0).
    """
    if mask.shape[1] == 0 or torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return None
    if type(mask) is not Tensor or not mask.is_cpu or torch._C._len_torch_dispatch_stack():
        return None
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return None
    row = mask[:, :1]
    if mask.stride(1) != 0 and not (torch.equal(row, mask[:, -1:]) and torch.equal(row.expand_as(mask), mask)):
        return None
    return row[:, 0]


def positions(n: int, mask: Tensor | None, segments: Tensor | None, device: torch.device) -> Tensor:
    """The index of each token among the real tokens of its segment: (N,), or (B, N) with a mask or segments."""
    if segments is not None:
        ranges = visible_ranges(segments, mask, causal=1)
        return ranges.position
    if mask is not None:
        return (mask.cumsum(1) - 1).clamp_min(0)
    return torch.arange(n, device=device)


def dense_mask(
    n: int, m: int, mask: Tensor | None, causal: int, segments: Segments | None, device: torch.device
) -> Tensor | None:
    """Combine mask, causality and segments into one boolean mask that broadcasts to (B, n, m).

    Args:
        n: the number of queries.
        m: the number of keys.
        mask: (B, m) over keys, or (B, n, m) for each query.
        causal: 0, 1 or K; see the module.
        segments: ids (B, n), or (query ids (B, n), key ids (B, m)). Tokens see only their own segment.
        device: where the mask is built.
    Returns:
        The mask, or None if every query sees every key. Cost: n m.
    """
    visible = None
    if mask is not None:
        visible = mask if mask.ndim == 3 else mask[:, None, :]
    if segments is not None:
        rows, columns = segments if isinstance(segments, tuple) else (segments, segments)
        same = rows[:, :, None] == columns[:, None, :]
        visible = same if visible is None else visible & same
    if causal:
        padding = mask if mask is not None and mask.ndim == 2 else None
        ids = segments if isinstance(segments, Tensor) else None
        block = positions(n, padding, ids, device) // causal if causal > 1 else torch.arange(n, device=device)
        past = block[..., None, :] <= block[..., :, None]
        past = past if past.ndim == 3 else past[None]
        visible = past if visible is None else visible & past
    return visible


def rows_of_mask(
    places: Tensor, n: int, mask: Tensor | None, causal: int, segments: Segments | None
) -> Tensor | None:  # fmt: skip
    """The rows `places` (M) of `dense_mask` of one sequence of n tokens, without the others. Cost: M n."""
    visible = None if mask is None else mask[:, None, :]
    if isinstance(segments, Tensor):
        same = segments[:, places, None] == segments[:, None, :]
        visible = same if visible is None else visible & same
    if causal:
        ids = segments if isinstance(segments, Tensor) else None
        block = (
            positions(n, mask, ids, places.device) // causal if causal > 1 else torch.arange(n, device=places.device)
        )
        past = block[..., None, :] <= block[..., places, None]
        past = past if past.ndim == 3 else past[None]
        visible = past if visible is None else visible & past
    return visible


class Ranges(NamedTuple):
    """What each query sees, as ranges of the tokens sorted by segment: query i sees start[i] … stop[i] - 1."""

    order: Tensor  # (B, N) the stable sort by segment
    first: Tensor  # (B, N) the index, in sorted order, at which the segment of each sorted token begins
    start: Tensor  # (B, M)
    stop: Tensor  # (B, M)
    position: Tensor  # (B, N) the position of each token in its segment, in the original order


def visible_ranges(segments: Tensor, mask: Tensor | None, causal: int) -> Ranges:
    """Ranges for packed segments (B, N), with the same `causal` inside each segment. Cost: O(N log N)."""
    batch, n = segments.shape
    order = segments.argsort(dim=1, stable=True)
    ids = segments.gather(1, order).contiguous()
    start = torch.searchsorted(ids, ids)
    real = torch.ones_like(ids) if mask is None else mask.gather(1, order).to(ids.dtype)
    real = real.to(torch.int64)
    before = real.cumsum(1) - real  # the number of real tokens before each token, over all segments
    position = (before + real - 1 - before.gather(1, start)).clamp_min(0)
    if causal:
        step = position // causal if causal > 1 else torch.arange(n, device=ids.device).expand(batch, n) - start
        key = (start * (n + 1) + step).contiguous()  # sorted, because segments and the steps in each are sorted
        stop = torch.searchsorted(key, key, right=True)
    else:
        stop = torch.searchsorted(ids, ids, right=True)
    return Ranges(order, start, start, stop, torch.empty_like(position).scatter_(1, order, position))


def cross_ranges(rows: Tensor, columns: Tensor) -> Ranges:
    """Ranges for a separate context: query ids `rows` (B, M) see the context ids `columns` (B, N) that are equal."""
    order = columns.argsort(dim=1, stable=True)
    ids = columns.gather(1, order).contiguous()
    rows = rows.contiguous()
    start, stop = torch.searchsorted(ids, rows), torch.searchsorted(ids, rows, right=True)
    return Ranges(order, torch.searchsorted(ids, ids), start, stop, order)


def compact(mask: Tensor) -> Tensor:
    """An index (B, N) that moves the real tokens of each row to the front, in order, and padding to the end."""
    return (~mask).to(torch.uint8).argsort(dim=1, stable=True)
