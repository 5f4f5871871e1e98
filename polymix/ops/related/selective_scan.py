"""Mamba's selective scan: a linear recurrence with token-dependent decay and input, in parallel over chunks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.errors import ShapeError
from polymix.ops.shared.tensors import accumulator, forward_mode, without_autocast

CHUNK = 16  # tokens in a chunk, processed one after another; all chunks of a block run in parallel
BLOCK = 2048  # tokens whose states are in memory at the same time; graphs are traced without blocks


def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    *,
    delta_softplus: bool = False,
    mask: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute h_t = exp(Δ_t A) h_{t-1} + Δ_t B_t u_t and y_t = C_t · h_t + D u_t, times silu(z_t) if z is given.

    There is no division by a decay and no positive exponent, so a large Δ is safe.

    Args:
        u: (B, N, D).
        delta: (B, N, D), with Δ = delta + delta_bias, after softplus if `delta_softplus`.
        A: (D, S); non-positive entries make the state decay.
        B: (B, N, S); (B, N, G, S), where each of G groups serves D / G neighbouring channels; or constant, (D, S).
        C: like B.
        D: (D), the skip connection.
        z: (B, N, D), the gate.
        delta_bias: (D).
        delta_softplus: see `delta`.
        mask: (B, N), True for real tokens; the state does not change at the others.
        state: (B, D, S), h before the first token; None for zeros.
    Returns:
        y (B, N, D) in the dtype of u, and h after the last token (B, D, S). The recurrence runs in float32 or wider.
        Cost: about 4 N D S multiply-adds, as 2 CHUNK steps over all chunks of a block and a logarithmic pass over the
        ends of the chunks. Memory: three arrays (B, min(N, BLOCK), D, S); for the backward, two arrays (B, N, D, S)
        are kept. A traced graph uses no blocks.
    Raises:
        ShapeError: the shapes do not match.
    """
    _check(u, delta, A, B, C, mask, state)
    dtype, n = accumulator(u.dtype), u.shape[1]
    with without_autocast(u.device):
        inputs = [None if part is None else part.to(dtype) for part in (u, delta, A, B, C, D, z, delta_bias, state)]
        u_, delta_, A_, B_, C_, D_, z_, bias, h = inputs
        assert u_ is not None and delta_ is not None and A_ is not None and B_ is not None and C_ is not None
        step = delta_ if bias is None else delta_ + bias
        step = F.softplus(step) if delta_softplus else step
        if mask is not None:
            hidden = ~mask.unsqueeze(-1)
            step, u_ = step.masked_fill(hidden, 0.0), u_.masked_fill(hidden, 0.0)
            B_ = B_ if B_.ndim == 2 else B_.masked_fill(hidden if B_.ndim == 3 else hidden.unsqueeze(-1), 0.0)
        h = u_.new_zeros(u.shape[0], *A.shape) if h is None else h
        if torch.compiler.is_compiling() or n <= BLOCK:
            y, h = _block(u_, step, A_, B_, C_, h)
        else:
            parts = []
            for start in range(0, n, BLOCK):
                block = slice(start, start + BLOCK)
                B_block, C_block = (part[:, block] if part.ndim > 2 else part for part in (B_, C_))
                y, h = _block(u_[:, block], step[:, block], A_, B_block, C_block, h)
                parts.append(y)
            y = torch.cat(parts, dim=1)
        y = y if D_ is None else y + D_ * u_
        y = y if z_ is None else y * F.silu(z_)
    return y.to(u.dtype), h


def selective_summary(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, delta_bias: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """h after the last token from zeros, and what the tokens leave of an earlier h, exp(Σ Δ A): (B, D, S) each.

    Arguments as in `selective_scan` with `delta_softplus`. Cost: its third, for it has no outputs and no scan: every
    token enters with the decay of those behind it.
    """
    dtype = accumulator(u.dtype)
    with without_autocast(u.device):
        u, B, A, step = (part.to(dtype) for part in (u, B, A, F.softplus(delta.to(dtype) + delta_bias.to(dtype))))
        if mask is not None:
            step = step.masked_fill(~mask.unsqueeze(-1), 0.0)
        whole = step.sum(1, keepdim=True)
        behind = F.pad(step[:, 1:], (0, 0, 0, 1)).flip(1).cumsum(1).flip(1)  # Σ of the steps after each token
        weights = (behind.unsqueeze(-1) * A).exp() * (step * u).unsqueeze(-1)  # (B, N, D, S)
        return (weights * B.unsqueeze(2)).sum(1), (whole.transpose(1, 2) * A).exp()


def _block(u: Tensor, step: Tensor, A: Tensor, B: Tensor, C: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """y without the skip connection and the gate, and the last state."""

    def per_channel(x: Tensor) -> Tensor:
        """Reshape B or C so that it broadcasts with (B, N, D, S)."""
        if x.ndim == 4:
            return x.repeat_interleave(u.shape[2] // x.shape[2], dim=2)
        return x if x.ndim == 2 else x.unsqueeze(-2)

    decay = torch.exp(step.unsqueeze(-1) * A)  # (B, N, D, S)
    states = linear_scan(decay, (step * u).unsqueeze(-1) * per_channel(B), h)
    shared = C.ndim == 3  # one vector for all channels: the product avoids writing another (B, N, D, S)
    y = (states @ C.unsqueeze(-1)).squeeze(-1) if shared else (states * per_channel(C)).sum(-1)
    return y, states[:, -1].clone()  # a view would keep all states in memory


def linear_scan(a: Tensor, b: Tensor, start: Tensor, reverse: bool = False) -> Tensor:
    """Compute h_t = a_t h_{t-1} + b_t elementwise, for a and b (B, N, *) and h_{-1} = start (B, *).

    With `reverse`, the recurrence runs from the last token to the first.
    """
    if transformed():
        return _linear_scan_plain(a, b, start, reverse)
    h: Tensor = _linear_scan(a, b, start, reverse)
    return h


def transformed() -> bool:
    """Whether torch.func or forward-mode derivatives are at work, which see no custom operator."""
    return forward_mode() or (
        not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None
    )


def _linear_scan_plain(a: Tensor, b: Tensor, start: Tensor, reverse: bool) -> Tensor:
    """The same in plain PyTorch, where functions are `transformed`."""
    a, b = (part.flip(1) for part in (a, b)) if reverse else (a, b)
    h = torch.addcmul(b, a, _before_chunks(a, b, start))  # every token a chunk of its own
    return h.flip(1) if reverse else h


@torch.library.custom_op(
    "polymix::linear_scan", mutates_args=(), schema="(Tensor a, Tensor b, Tensor start, bool reverse) -> Tensor"
)
def _linear_scan(a: Tensor, b: Tensor, start: Tensor, reverse: bool) -> Tensor:
    """A custom op, because a traced graph cannot contain a number of passes that depends on N."""
    n = a.shape[1]
    whole = n - n % CHUNK
    h = torch.empty_like(b, memory_format=torch.contiguous_format)

    def step_through(places: range, state: Tensor) -> Tensor:
        for t in places:
            state = torch.addcmul(b[:, t], a[:, t], state, out=h[:, t])
        return state

    if reverse:
        start = step_through(range(n - 1, whole - 1, -1), start)
    if whole:
        decays, gains, states = (x[:, :whole].unflatten(1, (-1, CHUNK)) for x in (a, b, h))
        _chunks(decays, gains, states, start, reverse)
        start = h[:, whole - 1]
    if not reverse:
        step_through(range(whole, n), start)
    return h


def _chunks(a: Tensor, b: Tensor, h: Tensor, start: Tensor, reverse: bool) -> None:
    """Fill h (B, K, T, *): first each chunk's effect on a state, then the states between chunks, then all states."""
    order = range(CHUNK - 1, -1, -1) if reverse else range(CHUNK)
    first, *rest = order
    end, decay = b[:, :, first], a[:, :, first]
    for t in rest:
        end, decay = torch.addcmul(b[:, :, t], a[:, :, t], end), decay * a[:, :, t]
    if reverse:
        end, decay = end.flip(1), decay.flip(1)
    state = _before_chunks(decay, end, start)
    state = state.flip(1) if reverse else state
    for t in order:
        state = torch.addcmul(b[:, :, t], a[:, :, t], state, out=h[:, :, t])


def _before_chunks(decay: Tensor, end: Tensor, start: Tensor) -> Tensor:
    """The state at the beginning of each chunk, (B, K, *), where a chunk maps a state h to decay h + end.

    Uses doubling: before the pass with distance s, entry k holds the combined effect of the s chunks up to k.
    """
    # Entry k is the effect of what precedes chunk k: for k = 0, setting the state to `start`; else, chunk k - 1.
    end = torch.cat((start.unsqueeze(1), end[:, :-1]), dim=1)
    decay = torch.cat((torch.zeros_like(start).unsqueeze(1), decay[:, :-1]), dim=1)
    distance = 1
    while distance < end.shape[1]:
        late_end = torch.addcmul(end[:, distance:], decay[:, distance:], end[:, :-distance])
        late_decay = decay[:, distance:] * decay[:, :-distance]
        end = torch.cat((end[:, :distance], late_end), dim=1)
        decay = torch.cat((decay[:, :distance], late_decay), dim=1)
        distance *= 2
    return end


@_linear_scan.register_fake
def _(a: Tensor, b: Tensor, start: Tensor, reverse: bool) -> Tensor:
    return torch.empty_like(b, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, _, start, ctx.reverse = inputs
    ctx.save_for_backward(a, start, output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    """The gradient is a scan in the other direction, g_t = grad_t + a_{t+1} g_{t+1}, so it is differentiable too."""
    a, start, h = ctx.saved_tensors
    zeros = torch.zeros_like(start)
    g = linear_scan(_shifted(a, zeros, not ctx.reverse), grad, zeros, not ctx.reverse)
    end = -1 if ctx.reverse else 0
    return g * _shifted(h, start, ctx.reverse), g, a[:, end] * g[:, end], None


def _shifted(x: Tensor, first: Tensor, reverse: bool) -> Tensor:
    """Shift x one token later, with `first` in front; or, if `reverse`, one token earlier, with `first` at the end."""
    first = first.unsqueeze(1)
    return torch.cat((x[:, 1:], first) if reverse else (first, x[:, :-1]), dim=1)


def _vmap(info: Any, dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
    """The vmap rule: the mapped axis is merged into the batch."""
    *parts, reverse = args
    merged = [
        (x.unsqueeze(0).expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)
        for x, dim in zip(parts, dims[:3], strict=True)
    ]
    a, b, start = merged
    return linear_scan(a, b, start, reverse).unflatten(0, (info.batch_size, -1)), 0


_linear_scan.register_autograd(_backward, setup_context=_save)
_linear_scan.register_vmap(_vmap)


def _check(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, mask: Tensor | None, state: Tensor | None
) -> None:
    """Raise ShapeError unless the shapes match."""
    if u.ndim != 3 or u.shape[1] == 0:
        raise ShapeError("u", tuple(u.shape), "(B, N, D) with N ≥ 1", "Put the channels last.")
    if A.ndim != 2 or A.shape[0] != u.shape[2]:
        raise ShapeError("A", tuple(A.shape), f"({u.shape[2]}, S)", "Pass one row per channel.")
    batch, n, channels = u.shape
    size = A.shape[1]
    for name, value, shape in (("delta", delta, u.shape), ("state", state, (batch, channels, size)),
                               ("mask", mask, (batch, n))):  # fmt: skip
        if value is not None and tuple(value.shape) != tuple(shape):
            raise ShapeError(name, tuple(value.shape), str(tuple(shape)), "")
    for name, value in (("B", B), ("C", C)):
        plain = tuple(value.shape) in ((batch, n, size), (channels, size))
        grouped = value.ndim == 4 and tuple(value.shape[:2]) == (batch, n) and value.shape[3] == size
        if not plain and not (grouped and channels % value.shape[2] == 0):
            allowed = f"({batch}, {n}, {size}), ({batch}, {n}, G, {size}) with G a divisor of {channels}, "
            raise ShapeError(name, tuple(value.shape), allowed + f"or ({channels}, {size})", "")
