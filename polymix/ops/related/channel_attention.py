"""Attention between channels: one similarity a channel (Hydra), or a matrix of channels by channels (XCA)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.ops.shared.causal_sums import hide
from polymix.ops.shared.tensors import accumulator, without_autocast


class HydraState(NamedTuple):
    """What a recurrent Hydra remembers: Σ_j k_j / |k_j| ⊙ v_j."""

    total: Tensor  # (B, D), float32 at least


def hydra(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    state: HydraState | None = None,
) -> tuple[Tensor, HydraState]:
    """q_i / |q_i| ⊙ Σ_j k_j / |k_j| ⊙ v_j over all j, or over j ≤ i; |·| over the channels, 0 / 0 = 0.

    q (B, M, D), k and v (B, N, D), mask (B, N) -> (B, M, D) in the type of v and the sum after the last token, kept in
    float32 at least. O((M + N) D), no product at all.
    """
    dtype = accumulator(v.dtype)
    gained = F.normalize(k.to(dtype), dim=-1) * v.to(dtype)
    if mask is not None:
        gained = gained.masked_fill(~mask.unsqueeze(-1), 0.0)
    if causal:
        start = torch.zeros_like(gained[:, :1]) if state is None else state.total[:, None]
        total = torch.cat((start, gained), dim=1).cumsum(1)[:, 1:]
    else:
        total = gained.sum(1, keepdim=True)
    y = F.normalize(q.to(dtype), dim=-1) * total
    return y.to(v.dtype), HydraState(total[:, -1].clone())


def cross_covariance(q: Tensor, k: Tensor, v: Tensor, temperature: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """v_n Aᵀ with A = softmax(temperature · q̂ᵀ k̂) over the key channels, q̂ and k̂ of unit length along the tokens.

    q, k, v (B, h, N, d), temperature (h, 1, 1), mask (B, N) -> (B, h, N, d) in the type of v, zeros at padding. Sums
    over the tokens are kept in float32 at least. Cost: 2 N d² multiply-adds a head.
    """
    dtype = accumulator(v.dtype)
    with without_autocast(q.device):
        q, k = (F.normalize(hide(part.to(dtype), mask), dim=2) for part in (q, k))
        weight = ((q.transpose(-1, -2) @ k) * temperature.to(dtype)).softmax(-1)  # (B, h, d, d)
        return (hide(v.to(dtype), mask) @ weight.transpose(-1, -2)).to(v.dtype)
