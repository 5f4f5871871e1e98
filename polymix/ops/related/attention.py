"""Softmax attention with any mask, local attention over a window, and attention pooling."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.ops.decode import try_attention
from polymix.ops.shared.masks import Segments, dense_mask
from polymix.ops.shared.tensors import accumulator, forward_mode, without_autocast


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    causal: int = 0,
    segments: Segments | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute softmax(scale · Q Kᵀ + bias) V with PyTorch's fused kernel.

    A query that sees no keys gets zeros.

    Args:
        q: (B, h, N, d).
        k: (B, h, M, d).
        v: (B, h, M, d).
        scale: the factor of the logits, usually 1/√d.
        mask: (B, M), True for real keys; or (B, N, M), for each query.
        causal: 0, 1, or K for block-causal with blocks of K tokens.
        segments: ids (B, N) of packed sequences, or (query ids, key ids).
        bias: (h, N, M), added to the logits.
    Returns:
        (B, h, N, d). Cost: 2 N M d multiply-adds per head.
    """
    if mask is not None and mask.ndim == 2:  # padding may hold NaN, which must not reach the output
        k, v = (part.masked_fill(~mask[:, None, :, None], 0.0) for part in (k, v))
    if causal == 1 and mask is None and segments is None and bias is None:
        return _attention(q, k, v, is_causal=True, scale=scale)
    visible = dense_mask(q.shape[2], k.shape[2], mask, causal, segments, q.device)
    if visible is None:
        return _attention(q, k, v, attn_mask=None if bias is None else bias[None], scale=scale)
    visible = visible.unsqueeze(1)  # (B or 1, 1, N or 1, M)
    empty = ~visible.any(-1, keepdim=True)  # some kernels return NaN without keys, so let these see all, then zero them
    seen = visible | empty
    added = seen if bias is None else bias.masked_fill(~seen, -torch.inf)
    y = _attention(q, k, v, attn_mask=added, scale=scale)
    return y.masked_fill(empty, 0.0)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """PyTorch's fused attention, or our kernel for one query, or the definition under forward-mode derivatives."""
    if q.shape[2] == 1 and (not is_causal or k.shape[2] == 1):
        y = try_attention(q, k, v, attn_mask, scale)
        if y is not None:
            return y
    if not forward_mode():
        return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale)
    logits = scale * (q @ k.transpose(-1, -2))
    if is_causal:
        attn_mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if attn_mask is not None:
        logits = logits.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else logits + attn_mask
    return logits.softmax(-1) @ v


class Past(NamedTuple):
    """The keys and values (B, window - 1, h, d) of the previous tokens; the last `seen` (B,) of them are real."""

    keys: Tensor
    values: Tensor
    seen: Tensor


def local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    scale: float,
    past: Past | None = None,
    segments: Tensor | None = None,
) -> Tensor:
    """Compute causal softmax(scale · Q Kᵀ) V where each token sees the last `window` tokens, including itself.

    PyTorch's fused kernel gets blocks of `window` queries as a batch, each with its own block of keys and the
    previous one.

    Args:
        q: (B, N, h, d).
        k: (B, N, h, d).
        v: (B, N, h, d).
        window: the number of tokens that each token sees.
        scale: the factor of the logits, usually 1/√d.
        past: the previous tokens; None for none.
        segments: ids (B, N) of packed sequences, which must be contiguous; not together with `past`.
    Returns:
        (B, N, h, d). Cost: 4 N window d multiply-adds per head; 2 N² d if N ≤ window.
    """
    batch, n, heads, width = q.shape
    traced = torch.compiler.is_compiling()
    one_block = n == 1 or (not traced and n <= window)  # a graph must not depend on whether N exceeds the window
    if one_block and past is None and segments is None:
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        return _attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2)
    if past is not None:
        before = [part if one_block else F.pad(part, (0, 0, 0, 0, 1, 0)) for part in (past.keys, past.values)]
    else:
        before = [q.new_zeros(batch, 0 if one_block else window, heads, width)] * 2
    size, far = n if one_block else window, before[0].shape[1]
    count = 1 if one_block else (n + size - 1) // size + traced  # one extra when traced: no branch on count
    queries = _blocks(q, size, count)
    keys, values = (_behind(front, _blocks(part, size, count)) for front, part in zip(before, (k, v), strict=True))
    offset = torch.arange(-far, size, device=q.device)  # of the keys from the start of the block of queries
    distance = torch.arange(size, device=q.device)[:, None] - offset
    index = torch.arange(count, device=q.device)[:, None] * size + offset
    exists = index >= 0 if past is None else index >= -past.seen[:, None, None]
    visible = (distance >= 0) & (distance < window) & exists.unsqueeze(-2)  # ([B,] blocks, size, far + size)
    if segments is not None:
        ids = _blocks(segments, size, count)
        visible = visible & (ids.unsqueeze(-1) == _behind(ids.new_zeros(batch, far), ids).unsqueeze(-2))
    visible = visible.expand(batch, count, size, far + size).flatten(0, 1).unsqueeze(1)
    queries, keys, values = (part.flatten(0, 1).transpose(1, 2) for part in (queries, keys, values))
    y = _attention(queries, keys, values, attn_mask=visible, scale=scale)
    y = y.transpose(1, 2).unflatten(0, (batch, -1 if batch else count)).flatten(1, 2)
    return y.index_select(1, torch.arange(n, device=q.device)) if traced else y[:, :n]


def _blocks(x: Tensor, size: int, count: int) -> Tensor:
    """Reshape (B, N, …) to (B, count, size, …), padded with zeros; by unfold, because a graph must not divide N."""
    filled = F.pad(x, (0, 0) * (x.ndim - 2) + (0, count * size - x.shape[1]))
    return filled.unfold(1, size, size).movedim(-1, 2)


def _behind(front: Tensor, blocks: Tensor) -> Tensor:
    """Put the previous block in front of each block of (B, count, size, …), and `front` in front of the first."""
    earlier = front.unsqueeze(1)
    if blocks.shape[1] != 1:
        earlier = torch.cat((earlier, blocks), dim=1)[:, : blocks.shape[1]]
    return torch.cat((earlier, blocks), dim=2)


def softmax_pool(x: Tensor, logits: Tensor, mask: Tensor | None) -> Tensor:
    """Σ_j softmax_j(logits) x_j: x (B, N, D), logits (B, N, K), mask (B, N) -> (B, K, D) in float32 or wider.

    Zero for samples without real tokens. Cost: K N D multiply-adds.
    """
    dtype = accumulator(x.dtype)
    with without_autocast(x.device):
        x, logits = x.to(dtype), logits.to(dtype)
        if mask is not None:
            hidden = ~mask.unsqueeze(-1)
            x, logits = x.masked_fill(hidden, 0.0), logits.masked_fill(hidden, torch.finfo(dtype).min)
        return logits.softmax(1).transpose(1, 2) @ x
