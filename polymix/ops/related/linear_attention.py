"""Linear attention: a similarity φ(q)·φ(k) lets keys and values pool once, into the moments Σ_j φ(k_j) ⊗ v_j.

Everything here takes the features φ(q), φ(k) as they are: what φ is, is the business of its mixer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.ops.shared.activations import identity
from polymix.ops.shared.causal_sums import causal_sums, chunk_size, hide, in_chunks, seen_by_all, seen_by_each
from polymix.ops.shared.tensors import accumulator, without_autocast


def _elu_plus_one(x: Tensor) -> Tensor:
    """elu(x) + 1, without the difference e^x - 1 in between, which loses what lies far below zero."""
    return torch.where(x > 0, x + 1, x.clamp_max(0).exp())


FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {"elu+1": _elu_plus_one, "relu": F.relu, "identity": identity}


class LinearState(NamedTuple):
    """What a recurrent linear attention remembers, whatever the number of tokens seen."""

    moments: Tensor  # (B, heads, F, d + 1) Σ_j φ(k_j) ⊗ [v_j, 1], without the 1 where nothing is normalised
    count: Tensor  # type: ignore[assignment]  # (B,) real tokens seen, int64


def _finish(weighted: Tensor, seen: Tensor, normalize: bool, scale: float | None, eps: float, relative: bool) -> Tensor:
    """Sums over the keys -> the output; `seen` keys of each query broadcast, at least one to keep 0 / 0 out."""
    seen = seen.clamp_min(1).to(weighted.dtype)
    if not normalize:
        return weighted / seen if scale is None else weighted * scale
    top, bottom = weighted[..., :-1], weighted[..., -1:]
    if scale is not None:
        top = top * (seen * scale)
    return top / (bottom + (eps * seen if relative else eps))


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
    """scale · q Σ_j k_jᵀ v_j, over q · mean_j k_j + eps if `normalize`; q, k are features.

    Args:
        q, k, v: (B, h, M, F), (B, h, N, F), (B, h, N, d); mask (B, N), True = takes part.
        scale: None for one over the number of keys: with `normalize` a weighted mean of the values.
        eps: added to the mean of q · k over the keys, or with relative=False to their sum.
    Returns:
        (B, h, M, d) in the type of v; sums are kept in float32 at least; zeros where no key takes part.
        Cost: (M + N) F (d + 1) multiply-adds a head, F d without the denominator.
    """
    dtype = accumulator(v.dtype)
    with without_autocast(q.device):
        values = v.to(dtype)
        values = hide(F.pad(values, (0, 1), value=1.0) if normalize else values, mask)
        weighted = q.to(dtype) @ (hide(k.to(dtype), mask).transpose(-1, -2) @ values)
        return _finish(weighted, seen_by_all(k, mask), normalize, scale, eps, relative).to(v.dtype)


def linear_causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    state: LinearState | None = None,
    normalize: bool = True,
    eps: float = 1e-6,
) -> tuple[Tensor, LinearState]:
    """`linear_attention` over the past of each token and itself, with the state after the last one.

    Within a chunk of CHUNK tokens directly, before it through the running moments: N · CHUNK · (F + d) multiply-adds
    a head more.
    """
    dtype, n = accumulator(v.dtype), q.shape[2]
    seen = seen_by_each(k, mask, None if state is None else state.count)
    size = chunk_size(n)
    with without_autocast(q.device):
        values = v.to(dtype)
        values = hide(F.pad(values, (0, 1), value=1.0) if normalize else values, mask)
        asks, keys, values = (in_chunks(part, size) for part in (q.to(dtype), hide(k.to(dtype), mask), values))
        weighted, end = causal_sums(asks, keys, values, None if state is None else state.moments)
        y = _finish(weighted[:, :, :n], seen[:, None, :, None], normalize, None, eps, True)
    return y.to(v.dtype), LinearState(end, seen[:, -1].clone())
