"""Attention over channels: one similarity per channel (Hydra), or a channel-by-channel matrix (XCA)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.ops.shared.causal_sums import hide
from polymix.ops.shared.tensors import accumulator, without_autocast


class HydraState(NamedTuple):
    """The state of a recurrent Hydra, Σ_j k_j / |k_j| ⊙ v_j."""

    total: Tensor  # (B, D), in float32 or wider

    def merge(self, later: HydraState, carry: Tensor | None = None) -> HydraState:
        """The state after both parts of a sequence; nothing is forgotten, so that `carry` is None."""
        return HydraState(self.total + later.total)


def hydra(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    state: HydraState | None = None,
) -> tuple[Tensor, HydraState]:
    """Compute q_i / |q_i| ⊙ Σ_j k_j / |k_j| ⊙ v_j over all j, or over j ≤ i if causal.

    |·| is the norm over the channels, and 0 / 0 = 0.

    Args:
        q: (B, M, D).
        k: (B, N, D).
        v: (B, N, D).
        mask: (B, N), True for real tokens.
        causal: whether each token sees only itself and its past.
        state: the state before the first token, if causal; None for none.
    Returns:
        (B, M, D) in the dtype of v, and the state after the last token. Cost: O((M + N) D) elementwise operations.
    """
    dtype = accumulator(v.dtype)
    weighted = hydra_terms(k, v, mask)
    if causal:
        start = torch.zeros_like(weighted[:, :1]) if state is None else state.total[:, None]
        total = torch.cat((start, weighted), dim=1).cumsum(1)[:, 1:]
    else:
        total = weighted.sum(1, keepdim=True)
    y = F.normalize(q.to(dtype), dim=-1) * total
    return y.to(v.dtype), HydraState(total[:, -1].clone())


def hydra_terms(k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """k_j / |k_j| ⊙ v_j, (B, N, D) in float32 or wider; zero at padding."""
    dtype = accumulator(v.dtype)
    weighted = F.normalize(k.to(dtype), dim=-1) * v.to(dtype)
    return weighted if mask is None else weighted.masked_fill(~mask.unsqueeze(-1), 0.0)


def hydra_read(q: Tensor, state: HydraState) -> Tensor:
    """What `hydra` gives to queries that see all tokens of `state`, in the dtype of the state."""
    return F.normalize(q.to(state.total.dtype), dim=-1) * state.total[:, None]


def cross_covariance(q: Tensor, k: Tensor, v: Tensor, temperature: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Compute v_n Aᵀ with A = softmax(temperature · q̂ᵀ k̂) over the key channels (XCA).

    q̂ and k̂ are normalised to unit length along the tokens.

    Args:
        q: (B, h, N, d).
        k: (B, h, N, d).
        v: (B, h, N, d).
        temperature: (h, 1, 1).
        mask: (B, N), True for real tokens.
    Returns:
        (B, h, N, d) in the dtype of v, zero at padding; sums over tokens are kept in float32 or wider.
        Cost: 2 N d² multiply-adds per head.
    """
    dtype = accumulator(v.dtype)
    with without_autocast(q.device):
        q, k = (F.normalize(hide(part.to(dtype), mask), dim=2) for part in (q, k))
        weight = ((q.transpose(-1, -2) @ k) * temperature.to(dtype)).softmax(-1)  # (B, h, d, d)
        return (hide(v.to(dtype), mask) @ weight.transpose(-1, -2)).to(v.dtype)


def additive(q: Tensor, k: Tensor, w: Tensor | None, *, mask: Tensor | None = None) -> Tensor:
    """Compute k_j ⊙ Σ_i α_i q_i with α = a / |a|, a_i = q_i · w / √D, and |a| the norm along the tokens.

    Args:
        q: (B, N, D).
        k: (B, N, D).
        w: (D,); None for α_i = 1.
        mask: (B, N), True for real tokens.
    Returns:
        (B, N, D) in the dtype of k. Cost: N D multiply-adds with w, and O(N D) elementwise operations.
    """
    dtype = accumulator(q.dtype)
    with without_autocast(q.device):
        queries = q.to(dtype) if mask is None else q.to(dtype).masked_fill(~mask.unsqueeze(-1), 0.0)
        if w is not None:
            a = (queries @ (w.to(dtype) * q.shape[-1] ** -0.5).unsqueeze(-1)).squeeze(-1)
            queries = queries * F.normalize(a, dim=1).unsqueeze(-1)
        return (queries.sum(1, keepdim=True) * k.to(dtype)).to(k.dtype)
