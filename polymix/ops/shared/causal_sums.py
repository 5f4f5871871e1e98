"""Sums over the keys that each query sees, for linear attention: over all keys, or causally in chunks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Tokens in a chunk; within a chunk, pairs are computed directly. Larger chunks cost N · CHUNK more products, smaller
# ones keep N / CHUNK more states.
CHUNK = 128


def hide(x: Tensor, mask: Tensor | None) -> Tensor:
    """Zero x (B, heads, N, ·) at padding, even where it holds NaN; mask is (B, N), True for real tokens."""
    return x if mask is None else x.masked_fill(~mask[:, None, :, None], 0.0)


def in_chunks(x: Tensor, size: int, value: float = 0.0) -> Tensor:
    """Reshape (B, heads, N, ·) to (B, heads, chunks, size, ·), padding the last chunk with `value`."""
    tokens = x.shape[2]
    # In an exported graph for any N, at least two chunks: one alone would become the only number that it takes.
    chunks = tokens // size + 2 if any_length(tokens) else -(-tokens // size)
    padded = F.pad(x, (0, 0, 0, chunks * size - tokens), value=value)
    if any_length(tokens):  # unflatten would be proven to split so for the example's N alone
        return padded.unfold(2, size, size).mT
    return padded.unflatten(2, (chunks, size))


def first_tokens(x: Tensor, tokens: int) -> Tensor:
    """The first tokens of x (B, heads, ≥ N, ·) without the padding of `in_chunks`: (B, heads, N, ·)."""
    if any_length(tokens):  # a slice would be proven to be shorter for the example's N alone
        return x.index_select(2, torch.arange(tokens, device=x.device))
    return x[:, :, :tokens]


def any_length(tokens: int) -> bool:
    """Whether a graph for any number of tokens is being recorded by torch.export."""
    return torch.compiler.is_exporting() and not isinstance(tokens, int)


def seen_by_all(k: Tensor, mask: Tensor | None) -> Tensor:
    """Count the real keys of k (B, h, N, ·): (B or 1, 1, 1, 1)."""
    count = torch.full((1,), k.shape[2], device=k.device) if mask is None else mask.sum(1)
    return count[:, None, None, None]


def seen_by_each(k: Tensor, mask: Tensor | None, before: Tensor | None) -> Tensor:
    """Count the real keys of k (B, h, N, ·) up to each token, plus the `before` (B) of earlier calls: (B, N)."""
    real = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device) if mask is None else mask
    return real.cumsum(1) if before is None else real.cumsum(1) + before[:, None]


def chunk_size(n: int) -> int:
    """CHUNK, or 1 for a single token. min(CHUNK, n) would specialise a compiled graph to n above or below CHUNK."""
    return 1 if n == 1 else CHUNK


def causal_sums(
    queries: Tensor, keys: Tensor, values: Tensor, start: Tensor | None, similarity: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute φ(q_i) Σ_{j ≤ i} φ(k_j)ᵀ v_j in chunks.

    Args:
        queries: φ(q), (B, h, chunks, c, F).
        keys: φ(k), (B, h, chunks, c, F).
        values: (B, h, chunks, c, e).
        start: the moments Σ φ(k)ᵀ v before the first token, (B, h, F, e); None for zeros.
        similarity: φ(q) φ(k)ᵀ, (…, c, c), if it can be computed more cheaply than by that product.
    Returns:
        The sums (B, h, chunks · c, e), and the moments after the last token (B, h, F, e).
        Cost: N (2 F e + c (F + e)) multiply-adds per head.
    """
    moments = keys.transpose(-1, -2) @ values  # (B, h, chunks, F, e)
    # The sum before each chunk is a shifted sum. A difference of sums would leak the future through rounding.
    first = torch.zeros_like(moments[:, :, :1]) if start is None else start[:, :, None]
    running = torch.cat((first, moments), dim=2).cumsum(2)
    inside = queries @ keys.transpose(-1, -2) if similarity is None else similarity
    weighted = inside.tril() @ values + queries @ running[:, :, :-1]
    return weighted.flatten(2, 3), running[:, :, -1].clone()
