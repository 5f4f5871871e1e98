"""Sums over the keys that each query sees, as linear attentions need them: over all, or in chunks over the past."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 128  # tokens that see each other directly in the causal form; more costs N · CHUNK, less costs N / CHUNK states


def hide(x: Tensor, mask: Tensor | None) -> Tensor:
    """x (B, heads, N, ·) with zeros at padding, whatever stood there; mask (B, N)."""
    return x if mask is None else x.masked_fill(~mask[:, None, :, None], 0.0)


def in_chunks(x: Tensor, size: int, value: float = 0.0) -> Tensor:
    """(B, heads, N, ·) -> (B, heads, chunks, size, ·), the last chunk filled up with `value`."""
    return F.pad(x, (0, 0, 0, -x.shape[2] % size), value=value).unflatten(2, (-1, size))


def seen_by_all(k: Tensor, mask: Tensor | None) -> Tensor:
    """How many of the keys (B, h, N, ·) take part: (B or 1, 1, 1, 1)."""
    count = torch.full((1,), k.shape[2], device=k.device) if mask is None else mask.sum(1)
    return count[:, None, None, None]


def seen_by_each(k: Tensor, mask: Tensor | None, before: Tensor | None) -> Tensor:
    """How many of the keys (B, h, N, ·) up to each take part, those `before` the first (B) with them: (B, N)."""
    real = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device) if mask is None else mask
    return real.cumsum(1) if before is None else real.cumsum(1) + before[:, None]


def chunk_size(n: int) -> int:
    """CHUNK, or 1 for one token: not min(CHUNK, n), which would tie a compiled graph to one side of CHUNK."""
    return 1 if n == 1 else CHUNK


def causal_sums(
    asks: Tensor, keys: Tensor, values: Tensor, start: Tensor | None, similarity: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """φ(q_i) Σ_{j ≤ i} φ(k_j)ᵀ v_j in chunks, and the moments after the last token.

    asks and keys (B, h, chunks, c, F), values (B, h, chunks, c, e), start the moments (B, h, F, e) before the first
    token; `similarity` (…, c, c) is given where there is a shorter way to it than asks · keysᵀ. Returns
    (B, h, chunks · c, e) and (B, h, F, e). Cost: N (2 F e + c (F + e)) multiply-adds a head.
    """
    gained = keys.transpose(-1, -2) @ values  # (B, h, chunks, F, e)
    # The sum before each chunk comes from a shifted sum, never from a difference: that would let the future in.
    first = torch.zeros_like(gained[:, :, :1]) if start is None else start[:, :, None]
    running = torch.cat((first, gained), dim=2).cumsum(2)
    inside = asks @ keys.transpose(-1, -2) if similarity is None else similarity
    weighted = inside.tril() @ values + asks @ running[:, :, :-1]
    return weighted.flatten(2, 3), running[:, :, -1].clone()
