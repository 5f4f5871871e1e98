"""PoM, the Polynomial Mixer: `pom` runs it with any implementation (PoM, Eq. 1, 2, 4 and 7)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from polymix.ops import decode
from polymix.ops.dispatch import choose, in_one_call, without_gradients
from polymix.ops.gated import gated
from polymix.ops.native.arrays import KINDS
from polymix.ops.operator import Operator
from polymix.ops.pom import blocked, eager, native
from polymix.ops.pom.decay import BLOCK, decay_over, decayed_mean
from polymix.ops.pom.eager import PomOptions, PomState, PomWeights, Terms
from polymix.ops.shared.activations import ACTIVATIONS
from polymix.ops.shared.blocks import slower_in_order, slower_than_pytorch
from polymix.ops.shared.masks import Segments, as_padding, positions
from polymix.ops.shared.signature import Signature
from polymix.ops.shared.tensors import autocast_dtype, count_real, linear

_ROTARY = "Tensor? mask, Tensor? cos, Tensor? sin"
_TERMS = "h: B, N, E; alpha: E, K; mask: B, N; cos: cos.shape[0], N, E // 2; sin: cos.shape[0], N, E // 2"
_RULES = (
    f"activation in {tuple(ACTIVATIONS)}",
    "(cos is None) == (sin is None) and (cos is None or (cos.shape[0] in (1, B) and E % (2 * axes) == 0))",
    "axes in (1, 2)",
)
pom_pool = Operator(
    "pom_pool", f"(Tensor h, Tensor alpha, {_ROTARY}, str activation, int axes) -> Tensor", eager.pool, (0, 1),
    Signature(_TERMS, "B, E", *_RULES),
    triton="polymix.ops.pom.triton:pool",
)  # fmt: skip
pom_scan = Operator(
    "pom_scan",
    f"(Tensor h, Tensor alpha, Tensor? start, {_ROTARY}, Tensor? order, Tensor? first, str activation, int axes)"
    " -> Tensor",
    eager.scan, (0, 1, 2),
    Signature(f"{_TERMS}; start: B, E; order#: B, N; first#: B, N", "B, N, E", *_RULES,
              "start is None or first is None"),
    sums=(2,), triton="polymix.ops.pom.triton:scan",
)  # fmt: skip
linear_powers = Operator(
    "linear_powers",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor? mask, str activation, int degree) -> Tensor",
    eager.powers, (0, 1, 2),
    Signature("x: B, N, D; weight: E, D; bias: E; mask: B, N", "B, degree, E", "degree >= 1",
              f"activation in {KINDS}"),
    native="polymix.ops.pom.native:powers", triton="polymix.ops.pom.triton_powers:powers",
)  # fmt: skip

_PLAIN = "supports one group without rotary positions and decay, and full or causal context only"


def pom(
    x: Tensor,
    context: Tensor,
    weights: PomWeights,
    options: PomOptions,
    *,
    mask: Tensor | None = None,
    causal: int = 0,
    grid: tuple[int, ...] | None = None,
    segments: Segments | None = None,
    values: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Mix tokens with pooled polynomials of the context (PoM, Eq. 1, 2 and 4; block-causal, Eq. 7).

        y_i = W_o [σ(W_s x_i + b_s) ⊙ H_i] + b_o,  H_i = reduce_j Σ_p α_p ⊙ h(W_h c_j + b_h)^p

    `reduce` is the mean or the sum over the context tokens j that query i sees.

    Args:
        x: the queries, (B, M, D).
        context: (B, N, D); pass x for self-mixing.
        weights: the maps W_h, W_s, W_o and the coefficients α.
        options: the activation, the gate, the reduction and the rotary positions.
        mask: (B, N), True for real context tokens; or (B, M, N), for each query. With impl="auto" on a CPU, the latter
            runs at the speed of the former if all queries see the same tokens.
        causal: 0, 1, or K for block-causal with blocks of K tokens.
        grid: (H, W); needed if options.rotary is "2d".
        segments: ids (B, N) of packed sequences; with a separate context, (query ids, context ids).
        values: (B, N, D), the tokens c_j that are pooled, if not the context, which then gives rotary positions only.
        impl: "auto", "eager", "blocked", "native" or "triton".
    Returns:
        (B, M, D) in the dtype of x; sums are kept in float32 or wider. Cost: 3 N D E multiply-adds; an arbitrary mask
        adds N M E, and segments add O(N E log N).
    Raises:
        CapabilityError: the implementation requested by name does not support the call.
    """
    if weights.times is not None:
        return pom_chunk(x, None, weights, options, mask=mask, values=values, impl=impl)[0]
    pooled_tokens = context if values is None else values
    padding, visible = (mask, None) if mask is None or mask.ndim == 2 else (None, mask)
    # Where both kinds of masks mean the same. An implementation chosen by name does not depend on values.
    if visible is not None and impl == "auto" and options.rotary is None and segments is None and causal < 2:
        padding = as_padding(visible)
        visible = visible if padding is None else None
    grouped, (inner, degree) = weights.poly[0].ndim == 3, weights.alpha.shape
    gate_per_channel = weights.gate[0].shape[0] == inner
    plain = options.rotary is None and segments is None and visible is None
    plain = plain and not grouped and (causal == 0 or (causal == 1 and pooled_tokens is x))
    unsupported = {
        "triton": None if visible is None else "does not support an arbitrary mask (B, M, N)",
        "native": _obstacle(plain, weights, causal),
        "blocked": None if plain else _PLAIN,
    }
    impl = choose("pom", impl, (x, pooled_tokens, *_tensors(weights)), unsupported,
                  slower={"native": slower_in_order(x) if causal else slower_than_pytorch(x)},
                  in_blocks=("native", "blocked"))  # fmt: skip
    if impl == "blocked":
        return (blocked.causal(x, weights, options, padding) if causal
                else blocked.pom(x, pooled_tokens, weights, options, padding))  # fmt: skip
    if impl == "native" and causal:
        return native.causal(x, weights, options, padding)[0]
    if pooled_tokens is x and in_one_call(impl):
        return native.pooled(x, weights, options, padding)
    in_one_pass = impl != "triton" or _product_is_short(pooled_tokens)
    if in_one_pass and plain and gate_per_channel and not causal:  # the kernels store no outputs of the maps
        sums = linear_powers(pooled_tokens, *weights.poly, padding, options.activation, degree, impl=impl)
        pooled = eager.weigh(sums, weights.alpha)
        pooled = pooled / count_real(pooled_tokens, padding) if options.reduction == "mean" else pooled
        impl = "eager" if impl == "triton" else impl  # which has no kernel for the gate
        return gated(x, weights.gate, pooled, weights.proj, options.gate, impl=impl)
    queries, keys = eager.token_positions(x, context, options, padding, grid, segments)
    terms = _terms(pooled_tokens, weights, options, padding, keys, impl)
    total, count = eager.reduce_terms(terms, queries=x.shape[1], visible=visible, causal=causal, segments=segments)
    return eager.gate_totals(x, weights, options, total, count, queries)


def pom_chunk(
    x: Tensor,
    state: PomState | None,
    weights: PomWeights,
    options: PomOptions,
    *,
    mask: Tensor | None = None,
    values: Tensor | None = None,
    block: int = 1,
    impl: str = "auto",
) -> tuple[Tensor, PomState]:
    """Process one chunk of a causal sequence, continuing from `state`.

    Args:
        x: the chunk, (B, N, D).
        state: the state after the previous chunk; None at the start.
        weights: see `pom`. With `times`, older tokens decay (see `polymix.ops.pom.decay`).
        options: see `pom`.
        mask: (B, N), True for real tokens.
        values: see `pom`.
        block: the length K of the blocks whose tokens see each other (PoM, Eq. 7); the state must end with a block.
            Not with decay.
        impl: see `pom`.
    Returns:
        The output (B, N, D) and the state after the chunk. Cost: 3 N D E multiply-adds.
    """
    forgets = weights.times is not None
    plain = options.rotary is None and weights.poly[0].ndim == 2 and block == 1 and values is None and not forgets
    no_step = _step_obstacle(x, state, weights, options, mask, values, block)
    unsupported = {
        "triton": "does not support decay" if forgets else None,
        "native": no_step and _obstacle(plain, weights, 1),
        "blocked": "keeps no recurrent state",
    }
    apply = linear if impl == "eager" else _apply
    total = None if state is None or no_step is None else state.total  # the step's kernel checks its own
    impl = choose("pom", impl, (x, *_tensors(weights), total), unsupported,
                  slower={"native": no_step and slower_in_order(x)},
                  in_blocks=("native",) if no_step else ())  # fmt: skip
    if impl == "native" and no_step:
        return native.causal(x, weights, options, mask, state)
    if impl == "native":
        assert state is not None
        y, total, count = decode.call_pom_step(
            x, *state, weights.poly, weights.gate, weights.proj, weights.alpha, activation=options.activation,
            gating=options.gate, mean=options.reduction == "mean",
        )  # fmt: skip
        return y, PomState(total, count)
    pooled_tokens = x if values is None else values
    if weights.times is not None:
        terms = _terms(pooled_tokens, weights, options, mask, None, impl, apply).values()
        mean, state = decayed_mean(terms, weights.times, mask, state)
        once = torch.ones((1, 1), device=x.device)
        return eager.gate_totals(x, weights, options, mean, once, None, apply), state
    position = None
    if options.rotary is not None:
        position = positions(x.shape[1], mask, None, x.device)
        position = position if state is None else position + state.count[:, None]
    pooled = _terms(pooled_tokens, weights, options, mask, position, impl, apply)
    if state is not None and x.shape[1] == block == 1 and mask is None and not torch.compiler.is_compiling():
        after = PomState(pooled.pooled() + state.total, state.count + 1)
        total, count = after.total[:, None], after.count[:, None]
        return eager.gate_totals(x, weights, options, total, count, position, apply), after
    total, count = eager.reduce_terms(pooled, queries=x.shape[1], causal=block, state=state)
    if block == 1:
        after = PomState(total[:, -1].clone(), count[:, -1].expand(x.shape[0]).clone())
    else:
        after = eager.after(pooled, state)
    return eager.gate_totals(x, weights, options, total, count, position, apply), after


def pom_summary(
    x: Tensor, weights: PomWeights, options: PomOptions, *, mask: Tensor | None = None, position: Tensor | None = None,
    impl: str = "auto",
) -> tuple[PomState, Tensor | None]:  # fmt: skip
    """The state after the tokens of x alone, without their outputs; with decay, also what they leave of earlier sums.

    Args:
        x, weights, options, mask, impl: see `pom_chunk`.
        position: (N), (B, N) or (N, 2), of the tokens in the whole sequence; None without rotary positions.
    """
    if weights.times is not None:
        terms = _terms(x, weights, options, mask, None, "eager").values()
        state = decayed_mean(terms, weights.times, mask, None)[1]
        count = x.shape[1] if mask is None else mask.sum(1, keepdim=True)
        return state, decay_over(weights.times, count, x.shape[0], state.total.dtype)
    return eager.after(_terms(x, weights, options, mask, position, _impl_of_sums(x, weights, impl)), None), None


def pom_read(
    x: Tensor, state: PomState, weights: PomWeights, options: PomOptions, *, position: Tensor | None = None
) -> Tensor:
    """The output for queries x (B, N, D) that see all tokens of `state`; arguments as in `pom_summary`."""
    return eager.gate_totals(x, weights, options, state.total[:, None], state.count[:, None], position)


def _impl_of_sums(x: Tensor, weights: PomWeights, impl: str) -> str:
    unsupported = dict.fromkeys(("native", "blocked"), "computes outputs as well")
    named = impl if impl in ("eager", "triton") else "auto"  # the sums have no other implementation
    return choose("pom", named, (x, *_tensors(weights)), {"triton": None, **unsupported})


def _product_is_short(x: Tensor) -> bool:
    """Whether a GPU without gradients to record multiplies faster than it would write and read the product of x (…, D).

    2 N D E operations take less than 2 N E numbers at the peaks of an H100 from 591 channels down in 16 bits and from
    197 in float32, and at those of an A100 from 306 and 102 down.
    """
    dtype = autocast_dtype(x.device) or x.dtype
    return not torch.is_grad_enabled() and x.shape[-1] <= (256 if dtype.itemsize == 2 else 96)


def _obstacle(plain: bool, weights: PomWeights, causal: int) -> str | None:
    """Why the C kernels of whole sequences and chunks cannot take a call, or None if they can. `plain`: see _PLAIN."""
    if not plain:
        return _PLAIN
    if weights.gate[0].shape[0] != weights.alpha.shape[0]:
        return "supports one gate per channel only"
    if causal and not without_gradients("native"):
        return "has no backward for causal=1 (call under torch.inference_mode() or torch.no_grad())"
    return None


def _step_obstacle(
    x: Tensor, state: PomState | None, weights: PomWeights, options: PomOptions, mask: Tensor | None,
    values: Tensor | None, block: int,
) -> str | None:  # fmt: skip
    """Why the C kernel of one token cannot take this chunk, or None if it can."""
    if state is None or x.shape[1] != 1 or block != 1 or mask is not None or values is not None:
        return "continues a sequence by one token a call only"
    if x.shape[0] > decode.MAX_ROWS:
        return f"continues at most {decode.MAX_ROWS} sequences at once"
    inner = weights.alpha.shape[0]
    if options.rotary is not None or weights.times is not None or weights.gate[0].shape[0] != inner:
        return "continues sequences only without rotary positions and decay, and with one gate per channel"
    tensors = [tensor for tensor in _tensors(weights) if tensor is not None]
    if weights.poly[0].ndim == 3 or any(t.dtype != x.dtype or not t.is_contiguous() for t in tensors):
        return "continues sequences only with contiguous dense weights in the dtype of the tokens"
    if autocast_dtype(x.device) is not None:
        return "continues sequences only without autocast"
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, state.total, *tensors)):
        return "has no backward for a step (call under torch.inference_mode() or torch.no_grad())"
    return "is not used for a step in a compiled graph" if torch.compiler.is_compiling() else None


def _apply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear map of a chunk, which in decoding has few rows."""
    return linear(x, weight, bias) if weight.ndim == 3 else decode.linear(x, weight, bias)


def _terms(
    context: Tensor, weights: PomWeights, options: PomOptions, padding: Tensor | None, position: Tensor | None,
    impl: str, apply: Callable[..., Tensor] = linear,
) -> Terms:  # fmt: skip
    """The terms Σ_p α_p ⊙ h(W_h c_j + b_h)^p, rotated by `position` if given."""
    turns = eager.turns_at(position, weights.alpha.shape[0], options)
    axes = eager.AXES[options.rotary or "1d"]
    sums = partial(pom_pool, impl=impl), partial(pom_scan, impl=impl)
    return Terms(apply(context, *weights.poly), weights.alpha, options.activation, padding, turns, axes, *sums)


def _tensors(weights: PomWeights) -> tuple[Tensor | None, ...]:
    return (*weights.poly, *weights.gate, *weights.proj, weights.alpha, weights.times)


__all__ = ["BLOCK", "PomOptions", "PomState", "PomWeights", "linear_powers", "pom", "pom_chunk", "pom_pool", "pom_read",
           "pom_scan", "pom_summary"]  # fmt: skip
