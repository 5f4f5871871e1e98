"""Softmax attention of one query per head in C, as in a step of decoding, at the speed of reading keys and values once.

PyTorch's fused attention takes 2 to 7 times as long for one query, most of all in bfloat16.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from polymix.ops.dispatch import obstacle
from polymix.ops.native.library import call

MAX_WIDTH = 256  # channels of a head, as in decode_attention.c


class _Call(ctypes.Structure):
    """The struct Call of decode_attention.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "heads", "tokens", "width", "mask_stride", "bf16", "threads")),
        ("scale", ctypes.c_float),
    )


def try_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor | None:
    """softmax(scale · q Kᵀ) V for q (B, h, 1, d) and k, v (B, h, M, d), or None if the kernel cannot run.

    mask: boolean, (B or 1, 1, 1, M), True for what the query sees; a query that sees nothing gets zeros. Cost: 2 M d
    multiply-adds per head.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or q.shape[2] != 1:
        return None
    (batch, heads, _, width), tokens = q.shape, k.shape[2]
    fits = k.shape == v.shape == (batch, heads, tokens, width) and k.dtype == v.dtype == q.dtype
    if not fits or not q.numel() or width > MAX_WIDTH or not q.stride(3) == k.stride(3) == v.stride(3) == 1:
        return None
    if mask is not None:
        if mask.dtype != torch.bool or mask.shape[1:] != (1, 1, tokens) or mask.shape[0] not in (1, batch):
            return None
        mask = mask.contiguous()
    if obstacle("native", (q, k, v)) is not None:
        return None
    y = q.new_empty(q.shape)
    mask_stride = tokens if mask is not None and len(mask) > 1 else 0
    sizes = _Call(batch, heads, tokens, width, mask_stride, q.dtype == torch.bfloat16, torch.get_num_threads(), scale)
    call("decode_attention", q, k, v, mask, y, sizes)
    return y
