"""QT, quadratic-Taylor attention: `qt` runs it with any implementation."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.ops import decode
from polymix.ops.dispatch import choose, in_one_call, without_gradients
from polymix.ops.operator import Operator
from polymix.ops.qt import blocked, eager, native
from polymix.ops.qt.eager import GUARD, QtState, feature_size
from polymix.ops.shared.blocks import slower_in_order, slower_than_pytorch
from polymix.ops.shared.causal_sums import seen_by_all, seen_by_each
from polymix.ops.shared.signature import Signature
from polymix.ops.shared.tensors import Linear, project, share, without_autocast

MAX_WIDTH = 128  # of a head in Triton's kernels
_WIDTH_LIMIT = f"supports heads of up to {MAX_WIDTH} channels only"
_PROJECTING = dict.fromkeys(("blocked", "native"), "computes the queries, keys and values itself")
_FORM = "str form, int order"
# The shape of moments, with the number of features that `feature_size` gives.
_MOMENTS = "B, H, 1 + D * (order > 0) + (order > 1) * (D if form == 'compact' else D * (D + 1) // 2), D + 1"
_RULES = ("form in ('compact', 'full')", "order in (0, 1, 2)", "form == 'full' or scale is not None")
qt_moments = Operator(
    "qt_moments", f"(Tensor k, Tensor v, Tensor? scale, Tensor? mask, {_FORM}) -> Tensor", eager.moments, (0, 1, 2),
    Signature("k: B, H, N, D; v: B, H, N, D; scale: 3, H, 1, 1; mask: B, N", _MOMENTS, *_RULES),
    triton="polymix.ops.qt.triton:moments",
)  # fmt: skip
qt_query = Operator(
    "qt_query", f"(Tensor q, Tensor moments, Tensor? scale, {_FORM}) -> Tensor", eager.query, (0, 1, 2),
    Signature(f"q: B, H, M, D; moments: {_MOMENTS}; scale: 3, H, 1, 1", "B, H, M, D + 1", *_RULES),
    sums=(1,), triton="polymix.ops.qt.triton:query",
)  # fmt: skip
qt_causal = Operator(
    "qt_causal",
    f"(Tensor q, Tensor k, Tensor v, Tensor? scale, Tensor? start, Tensor? mask, {_FORM}) -> (Tensor, Tensor)",
    eager.causal, (0, 1, 2, 3, 4),
    Signature(f"q: B, H, N, D; k: B, H, N, D; v: B, H, N, D; scale: 3, H, 1, 1; start: {_MOMENTS}; mask: B, N",
              f"B, H, N, D + 1; {_MOMENTS}", *_RULES),
    sums=(4,), triton="polymix.ops.qt.triton_causal:causal",
)  # fmt: skip
qt_pool = Operator(
    "qt_pool", "(Tensor x, Tensor weight, Tensor? bias, Tensor? mask, int heads, int order) -> Tensor", eager.pool,
    (0, 1, 2),
    Signature("x: B, N, D; weight: 2 * D, D; bias: 2 * D; mask: B, N",
              "B, heads, 1 + order * D // heads, D // heads + 1", "heads >= 1 and D % heads == 0",
              "order in (0, 1, 2)", empty="BN"),
    native="polymix.ops.qt.native:pool",
)  # fmt: skip
qt_spread = Operator(
    "qt_spread",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor moments, Tensor least, Tensor last, Tensor? last_bias) -> Tensor",
    eager.spread, (0, 1, 2, 3, 5, 6),
    Signature("x: B, N, D; weight: D, D; bias: D; moments: B, H, R, F; least: B; last: E, D; last_bias: E",
              "=: B, N, E", "D == H * (F - 1)", "(R - 1) % (F - 1) == 0 and (R - 1) // (F - 1) in (0, 1, 2)"),
    sums=(3,), native="polymix.ops.qt.native:spread",
)  # fmt: skip


class QtWeights(NamedTuple):
    """The parameters of a QT layer."""

    qkv: Linear  # W_q, W_k and W_v in one map (3D, D)
    proj: Linear  # W_o
    scale: Tensor | None  # α, β, γ of the compact form, (3, heads, 1, 1)


class QtOptions(NamedTuple):
    """The options of a QT layer."""

    heads: int
    form: str  # "compact" or "full"
    order: int  # 0, 1 or 2


def qt(
    x: Tensor,
    context: Tensor,
    weights: QtWeights,
    options: QtOptions,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    values: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Attend with softmax's exponential replaced by its second-order Taylor expansion, in linear time.

        y = φ(Q)(φ(K)ᵀV) / (φ(Q) Σ_j φ(k_j)) for each head, then W_o, with ⟨φ(q), φ(k)⟩ = 1 + s + s²/2, s = q·k/√d

    The compact form replaces s²/2 by products of single channels, with learned factors (see
    `polymix.ops.qt.eager.taylor_features`).

    Args:
        x: the queries, (B, M, D).
        context: (B, N, D); pass x for self-attention.
        weights: the maps, and the factors of the compact form.
        options: the number of heads, the form and the order.
        mask: (B, N), True for real context tokens.
        causal: whether each token sees only itself and its past.
        values: (B, N, D), what values are computed from, if not from the context. Eager or triton then runs.
        impl: "auto", "eager", "blocked", "native" or "triton".
    Returns:
        (B, M, D) in the dtype of x; sums are kept in float32 or wider. Cost: 4 N D² multiply-adds, plus 2 N F (d + 1)
        per head with F = `feature_size`; the causal form adds 128 N (F + d) per head.
    Raises:
        CapabilityError: the implementation requested by name does not support the call.
    """
    if causal:
        return qt_chunk(x, None, weights, options, mask=mask, values=values, impl=impl)[0]
    compact, dim = weights.scale is not None, x.shape[-1]
    apart = None if values is None else "computes keys and values from the same tokens"
    unsupported = {
        "blocked": apart, "native": apart if compact else 'supports form="compact" only',
        "triton": _too_wide(dim, options),
    }  # fmt: skip
    impl = choose("qt", impl, (x, context, values, *weights.qkv, *weights.proj, weights.scale), unsupported,
                  slower={"native": slower_than_pytorch(x)}, in_blocks=("blocked",))  # fmt: skip
    if impl == "blocked":
        return blocked.qt(x, context, *weights, heads=options.heads, form=options.form, order=options.order, mask=mask)
    if compact and impl != "triton" and values is None:  # the kernels store no queries, keys, values or features
        assert weights.scale is not None
        if context is x and in_one_call(impl):
            return native.whole(x, weights.qkv, weights.proj, weights.scale, mask, options.heads, options.order)
        sums = qt_pool(context, *share(weights.qkv, dim, 3 * dim), mask, options.heads, options.order, impl=impl)
        moments = sums * eager.coefficients(weights.scale, dim // options.heads, options.order, sums.dtype)
        count = mask.sum(1) if mask is not None else torch.full(x.shape[:1], context.shape[1], device=x.device)
        least = eager.least(count, sums.dtype)
        return qt_spread(x, *share(weights.qkv, 0, dim), moments, least, *weights.proj, impl=impl)
    q, k, v = _heads(x, context, values, weights.qkv, options)
    y = _attend(q, k, v, weights.scale, mask, options.form, options.order, impl)
    return F.linear(y.transpose(1, 2).flatten(2), *weights.proj)


def qt_attention(
    q: Tensor, k: Tensor, v: Tensor, *, form: str, order: int = 2, scale: Tensor | None = None,
    mask: Tensor | None = None, impl: str = "eager",
) -> Tensor:  # fmt: skip
    """Compute φ(Q)(φ(K)ᵀV) / (φ(Q) Σ_j φ(k_j)) from queries, keys and values.

    Args:
        q: (B, h, M, d).
        k: (B, h, N, d).
        v: (B, h, N, d).
        form: "compact" or "full".
        order: 0, 1 or 2, the degree of the expansion.
        scale: α, β, γ of the compact form, (3, heads, 1, 1).
        mask: (B, N), True for real keys.
        impl: "auto", "eager" or "triton".
    Returns:
        (B, h, M, d). Cost: (M + N) F (d + 1) multiply-adds per head.
    Raises:
        CapabilityError: the implementation requested by name does not support the call.
    """
    wide = _WIDTH_LIMIT if q.shape[-1] > MAX_WIDTH else None
    unsupported = {**_PROJECTING, "triton": wide}
    return _attend(q, k, v, scale, mask, form, order, choose("qt", impl, (q, k, v, scale), unsupported))


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: Tensor | None, mask: Tensor | None, form: str, order: int, impl: str
) -> Tensor:
    """`qt_attention` with an implementation that was chosen."""
    with without_autocast(q.device):
        moments = qt_moments(k, v, scale, mask, form, order, impl=impl)
        weighted = qt_query(q, moments, scale, form, order, impl=impl)
        return eager.quotient(weighted, eager.least(seen_by_all(k, mask), weighted.dtype)).to(q.dtype)


def qt_summary(
    k: Tensor, v: Tensor, *, form: str, order: int = 2, scale: Tensor | None = None, mask: Tensor | None = None,
    impl: str = "auto",
) -> QtState:  # fmt: skip
    """What `qt_attention` needs of its keys and values; arguments as there."""
    with without_autocast(k.device):
        moments = qt_moments(k, v, scale, mask, form, order, impl=_impl_of_heads(k, v, scale, impl))
    return QtState(moments, seen_by_all(k, mask).flatten().expand(k.shape[0]).clone())


def qt_read(
    q: Tensor, state: QtState, *, form: str, order: int = 2, scale: Tensor | None = None, impl: str = "auto"
) -> Tensor:
    """What `qt_attention` gives to queries that see all tokens of `state`; arguments as there."""
    with without_autocast(q.device):
        weighted = qt_query(q, state.moments, scale, form, order, impl=_impl_of_heads(q, q, scale, impl))
        return eager.quotient(weighted, eager.least(state.count[:, None, None, None], weighted.dtype)).to(q.dtype)


def _impl_of_heads(q: Tensor, v: Tensor, scale: Tensor | None, impl: str) -> str:
    named = impl if impl in ("eager", "triton") else "auto"  # the sums have no other implementation
    unsupported = {**_PROJECTING, "triton": _WIDTH_LIMIT if q.shape[-1] > MAX_WIDTH else None}
    return choose("qt", named, (q, v, scale), unsupported)


def qt_chunk(
    x: Tensor,
    state: QtState | None,
    weights: QtWeights,
    options: QtOptions,
    *,
    mask: Tensor | None = None,
    values: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, QtState]:
    """Process one chunk of a causal sequence, continuing from `state`.

    Args:
        x: the chunk, (B, N, D).
        state: the state after the previous chunk; None at the start.
        weights: see `qt`.
        options: see `qt`.
        mask: (B, N), True for real tokens.
        values: see `qt`.
        impl: "auto", "eager", "native" or "triton".
    Returns:
        The output (B, N, D) and the state after the chunk. Cost: as the causal form of `qt`.
    """
    unsupported = {
        "blocked": "supports non-causal attention only", "native": _chunk_obstacle(weights, options, values),
        "triton": _too_wide(x.shape[-1], options),
    }  # fmt: skip
    start, named_eager = None if state is None else state.moments, impl == "eager"
    impl = choose("qt", impl, (x, *weights.qkv, *weights.proj, weights.scale, start), unsupported,
                  slower={"native": slower_in_order(x)})  # fmt: skip
    if impl == "native":
        qkv, proj, scale = weights
        assert scale is not None
        seen = seen_by_each(x[:, None], mask, None if state is None else state.count)
        y, end = native.causal(x, qkv, proj, scale, mask, options.heads, options.order, seen, start)
        return y, QtState(end, seen[:, -1].clone())
    if values is None and not named_eager:
        parts = decode.linear(x, *weights.qkv).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (options.heads, -1)).transpose(1, 2) for part in parts)
    else:
        q, k, v = _heads(x, x, values, weights.qkv, options)
    y, state = _continue(q, k, v, state, weights.scale, mask, options.form, options.order, impl)
    apply = F.linear if named_eager else decode.linear
    return apply(y.transpose(1, 2).flatten(2), *weights.proj), state


def qt_continue(
    q: Tensor, k: Tensor, v: Tensor, state: QtState | None = None, *, form: str, order: int = 2,
    scale: Tensor | None = None, mask: Tensor | None = None, impl: str = "auto",
) -> tuple[Tensor, QtState]:  # fmt: skip
    """The causal form of `qt_attention`, continuing from `state`; and the state after the last token.

    Arguments, errors and cost: see `qt_attention` and `qt_chunk`; q and k have as many tokens.
    """
    unsupported = {**_PROJECTING, "triton": _WIDTH_LIMIT if q.shape[-1] > MAX_WIDTH else None}
    impl = choose("qt", impl, (q, k, v, scale), unsupported)
    return _continue(q, k, v, state, scale, mask, form, order, impl)


def _continue(
    q: Tensor, k: Tensor, v: Tensor, state: QtState | None, scale: Tensor | None, mask: Tensor | None, form: str,
    order: int, impl: str,
) -> tuple[Tensor, QtState]:  # fmt: skip
    """`qt_continue` with an implementation that was chosen."""
    seen = seen_by_each(k, mask, None if state is None else state.count)
    with without_autocast(q.device):
        start = None if state is None else state.moments
        weighted, end = qt_causal(q, k, v, scale, start, mask, form, order, impl=impl)
        y = eager.quotient(weighted, eager.least(seen[:, None, :, None], weighted.dtype)).to(q.dtype)
    return y, QtState(end, seen[:, -1].clone())


def _heads(
    x: Tensor, context: Tensor, values: Tensor | None, qkv: Linear, options: QtOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """The queries of x, the keys of the context and the values of `values` or the context, (B, heads, ·, d) each."""
    parts = project(qkv, x, context, values)
    q, k, v = (part.unflatten(-1, (options.heads, -1)).transpose(1, 2) for part in parts)
    return q, k, v


def _chunk_obstacle(weights: QtWeights, options: QtOptions, values: Tensor | None) -> str | None:
    """Why the causal C kernel cannot take a chunk, or None if it can."""
    if values is not None:
        return "computes keys and values from the same tokens"
    if weights.scale is None or options.order == 0:
        return 'supports form="compact" of order 1 or 2 only'
    if not without_gradients("native"):
        return "has no backward for causal order (call under torch.inference_mode() or torch.no_grad())"
    return None


def _too_wide(dim: int, options: QtOptions) -> str | None:
    return _WIDTH_LIMIT if dim // options.heads > MAX_WIDTH else None


__all__ = [
    "GUARD", "QtOptions", "QtState", "QtWeights", "feature_size", "qt", "qt_attention", "qt_causal", "qt_chunk",
    "qt_continue", "qt_moments", "qt_pool", "qt_query", "qt_read", "qt_spread", "qt_summary",
]  # fmt: skip
