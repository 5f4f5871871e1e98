"""The gated delta rule: a memory whose value at a key is corrected by each token, and which fades; in chunks."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from polymix.extras import is_installed
from polymix.ops.related.selective_scan import transformed
from polymix.ops.shared.causal_sums import first_tokens, hide, in_chunks
from polymix.ops.shared.tensors import accumulator, without_autocast

# Tokens in a chunk. The decays of each channel between all its pairs are in memory, which larger chunks make larger.
CHUNK = 16


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, *,
    mask: Tensor | None = None, state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute S ← diag(a_t) S, S ← S + β_t k_t (v_t - k_tᵀ S)ᵀ and y_t = q_tᵀ S for each token, and the last S.

    Within a chunk the corrections u = T (β v - β k e^G S) are a triangular system: G sums the logarithms of the decays
    a, and T inverts I + L with L_ij = β_i Σ_c k_ic k_jc e^(G_ic - G_jc) for j < i. Between chunks S ← P S + U. No
    exponent is positive, so that decays may vanish.

    Args:
        q: (B, h, N, d).
        k: (B, h, N, d), of length 1 for a stable memory.
        v: (B, h, N, e).
        log_decay: log a ≤ 0, (B, h, N, d), or (B, h, N, 1) for one decay of all channels.
        beta: (B, h, N, 1), from 0 to 1.
        mask: (B, N), True for real tokens; the others change nothing.
        state: S before the first token, (B, h, d, e); None for zeros.
    Returns:
        y (B, h, N, e) in the dtype of v, and S after the last token; sums are in float32 or wider.
        Cost: for each chunk of c = 16 tokens 2 c² (d + e) + c²(c - 1) / 2 + c d (d + 2 e) + d² e multiply-adds per
        head, and 2 c² d for the pairs, or twice as many with a decay for each channel.
    """
    out, dtype, n, width = v.dtype, accumulator(v.dtype), q.shape[2], k.shape[-1]
    size = 1 if n == 1 else CHUNK
    with without_autocast(q.device):
        parts = [q.to(dtype), *(hide(part.to(dtype), mask) for part in (k, v, log_decay, beta))]
        q, k, v, log_decay, beta = (in_chunks(part, size) for part in parts)
        past = log_decay.cumsum(-2)
        whole = past[..., -1:, :]  # the decays of a chunk together
        lower = torch.ones(size, size, dtype=torch.bool, device=k.device).tril()
        between = (past.unsqueeze(-2) - past.unsqueeze(-3)).masked_fill(~lower[..., None], -torch.inf).exp()
        inverse = _unit_inverse(beta * _pairs(k, k, between))
        corrections = inverse @ (beta * torch.cat((k * past.exp(), v), -1))  # T β k e^G, T β v
        kept = (k * (whole - past).exp()).mT @ corrections
        fade = torch.eye(width, dtype=dtype, device=k.device) * whole.exp()  # diagonal
        start = torch.zeros_like(kept[:, :, 0, :, width:]) if state is None else state.to(dtype)
        states = matrix_scan(fade - kept[..., :width], kept[..., width:], start)
        read = _pairs(q, k, between) @ corrections
        y = (q * past.exp() - read[..., :width]) @ states[:, :, :-1] + read[..., width:]
        return first_tokens(y.flatten(2, 3), n).to(out), states[:, :, -1].clone()


def _pairs(left: Tensor, right: Tensor, between: Tensor) -> Tensor:
    """Σ_c left_ic right_jc between_ijc, zero for later j: (…, c, c)."""
    if between.shape[-1] == 1:
        return (left @ right.mT) * between[..., 0]
    return (left.unsqueeze(-2) * between * right.unsqueeze(-3)).sum(-1)


def _unit_inverse(lower: Tensor) -> Tensor:
    """The inverse of I + L, with L the part of `lower` (…, c, c) below its diagonal, row by row."""
    size = lower.shape[-1]
    rows = torch.eye(size, dtype=lower.dtype, device=lower.device).expand_as(lower)
    done = rows[..., :1, :]
    for i in range(1, size):
        done = torch.cat((done, rows[..., i : i + 1, :] - lower[..., i : i + 1, :i] @ done), -2)
    return done


def matrix_scan(step: Tensor, gain: Tensor, start: Tensor) -> Tensor:
    """The states S_0 = start, S_n+1 = step_n S_n + gain_n: (B, h, C, d, d), (B, h, C, d, e) -> (B, h, C + 1, d, e)."""
    if transformed() or not (torch.compiler.is_compiling() or _numpy()):
        return _plain(step, gain, start)
    states: Tensor = _matrix_scan(step, gain, start)
    return states


@cache
def _numpy() -> bool:
    """Whether NumPy is there. PyTorch's custom ops need it outside of graphs, and PyTorch alone does not bring it."""
    return is_installed("numpy")


def _plain(step: Tensor, gain: Tensor, start: Tensor) -> Tensor:
    states = [start]
    for passed, added in zip(step.unbind(2), gain.unbind(2), strict=True):
        states.append(passed @ states[-1] + added)
    return torch.stack(states, 2)


@torch.library.custom_op("polymix::matrix_scan", mutates_args=())
def _matrix_scan(step: Tensor, gain: Tensor, start: Tensor) -> Tensor:
    """A custom op, because a traced graph cannot contain a number of passes that depends on N."""
    return _plain(step, gain, start).contiguous()


@_matrix_scan.register_fake
def _(step: Tensor, gain: Tensor, start: Tensor) -> Tensor:
    batch, heads, chunks, rows, columns = gain.shape
    return gain.new_empty(batch, heads, chunks + 1, rows, columns)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient is a scan from the last state to the first, so it is differentiable too."""
    step, states = ctx.saved_tensors
    back = matrix_scan(step.mT.flip(2), grad[:, :, :-1].flip(2), grad[:, :, -1]).flip(2)
    return back[:, :, 1:] @ states[:, :, :-1].mT, back[:, :, 1:], back[:, :, 0]


def _vmap(info: Any, dims: tuple[Any, ...], *args: Tensor) -> tuple[Tensor, int]:
    """The mapped axis is merged into the batch."""
    merged = [
        (x.unsqueeze(0).expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)
        for x, dim in zip(args, dims, strict=True)
    ]
    return matrix_scan(*merged).unflatten(0, (info.batch_size, -1)), 0


_matrix_scan.register_autograd(_backward, setup_context=_save)
_matrix_scan.register_vmap(_vmap)
