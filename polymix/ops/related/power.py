"""Power attention: linear attention whose features are the symmetric power of queries and keys, or a sum over pairs."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from polymix.ops.related.linear_attention import (
    LinearState,
    linear_attention,
    linear_causal,
    linear_pool,
    linear_read,
)
from polymix.ops.shared.causal_sums import hide
from polymix.ops.shared.symmetric import symmetric_power, symmetric_size
from polymix.ops.shared.tensors import accumulator


def power_attention(
    q: Tensor, k: Tensor, v: Tensor, degree: int, *, mask: Tensor | None = None, impl: str = "auto", **options: Any
) -> Tensor:
    """Compute Σ_j (q·k_j / √d)^degree v_j over their sum or number.

    Args:
        q, k, v: (B, h, M, d), (B, h, N, d) and (B, h, N, e).
        degree: of the power.
        mask: (B, N), True for real keys.
        impl: "eager" pools features; "auto" sums over all pairs instead where they cost less, outside of graphs, which
            must not depend on the lengths.
        options: `normalize` and `eps` of `linear_attention`.
    Returns:
        (B, h, M, e). Cost: (M + N) F (e + 1) multiply-adds per head with F = `symmetric_size`, or M N (d + e + 1).
    """
    pairs, features = q.shape[2] * k.shape[2], (q.shape[2] + k.shape[2]) * symmetric_size(q.shape[-1], degree)
    few = impl == "auto" and not torch.compiler.is_compiling() and pairs < features
    return linear_attention(
        _scaled(q), _scaled(k), v, mask=mask, feature_map=partial(symmetric_power, degree=degree),
        similarity=partial(_power, degree=degree) if few else None, **options,
    )  # fmt: skip


def power_causal(
    q: Tensor, k: Tensor, v: Tensor, degree: int, *, mask: Tensor | None = None, state: LinearState | None = None,
    log_gates: Tensor | None = None, **options: Any,
) -> tuple[Tensor, LinearState]:  # fmt: skip
    """The causal form of `power_attention` by features, and the state after the last token: see `linear_causal`."""
    return linear_causal(
        _scaled(q), _scaled(k), v, mask=mask, state=state, log_gates=log_gates,
        feature_map=partial(symmetric_power, degree=degree), similarity=partial(_power, degree=degree), **options,
    )  # fmt: skip


def power_pool(k: Tensor, v: Tensor, degree: int, *, mask: Tensor | None = None, normalize: bool = True) -> LinearState:
    """What `power_attention` needs of its keys and values; arguments as there."""
    features = partial(symmetric_power, degree=degree)
    return linear_pool(_scaled(k), v, mask=mask, normalize=normalize, feature_map=features)


def power_summary(
    k: Tensor, v: Tensor, log_gates: Tensor, degree: int, *, mask: Tensor | None = None, normalize: bool = True
) -> tuple[LinearState, Tensor]:
    """The state of `power_causal` with gates after these tokens, and what they leave of an earlier one, (B, h)."""
    gates = hide(log_gates.to(accumulator(k.dtype))[..., None], mask)
    after = gates.flip(2).cumsum(2).flip(2) - gates  # of the tokens behind each
    real = hide(after.exp(), mask)
    # the features are of this degree: they get the weight if the keys get its root
    moments = power_pool(k * (after / degree).exp(), v, degree, mask=mask, normalize=normalize).moments
    return LinearState(moments, real.sum(2)[..., 0]), gates.sum(2)[..., 0].exp()


def power_read(q: Tensor, state: LinearState, degree: int, **options: Any) -> Tensor:
    """What `power_attention` gives to queries that see all tokens of `state`, in the dtype of the state."""
    return linear_read(symmetric_power(_scaled(q), degree), state, **options)


def _power(q: Tensor, k: Tensor, degree: int) -> Tensor:
    """The powers of q·k for all pairs."""
    return (q @ k.mT) ** degree


def _scaled(x: Tensor) -> Tensor:
    """x d^-¼ in float32 or wider: powers of it overflow float16."""
    return x.to(accumulator(x.dtype)) * x.shape[-1] ** -0.25
