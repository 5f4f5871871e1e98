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

    def merge(self, later: HlaSummary, carry: Tensor | None = None) -> HlaState:
        """The state after a part of a sequence behind these tokens; nothing is forgotten, so that `carry` is None."""
        moments = self.moments + later.moments + self.keys @ later.products
        return HlaState(self.keys + later.keys, moments, self.count + later.count)


class HlaSummary(NamedTuple):
    """A part of a sequence: beside its own state what the keys in front of it are multiplied by."""

    keys: Tensor
    moments: Tensor
    products: Tensor  # Σ_j q_j ⊗ v_j, (B, heads, d, e), with q_j scaled by d^-½
    count: Tensor  # type: ignore[assignment]

    def merge(self, later: HlaSummary, carry: Tensor | None = None) -> HlaSummary:
        """The summary of this part and the one behind it."""
        products, count = self.products + later.products, self.count + later.count
        if not self.moments.numel():
            return HlaSummary(self.keys + later.keys, self.moments, products, count)
        return HlaSummary(*self.recurrent.merge(later)[:2], products, count)

    @property
    def recurrent(self) -> HlaState:
        """The state after this part, where it begins the sequence."""
        return HlaState(self.keys, self.moments, self.count)


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
        return _read(q, k.mT @ k, q.mT @ v_, seen_by_all(k, mask)).to(v.dtype)


def hla_summary(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = True
) -> HlaSummary:  # fmt: skip
    """What tokens do to the state, or with causal=False what `hla_read` needs of them; arguments as for `hla`."""
    dtype, n = accumulator(v.dtype), q.shape[2]
    with without_autocast(q.device):
        q, k, v = _scaled(q, dtype), hide(k.to(dtype), mask), hide(v.to(dtype), mask)
        count = seen_by_all(k, mask).flatten().expand(k.shape[0]).clone()
        if not causal:  # no moments
            return HlaSummary(k.mT @ k, k.new_zeros(0), q.mT @ v, count)
        queries, chunks = in_chunks(q, chunk_size(n)), in_chunks(k, chunk_size(n))
        read, keys = causal_sums(queries, chunks, chunks, None)
        return HlaSummary(keys, first_tokens(read, n).mT @ v, q.mT @ v, count)


def hla_read(q: Tensor, state: HlaSummary) -> Tensor:
    """What `hla` gives to queries that see all tokens of `state`, in the dtype of the state."""
    with without_autocast(q.device):
        scaled = _scaled(q, state.keys.dtype)
        return _read(scaled, state.keys, state.products, state.count[:, None, None, None])


def _read(q: Tensor, keys: Tensor, products: Tensor, count: Tensor) -> Tensor:
    seen = count.clamp_min(1).to(q.dtype)
    return q @ ((keys / seen) @ (products / seen))


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
