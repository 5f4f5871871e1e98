"""Softmax attention under any mask, over the last few tokens alone, and the pooling that one learned query does."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

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
    """softmax(scale · Q Kᵀ + bias) V by PyTorch's fused kernel: q (B, h, N, d), k and v (B, h, M, d) -> (B, h, N, d).

    mask (B, M) or (B, N, M), causal and segments as in a mixer's call; bias (h, N, M). A query that sees nothing gets
    zeros. Cost: 2 N M d multiply-adds a head.
    """
    if mask is not None and mask.ndim == 2:  # whatever padding holds, NaN too, must not get through
        k, v = (part.masked_fill(~mask[:, None, :, None], 0.0) for part in (k, v))
    if causal == 1 and mask is None and segments is None and bias is None:
        return _attention(q, k, v, is_causal=True, scale=scale)
    visible = dense_mask(q.shape[2], k.shape[2], mask, causal, segments, q.device)
    if visible is None:
        return _attention(q, k, v, attn_mask=None if bias is None else bias[None], scale=scale)
    visible = visible.unsqueeze(1)  # (B or 1, 1, N or 1, M)
    empty = ~visible.any(-1, keepdim=True)  # softmax over nothing is NaN in some kernels: see all, then zero
    seen = visible | empty
    added = seen if bias is None else bias.masked_fill(~seen, -torch.inf)
    y = _attention(q, k, v, attn_mask=added, scale=scale)
    return y.masked_fill(empty, 0.0)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """PyTorch's fused attention, or its definition under forward-mode derivatives, which no fused kernel has."""
    if not forward_mode():
        return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale)
    logits = scale * (q @ k.transpose(-1, -2))
    if is_causal:
        attn_mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if attn_mask is not None:
        logits = logits.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else logits + attn_mask
    return logits.softmax(-1) @ v


class Past(NamedTuple):
    """Keys and values (B, window - 1, h, d) of the tokens before the first, of which the last `seen` (B,) are real."""

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
    """softmax(scale · Q Kᵀ) V over the last `window` tokens up to each, itself among them, by PyTorch's fused kernel.

    q, k, v (B, N, h, d) -> (B, N, h, d). segments (B, N): ids of packed sequences, of which those of one id stand
    together and see each other alone; not with a past. Blocks of `window` queries, each with its own and the previous
    block of keys, are a batch to the kernel. Cost: 4 N window d multiply-adds a head; 2 N² d up to N = window.
    """
    batch, n, heads, width = q.shape
    traced = torch.compiler.is_compiling()
    whole = n == 1 or (not traced and n <= window)  # a graph must not ask on which side of the window N lies
    if whole and past is None and segments is None:
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        return _attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2)
    if past is not None:
        before = [part if whole else F.pad(part, (0, 0, 0, 0, 1, 0)) for part in (past.keys, past.values)]
    else:
        before = [q.new_zeros(batch, 0 if whole else window, heads, width)] * 2
    size, far = n if whole else window, before[0].shape[1]
    count = 1 if whole else (n + size - 1) // size + traced  # nor whether there is more than one block
    asks = _blocks(q, size, count)
    keys, values = (_behind(front, _blocks(part, size, count)) for front, part in zip(before, (k, v), strict=True))
    near = torch.arange(-far, size, device=q.device)  # keys, by their place in the block of the queries
    gap = torch.arange(size, device=q.device)[:, None] - near
    place = torch.arange(count, device=q.device)[:, None] * size + near
    there = place >= 0 if past is None else place >= -past.seen[:, None, None]
    see = (gap >= 0) & (gap < window) & there.unsqueeze(-2)  # ([B,] blocks, size, far + size)
    if segments is not None:
        ids = _blocks(segments, size, count)
        see = see & (ids.unsqueeze(-1) == _behind(ids.new_zeros(batch, far), ids).unsqueeze(-2))
    see = see.expand(batch, count, size, far + size).flatten(0, 1).unsqueeze(1)
    asks, keys, values = (part.flatten(0, 1).transpose(1, 2) for part in (asks, keys, values))
    y = _attention(asks, keys, values, attn_mask=see, scale=scale)
    y = y.transpose(1, 2).unflatten(0, (batch, -1 if batch else count)).flatten(1, 2)
    return y.index_select(1, torch.arange(n, device=q.device)) if traced else y[:, :n]


def _blocks(x: Tensor, size: int, count: int) -> Tensor:
    """(B, N, …) -> (B, count, size, …), filled up with zeros; by unfold, since a graph must not ask what divides N."""
    filled = F.pad(x, (0, 0) * (x.ndim - 2) + (0, count * size - x.shape[1]))
    return filled.unfold(1, size, size).movedim(-1, 2)


def _behind(front: Tensor, blocks: Tensor) -> Tensor:
    """Each block of (B, count, size, …) behind the one before it, the first behind `front` (B, far, …)."""
    earlier = front.unsqueeze(1)
    if blocks.shape[1] != 1:
        earlier = torch.cat((earlier, blocks), dim=1)[:, : blocks.shape[1]]
    return torch.cat((earlier, blocks), dim=2)


def softmax_pool(x: Tensor, logits: Tensor, mask: Tensor | None) -> Tensor:
    """Σ_j softmax_j(logits) x_j: x (B, N, D), logits (B, N, K), mask (B, N) -> (B, K, D) in float32 at least.

    Zero where no token is real. Cost: K N D multiply-adds.
    """
    dtype = accumulator(x.dtype)
    with without_autocast(x.device):
        x, logits = x.to(dtype), logits.to(dtype)
        if mask is not None:
            hidden = ~mask.unsqueeze(-1)
            x, logits = x.masked_fill(hidden, 0.0), logits.masked_fill(hidden, torch.finfo(dtype).min)
        return logits.softmax(1).transpose(1, 2) @ x
