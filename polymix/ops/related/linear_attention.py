"""Linear attention: with the similarity φ(q)·φ(k), keys and values are pooled once, to the moments Σ_j φ(k_j) ⊗ v_j.

The functions take the features φ(q) and φ(k); each mixer defines its own φ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.ops.related.selective_scan import linear_scan
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


FeatureMap = Callable[[Tensor], Tensor]
Similarity = Callable[[Tensor, Tensor], Tensor]
FEATURE_MAPS: dict[str, FeatureMap] = {"elu+1": _elu_plus_one, "relu": F.relu, "identity": identity}


class LinearState(NamedTuple):
    """The state of a recurrent linear attention. Its size does not depend on the number of tokens seen."""

    moments: Tensor  # Σ_j φ(k_j) ⊗ [v_j, 1], (B, heads, F, d + 1); without the 1 if normalize is off
    count: Tensor  # type: ignore[assignment]  # (B,) the number of real tokens seen, int64; with gates (B, heads)

    def merge(self, later: LinearState, carry: Tensor | None = None) -> LinearState:
        """The state after both parts of a sequence; carry: what `later` has left of earlier sums, (B, heads)."""
        if carry is None:
            return LinearState(self.moments + later.moments, self.count + later.count)
        return LinearState(self.moments * carry[..., None, None] + later.moments, self.count * carry + later.count)


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
    feature_map: FeatureMap = identity,
    similarity: Similarity | None = None,
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
        feature_map: φ, with φ(0) = 0, if q and k are not features yet.
        similarity: φ(q) φ(k)ᵀ of all pairs, if the sum is to be taken over the pairs, without features.
    Returns:
        (B, h, M, d) in the dtype of v; zeros for samples without real keys. Sums are kept in float32 or wider.
        Cost: (M + N) F (d + 1) multiply-adds per head, or (M + N) F d without `normalize`. With `similarity`,
        M N (d + 1) and its own.
    """
    seen = seen_by_all(k, mask)
    if similarity is None:
        moments = _moments(k, v, mask, normalize, feature_map)
        return _ask(feature_map(q.to(moments.dtype)), moments, seen, normalize, scale, eps, relative).to(v.dtype)
    dtype = accumulator(v.dtype)
    with without_autocast(q.device):
        weighted = similarity(q.to(dtype), hide(k.to(dtype), mask)) @ _values(v, mask, normalize)
        return _finish(weighted, seen, normalize, scale, eps, relative).to(v.dtype)


def _values(v: Tensor, mask: Tensor | None, normalize: bool) -> Tensor:
    """[v, 1], or v without `normalize`; zeros for hidden tokens."""
    v = v.to(accumulator(v.dtype))
    return hide(F.pad(v, (0, 1), value=1.0) if normalize else v, mask)


def _moments(k: Tensor, v: Tensor, mask: Tensor | None, normalize: bool, feature_map: FeatureMap) -> Tensor:
    with without_autocast(k.device):
        values = _values(v, mask, normalize)
        return feature_map(hide(k.to(values.dtype), mask)).mT @ values


def _ask(
    q: Tensor, moments: Tensor, seen: Tensor, normalize: bool, scale: float | None, eps: float, relative: bool
) -> Tensor:
    with without_autocast(q.device):
        return _finish(q.to(moments.dtype) @ moments, seen, normalize, scale, eps, relative)


def linear_pool(
    k: Tensor, v: Tensor, *, mask: Tensor | None = None, normalize: bool = True, feature_map: FeatureMap = identity
) -> LinearState:
    """What `linear_attention` needs of its keys and values; arguments as there."""
    moments = _moments(k, v, mask, normalize, feature_map)
    return LinearState(moments, seen_by_all(k, mask).flatten().expand(k.shape[0]).clone())


def linear_read(
    q: Tensor, state: LinearState, *, normalize: bool = True, scale: float | None = None, eps: float = 1e-6
) -> Tensor:
    """What `linear_attention` gives to queries, as features, that see all tokens of `state`, in the state's dtype."""
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
    feature_map: FeatureMap = identity,
    similarity: Similarity | None = None,
    log_gates: Tensor | None = None,
) -> tuple[Tensor, LinearState]:
    """The causal form of `linear_attention`, and the state after the last token.

    Pairs within a chunk of CHUNK tokens are computed directly, and earlier tokens enter through running moments.
    Cost: N CHUNK (F + d) multiply-adds per head more than `linear_attention`. The arguments are the same, and:

    Args:
        state: the state before the first token.
        feature_map: as there.
        similarity: φ(q) φ(k)ᵀ of the pairs within a chunk, if that is cheaper than by features.
        log_gates: (B, h, N), the logarithms of gates in (0, 1): token j then has the weight ∏ of the gates of the
            real tokens after j up to i. Counts of tokens, in the output and the state, are sums of these weights.
    """
    dtype, n = accumulator(v.dtype), q.shape[2]
    size, before = chunk_size(n), None if state is None else state.count
    with without_autocast(q.device):
        parts = (q.to(dtype), hide(k.to(dtype), mask), _values(v, mask, normalize))
        queries, keys, values = (in_chunks(part, size) for part in parts)
        inside = None if similarity is None else similarity(queries, keys)
        start, features = None if state is None else state.moments, (feature_map(queries), feature_map(keys))
        if log_gates is None:
            seen = seen_by_each(k, mask, before)
            weighted, end = causal_sums(*features, values, start, inside)
            counts = seen[:, None, :, None]
        else:
            gates = hide(log_gates.to(dtype)[..., None], mask)
            seen = _gated_count(gates[..., 0].mT, mask, before)
            weighted, end = _gated_sums(*features, values, start, inside, in_chunks(gates, size))
            counts = seen.mT[..., None]
        y = _finish(first_tokens(weighted, n), counts, normalize, scale, eps, True)
    return y.to(v.dtype), LinearState(end, seen[:, -1].clone())


def _gated_count(log_gates: Tensor, mask: Tensor | None, before: Tensor | None) -> Tensor:
    """The sum of the weights of the real tokens up to each, (B, N, h); `before` is (B, h), of earlier calls."""
    real = torch.ones_like(log_gates)
    real = real if mask is None else real * mask[..., None]
    return linear_scan(log_gates.exp(), real, torch.zeros_like(real[:, 0]) if before is None else before)


def _gated_sums(
    queries: Tensor, keys: Tensor, values: Tensor, start: Tensor | None, similarity: Tensor | None, log_gates: Tensor
) -> tuple[Tensor, Tensor]:
    """`causal_sums` with gates (B, h, chunks, c, 1). No exponent is positive, so that small gates are safe."""
    past = log_gates.cumsum(-2)
    whole = past[..., -1:, :]  # the gates of a chunk together
    moments = ((keys * (whole - past).exp()).mT @ values).transpose(1, 2)  # (B, chunks, h, F, e)
    first = torch.zeros_like(moments[:, 0]) if start is None else start
    after = linear_scan(whole.exp().transpose(1, 2).expand_as(moments), moments, first)
    running = torch.cat((first[:, None], after[:, :-1]), 1).transpose(1, 2)
    inside = queries @ keys.mT if similarity is None else similarity
    later = torch.ones(past.shape[-2], past.shape[-2], dtype=torch.bool, device=past.device).triu(1)
    inside = inside * (past - past.mT).masked_fill(later, -torch.inf).exp()
    weighted = inside @ values + past.exp() * (queries @ running)
    return weighted.flatten(2, 3), after[:, -1].clone()
