"""Linear attention: with the similarity φ(q)·φ(k), keys and values are pooled once, to the moments Σ_j φ(k_j) ⊗ v_j.

The functions take the features φ(q) and φ(k); each mixer defines its own φ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.ops.shared.activations import identity
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


def _elu_plus_one(x: Tensor) -> Tensor:
    """elu(x) + 1, computed without the intermediate e^x - 1, which loses precision far below zero."""
    return torch.where(x > 0, x + 1, x.clamp_max(0).exp())


FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {"elu+1": _elu_plus_one, "relu": F.relu, "identity": identity}


class LinearState(NamedTuple):
    """The state of a recurrent linear attention. Its size does not depend on the number of tokens seen."""

    moments: Tensor  # Σ_j φ(k_j) ⊗ [v_j, 1], (B, heads, F, d + 1); without the 1 if normalize is off
    count: Tensor  # type: ignore[assignment]  # (B,) the number of real tokens seen, int64

    def merge(self, later: LinearState, carry: Tensor | None = None) -> LinearState:
        """The state after both parts of a sequence; nothing is forgotten, so that `carry` is None."""
        return LinearState(self.moments + later.moments, self.count + later.count)


def _finish(weighted: Tensor, seen: Tensor, normalize: bool, scale: float | None, eps: float, relative: bool) -> Tensor:
    """Turn sums over the keys into the output; `seen` is the number of keys that each query sees."""
    seen = seen.clamp_min(1).to(weighted.dtype)  # avoids 0 / 0
    if not normalize:
        return weighted / seen if scale is None else weighted * scale
    numerator, denominator = weighted[..., :-1], weighted[..., -1:]
    if scale is not None:
        numerator = numerator * (seen * scale)
    return numerator / (denominator + (eps * seen if relative else eps))


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    normalize: bool = True,
    scale: float | None = None,
    eps: float = 1e-6,
    relative: bool = True,
) -> Tensor:
    """Compute scale · q Σ_j k_jᵀ v_j; if `normalize`, divided by q · mean_j k_j + eps. q and k are features.

    Args:
        q: φ(q), (B, h, M, F).
        k: φ(k), (B, h, N, F).
        v: (B, h, N, d).
        mask: (B, N), True for real keys.
        normalize: whether to divide by the sum of the similarities.
        scale: None for 1 over the number of keys, which with `normalize` gives a weighted mean of the values.
        eps: added to the mean of q · k over the keys, or to their sum if relative=False.
        relative: see `eps`.
    Returns:
        (B, h, M, d) in the dtype of v; zeros for samples without real keys. Sums are kept in float32 or wider.
        Cost: (M + N) F (d + 1) multiply-adds per head, or (M + N) F d without `normalize`.
    """
    moments, seen = _moments(k, v, mask, normalize), seen_by_all(k, mask)
    return _ask(q, moments, seen, normalize, scale, eps, relative).to(v.dtype)


def _moments(k: Tensor, v: Tensor, mask: Tensor | None, normalize: bool) -> Tensor:
    dtype = accumulator(v.dtype)
    with without_autocast(k.device):
        values = v.to(dtype)
        values = hide(F.pad(values, (0, 1), value=1.0) if normalize else values, mask)
        return hide(k.to(dtype), mask).transpose(-1, -2) @ values


def _ask(
    q: Tensor, moments: Tensor, seen: Tensor, normalize: bool, scale: float | None, eps: float, relative: bool
) -> Tensor:
    with without_autocast(q.device):
        return _finish(q.to(moments.dtype) @ moments, seen, normalize, scale, eps, relative)


def linear_pool(k: Tensor, v: Tensor, *, mask: Tensor | None = None, normalize: bool = True) -> LinearState:
    """What `linear_attention` needs of its keys and values; arguments as there."""
    return LinearState(_moments(k, v, mask, normalize), seen_by_all(k, mask).flatten().expand(k.shape[0]).clone())


def linear_read(
    q: Tensor, state: LinearState, *, normalize: bool = True, scale: float | None = None, eps: float = 1e-6
) -> Tensor:
    """What `linear_attention` gives to queries that see all tokens of `state`, in the dtype of the state."""
    return _ask(q, state.moments, state.count[:, None, None, None], normalize, scale, eps, True)


def linear_causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    state: LinearState | None = None,
    normalize: bool = True,
    scale: float | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, LinearState]:
    """The causal form of `linear_attention`, and the state after the last token.

    Pairs within a chunk of CHUNK tokens are computed directly, and earlier tokens enter through running moments.
    Cost: N CHUNK (F + d) multiply-adds per head more than `linear_attention`. The arguments are the same, and `state`
    is the state before the first token.
    """
    dtype, n = accumulator(v.dtype), q.shape[2]
    seen = seen_by_each(k, mask, None if state is None else state.count)
    size = chunk_size(n)
    with without_autocast(q.device):
        values = v.to(dtype)
        values = hide(F.pad(values, (0, 1), value=1.0) if normalize else values, mask)
        queries, keys, values = (in_chunks(part, size) for part in (q.to(dtype), hide(k.to(dtype), mask), values))
        weighted, end = causal_sums(queries, keys, values, None if state is None else state.moments)
        y = _finish(first_tokens(weighted, n), seen[:, None, :, None], normalize, scale, eps, True)
    return y.to(v.dtype), LinearState(end, seen[:, -1].clone())
