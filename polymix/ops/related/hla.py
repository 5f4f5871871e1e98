"""Second-order higher-order linear attention: a token's weight is how alike two queries see the keys."""

from __future__ import annotations

from typing import NamedTuple

import torch
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


class HlaState(NamedTuple):
    """The state of a recurrent second-order HLA. Its size does not depend on the number of tokens seen."""

    keys: Tensor  # S = Σ_m k_m ⊗ k_m, (B, heads, d, d), in float32 or wider
    moments: Tensor  # H = Σ_j S_j q_j ⊗ v_j, (B, heads, d, e), with S_j after token j and q_j scaled by d^-½
    count: Tensor  # type: ignore[assignment]  # (B,) the number of real tokens seen, int64


def hla(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Compute Σ_j Σ_m (q_i·k_m)(q_j·k_m) v_j / d over all tokens, divided by their number squared: Q (KᵀK) (QᵀV).

    Args:
        q: (B, h, N, d).
        k: (B, h, N, d).
        v: (B, h, N, e).
        mask: (B, N), True for real tokens.
    Returns:
        (B, h, N, e) in the dtype of v; zeros for samples without real tokens. Sums are kept in float32 or wider.
        Cost: N d (d + 2 e) + d² e multiply-adds per head.
    """
    dtype = accumulator(v.dtype)
    with without_autocast(q.device):
        q, k, v_ = _scaled(q, dtype), hide(k.to(dtype), mask), hide(v.to(dtype), mask)
        seen = seen_by_all(k, mask).clamp_min(1).to(dtype)
        y = q @ ((k.mT @ k / seen) @ (q.mT @ v_ / seen))
        return y.to(v.dtype)


def hla_causal(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, state: HlaState | None = None
) -> tuple[Tensor, HlaState]:
    """The masked form: y_i = Σ_{m ≤ j ≤ i} (q_i·k_m)(q_j·k_m) v_j / d over the number of those pairs, and the state.

    With S_j = Σ_{m ≤ j} k_m k_mᵀ it is q_i Σ_{j ≤ i} (S_j q_j) v_jᵀ: linear attention whose keys S_j q_j are the
    outputs of another, which reads k as keys and as values. So both sums run in chunks. The paper writes the same sum
    as a difference, S_i C_i - G_i, which would cancel in low precision.

    The arguments are those of `hla`; `state` is the state before the first token. Cost: N (d (2 d + 2 e) + c (3 d + e))
    multiply-adds per head for chunks of c = 128 tokens.
    """
    dtype, n = accumulator(v.dtype), q.shape[2]
    size, (keys_before, before, count) = chunk_size(n), state or (None, None, None)
    seen = seen_by_each(k, mask, count)
    with without_autocast(q.device):
        parts = (_scaled(q, dtype), hide(k.to(dtype), mask), hide(v.to(dtype), mask))
        queries, keys, values = (in_chunks(part, size) for part in parts)
        read, key_moments = causal_sums(queries, keys, keys, keys_before)
        weighted, moments = causal_sums(queries, read.reshape(keys.shape), values, before)
        real = seen[:, None, :, None].clamp_min(1).to(dtype)
        y = first_tokens(weighted, n) / (real * (real + 1) / 2)
    return y.to(v.dtype), HlaState(key_moments, moments, seen[:, -1].clone())


def _scaled(q: Tensor, dtype: torch.dtype) -> Tensor:
    return q.to(dtype) * q.shape[-1] ** -0.5
