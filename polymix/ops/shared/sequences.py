"""Helpers of causal sequence mixers: removing and restoring padding, convolutions that continue from a window."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from polymix.ops.shared.depthwise import depthwise_conv
from polymix.ops.shared.masks import compact
from polymix.ops.shared.tensors import accumulator


def take(x: Tensor, index: Tensor) -> Tensor:
    """Select tokens: x (B, N, D) at index (B, M) gives (B, M, D)."""
    return x.gather(1, index.unsqueeze(-1).expand(*index.shape, x.shape[-1]))


def without_padding(
    x: Tensor, mask: Tensor | None, run: Callable[[Tensor, Tensor | None], Tensor], *, prefix: int = 0
) -> Tensor:
    """Call `run(x, real)` with the real tokens of each row moved to the front, and move the outputs back.

    Padding becomes zeros after the real tokens, with real=False, and zeros in the result. Without a mask this is
    `run(x, None)`.

    Args:
        x: (B, N, D).
        mask: (B, N), True for real tokens, or None.
        run: takes the tokens (B, N, D) and real (B, N) or None, and returns (B, N, D').
        prefix: the number of leading tokens that stay in place.
    """
    if mask is None:
        return run(x, None)
    order = compact(mask[:, prefix:]) + prefix
    if prefix:
        order = torch.cat((torch.arange(prefix, device=mask.device).expand(len(mask), prefix), order), dim=1)
    real = mask.gather(1, order)
    y = run(take(x, order).masked_fill(~real.unsqueeze(-1), 0.0), real).masked_fill(~real.unsqueeze(-1), 0.0)
    return torch.empty_like(y).scatter(1, order.unsqueeze(-1).expand_as(y), y)


def scan_order(
    x: Tensor, mask: Tensor | None, run: Callable[[Tensor, Tensor | None], Tensor], *, backward: bool, prefix: int = 0
) -> Tensor:
    """Call `run(x, real)` with the real tokens in the order of a scan, and put the outputs back in their places.

    Args:
        x: (B, N, D).
        mask: (B, N), True for real tokens, or None.
        run: takes the tokens (B, N, D) and real (B, N) or None, and returns (B, N, D'). Padding comes last.
        backward: from the last token to the first.
        prefix: number of leading tokens that are moved to the middle of the other real tokens.
    """
    order = middle(mask, prefix, x) if prefix else None
    if order is not None:
        x, mask = take(x, order), None if mask is None else mask.gather(1, order)
    if backward:
        x, mask = x.flip(1), None if mask is None else mask.flip(1)
    y = without_padding(x, mask, run)
    y = y.flip(1) if backward else y
    return y if order is None else torch.empty_like(y).scatter(1, order.unsqueeze(-1).expand_as(y), y)


def middle(mask: Tensor | None, prefix: int, x: Tensor) -> Tensor:
    """The order (B, N) of tokens with the prefix in the middle: after ⌊M / 2⌋ of the M real tokens that follow it."""
    real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
    rank = real[:, prefix:].cumsum(1)  # 1 for the first real token
    half = rank[:, -1:] // 2
    place = torch.arange(prefix, device=x.device)
    key = torch.cat((half + place, torch.where(rank <= half, rank - 1, rank - 1 + prefix)), dim=1)
    return key.masked_fill(~real, x.shape[1]).argsort(dim=1, stable=True)


def next_window(seen: Tensor, n: int, real: Tensor | None) -> Tensor:
    """The window that the next chunk continues from: the last `reach` tokens.

    Args:
        seen: (B, reach + n, D), the old window followed by the chunk.
        n: the length of the chunk.
        real: (B, n), True for real tokens, which come first in the chunk; or None if all are. The new window ends at
            the last real token.
    """
    reach = seen.shape[1] - n
    if real is None:
        return seen[:, n:].clone()  # a view would keep the whole chunk in memory
    return take(seen, torch.arange(reach, device=seen.device) + real.sum(1, keepdim=True))


def after_window(u: Tensor, window: Tensor) -> Tensor:
    """Concatenate `window` (B, reach, D) and the chunk u (B, N, D), in float32 or wider."""
    dtype = accumulator(u.dtype)
    return torch.cat((window.to(dtype), u.to(dtype)), dim=1)


def causal_conv(u: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor | None) -> tuple[Tensor, Tensor]:
    """Apply a causal depthwise convolution to a chunk that continues from `window`.

    Args:
        u: the chunk, (B, N, D).
        weight: (D, 1, k).
        bias: (D) or None.
        window: the k - 1 tokens before the chunk, (B, k - 1, D); None for zeros.
    Returns:
        The output (B, N, D), and window and chunk together (B, k - 1 + N, D), for `next_window`.
    """
    if window is None:
        window = u.new_zeros(u.shape[0], weight.shape[-1] - 1, u.shape[2])
    seen = after_window(u, window)
    y = depthwise_conv(seen.to(u.dtype), weight, (u.shape[1],), causal=True)
    return (y if bias is None else y + bias.to(y.dtype)), seen


def apart(x: Tensor, segments: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Packed rows x (B, N, D) as one sequence per row: (S, L, D), its padding mask (S, L), and where each token went.

    For mixers that cannot keep packed sequences apart. y[where] brings the tokens back as (B · N, D).
    """
    batch, n = segments.shape
    rows = torch.arange(batch, device=x.device)[:, None].expand_as(segments)
    pairs = torch.stack((rows.flatten(), segments.flatten()), dim=1)
    _, row, sizes = torch.unique(pairs, dim=0, return_inverse=True, return_counts=True)
    order = row.argsort(stable=True)
    first = sizes.cumsum(0) - sizes
    column = torch.empty_like(row).scatter_(0, order, torch.arange(batch * n, device=x.device) - first[row[order]])
    where = (row, column)
    size = (len(sizes), int(sizes.max()))
    is_real = torch.ones_like(row, dtype=torch.bool) if real is None else real.flatten()
    mask = torch.zeros(size, dtype=torch.bool, device=x.device).index_put(where, is_real)
    return x.new_zeros(*size, x.shape[2]).index_put(where, x.flatten(0, 1)), mask, where
