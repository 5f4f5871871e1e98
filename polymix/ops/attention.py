"""Softmax attention over tokens under any mask, and the pooling that one learned query does."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.ops.common import accumulator, without_autocast
from polymix.ops.visibility import Segments, dense_mask


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
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    visible = dense_mask(q.shape[2], k.shape[2], mask, causal, segments, q.device)
    if visible is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=None if bias is None else bias[None], scale=scale)
    visible = visible.unsqueeze(1)  # (B or 1, 1, N or 1, M)
    empty = ~visible.any(-1, keepdim=True)  # softmax over nothing is NaN in some kernels: see all, then zero
    seen = visible | empty
    added = seen if bias is None else bias.masked_fill(~seen, -torch.inf)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=added, scale=scale)
    return y.masked_fill(empty, 0.0)


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
