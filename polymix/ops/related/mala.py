"""Magnitude-aware linear attention: weights that sum to 1 and still grow apart with the length of the query."""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from polymix.ops.shared.causal_sums import (
    causal_sums,
    chunk_size,
    first_tokens,
    hide,
    in_chunks,
    seen_by_all,
    seen_by_each,
)
from polymix.ops.shared.tensors import accumulator, without_autocast

EPS = 1e-6


class MalaState(NamedTuple):
    """The state of a recurrent magnitude-aware linear attention. Its size does not depend on the tokens seen."""

    moments: Tensor  # Σ_j φ(k_j) ⊗ [v_j, 1], (B, heads, F, e + 1), in float32 or wider
    total: Tensor  # Σ_j v_j, (B, heads, e)
    count: Tensor  # type: ignore[assignment]  # (B,) the number of real tokens seen, int64

    def merge(self, later: MalaState, carry: Tensor | None = None) -> MalaState:
        """The state after both parts of a sequence; nothing is forgotten, so that `carry` is None."""
        return MalaState(*(mine + its for mine, its in zip(self, later, strict=True)))


def mala(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Compute Σ_j (s_ij (1 + 1 / (z_i + 1e-6)) - z_i) v_j / n with s_ij = q_i·k_j and z_i their mean over the n keys.

    Args:
        q: φ(q), (B, h, M, F), with the scale of the similarities.
        k: φ(k), (B, h, N, F).
        v: (B, h, N, e).
        mask: (B, N), True for real keys.
    Returns:
        (B, h, M, e) in the dtype of v; zeros for samples without real keys. Sums are kept in float32 or wider.
        Cost: (M + N) F (e + 1) multiply-adds per head.
    """
    return mala_read(q, mala_pool(k, v, mask=mask)).to(v.dtype)


def mala_pool(k: Tensor, v: Tensor, *, mask: Tensor | None = None) -> MalaState:
    """What `mala` needs of its keys and values."""
    k, v = _real(k, v, mask)
    with without_autocast(k.device):
        return MalaState(
            k.mT @ F.pad(v, (0, 1), value=1.0), v.sum(2), seen_by_all(k, mask).flatten().expand(k.shape[0])
        )


def mala_read(q: Tensor, state: MalaState) -> Tensor:
    """What `mala` gives to queries that see all tokens of `state`, in the dtype of the state."""
    with without_autocast(q.device):
        weighted = q.to(state.moments.dtype) @ state.moments
    return _finish(weighted, state.total[:, :, None], state.count[:, None, None, None])


def mala_causal(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, state: MalaState | None = None
) -> tuple[Tensor, MalaState]:
    """The causal form of `mala`, whose sums and counts are over the tokens up to each; and the state after the last.

    `state` is the state before the first token. Cost: N c (F + e + 1) multiply-adds per head more, for chunks of
    c = 128 tokens.
    """
    out, n = v.dtype, q.shape[2]
    size, (before, total, count) = chunk_size(n), state or (None, None, None)
    seen = seen_by_each(k, mask, count)
    k, v = _real(k, v, mask)
    with without_autocast(q.device):
        parts = (q.to(v.dtype), k, hide(F.pad(v, (0, 1), value=1.0), mask))
        queries, keys, values = (in_chunks(part, size) for part in parts)
        weighted, moments = causal_sums(queries, keys, values, before)
    totals = v.cumsum(2) if total is None else v.cumsum(2) + total[:, :, None]
    y = _finish(first_tokens(weighted, n), totals, seen[:, None, :, None])
    return y.to(out), MalaState(moments, totals[:, :, -1].clone(), seen[:, -1].clone())


def _real(k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    dtype = accumulator(v.dtype)
    return hide(k.to(dtype), mask), hide(v.to(dtype), mask)


def _finish(weighted: Tensor, total: Tensor, seen: Tensor) -> Tensor:
    """The output of Σ_j s_ij [v_j, 1] and Σ_j v_j over the `seen` keys."""
    seen = seen.clamp_min(1).to(weighted.dtype)
    top, z = weighted[..., :-1] / seen, weighted[..., -1:] / seen
    return top * (1 + 1 / (z + EPS)) - z * (total / seen)
