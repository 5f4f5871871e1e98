"""Helpers of the reference implementations: token maps, heads, rotations, softmax weights. Used by tests only."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def mix_tokens(a: Tensor, x: Tensor) -> Tensor:
    """A X for A (N, N), or channel by channel for A (D, N, N)."""
    return torch.einsum("mn,bnd->bmd", a, x) if a.ndim == 2 else torch.einsum("dmn,bnd->bmd", a, x)


def plus(x: Tensor, bias: Tensor | None) -> Tensor:
    """x + bias; None is no bias."""
    return x if bias is None else x + bias


def turn(x: Tensor, position: Tensor, frequencies: Tensor) -> Tensor:
    """Rotate each pair (k, k + width/2) of features of x (B, N, width) by position (B or 1, N) times frequency k."""
    out = torch.empty_like(x)
    half = x.shape[-1] // 2
    for k in range(half):
        angle = position.to(torch.float64) * frequencies[k]
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        out[..., k] = x[..., k] * cos - x[..., k + half] * sin
        out[..., k + half] = x[..., k + half] * cos + x[..., k] * sin
    return out


def heads_of(x: Tensor, W: Tensor, b: Tensor | None, heads: int) -> Tensor:
    """X W + b, split into heads (B, heads, N, d)."""
    return plus(x @ W, b).unflatten(-1, (heads, -1)).transpose(1, 2)


def joined(y: Tensor, W_o: Tensor, b_o: Tensor | None) -> Tensor:
    """Join the heads of y (B, heads, N, d) and project: Y W_o + b_o."""
    return plus(y.transpose(1, 2).flatten(-2) @ W_o, b_o)


def weights(q: Tensor, k: Tensor, visible: Tensor, bias: Tensor | None = None) -> Tensor:
    """softmax(Q Kᵀ / √d + bias) over the visible keys (B, N, M); zeros for a query that sees none."""
    logits = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + (0.0 if bias is None else bias)
    return logits.masked_fill(~visible[:, None], -torch.inf).softmax(-1).nan_to_num(0.0)
