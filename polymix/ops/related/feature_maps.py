"""Feature maps of linear attentions that depend on other tokens, on signs, or on learned powers."""

from __future__ import annotations

import torch
from torch import Tensor

from polymix.ops.shared.causal_sums import hide, seen_by_all
from polymix.ops.shared.tensors import without_autocast

TINY = 1e-30  # its logarithm and its inverse are finite in float32


def signed_powers(x: Tensor, power: Tensor) -> Tensor:
    """[relu(x)^p, relu(-x)^p] along the channels: (…, d) -> (…, 2 d). `power` broadcasts with x.

    By logarithms, so that derivatives of every order are finite where x is zero.
    """
    raised = (x.abs().clamp_min(TINY).log() * power).exp()
    return torch.cat((raised.masked_fill(x <= 0, 0.0), raised.masked_fill(x >= 0, 0.0)), -1)


def length(x: Tensor) -> Tensor:
    """|x| over the channels, (…, 1), with a finite derivative at zero."""
    return (x.square().sum(-1, keepdim=True) + TINY).sqrt()


def augmented_keys(q: Tensor, k: Tensor, *, own: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """n α_j k_j, with α the softmax over the n keys of q̄·k_j / √d, and q̄ the mean of all queries (RALA).

    Args:
        q: (B, h, M, d), in float32 or wider.
        k: (B, h, N, d), of the same dtype.
        own: (B, M), True for real queries.
        mask: (B, N), True for real keys.
    Returns:
        (B, h, N, d). Cost: N d multiply-adds per head.
    """
    with without_autocast(q.device):
        mean = hide(q, own).sum(2, keepdim=True) / seen_by_all(q, own).clamp_min(1)
        logits = (mean * q.shape[-1] ** -0.5) @ hide(k, mask).mT  # (B, h, 1, N)
        if mask is not None:  # finite, so that a row with only padding does not become NaN
            logits = logits.masked_fill(~mask[:, None, None], torch.finfo(q.dtype).min)
        return k * (logits.softmax(-1).mT * seen_by_all(k, mask))
