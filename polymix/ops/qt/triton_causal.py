"""Causal quadratic-Taylor attention in Triton for GPUs: pairs within a chunk, and moments of the chunks before it.

One launch computes the moments of all chunks, a running sum over the chunks turns them into the moments before each
chunk, and the kernels of `polymix.ops.qt.triton` query these. The backward runs the same sum from the end.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from polymix.ops.qt.eager import feature_size
from polymix.ops.qt.triton import (
    block_d,
    block_n,
    degree_weights,
    grad_of_scale,
    is_real,
    load_last,
    load_tile,
    mask_arguments,
    own_tokens,
    pulled_back,
    warps,
    weights_of,
    write_moments,
    write_query,
)
from polymix.ops.shared.triton_functions import precision

CHUNK = 128  # tokens in a chunk, whose pairs are computed directly; F (d + 1) moments are stored per chunk
ENTRIES_PER_PROGRAM = 256  # entries of the moments that one program of the running sum processes


@triton.jit(do_not_specialize=["slots"])
def _running_kernel(x, slots, size: tl.constexpr, REVERSE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Replace x (rows, slots, size) by its running sum over the slots; with REVERSE, starting from the last slot."""
    BLOCKS: tl.constexpr = (size + BLOCK - 1) // BLOCK
    entry = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    x += (tl.program_id(0) // BLOCKS).to(tl.int64) * slots * size
    carry = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, slots, TILE):
        step = first + tl.arange(0, TILE)
        slot = slots - 1 - step if REVERSE else step
        place = x + slot.to(tl.int64)[:, None] * size + entry[None, :]
        keep = (step < slots)[:, None] & (entry < size)[None, :]
        tile = tl.load(place, mask=keep, other=0.0)
        tl.store(place, carry[None, :] + tl.cumsum(tile, 0), mask=keep)
        carry += tl.sum(tile, 0)


@triton.jit
def _similarity(q, k, keep, w0, w1, w2, ORDER: tl.constexpr, FULL: tl.constexpr, PRECISION: tl.constexpr):
    """⟨φ(q), φ(k)⟩ = w_0² + w_1² s + w_2² r, with s = q·k and r = s²/2 (full) or q²·k² (compact); 0 unless `keep`."""
    product = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    squares = 0.5 * product * product if FULL else tl.dot(q * q, tl.trans(k * k), input_precision=PRECISION)
    similarity = tl.zeros_like(product) + w0 * w0
    if ORDER >= 1:
        similarity += w1 * w1 * product
    if ORDER == 2:
        similarity += w2 * w2 * squares
    return tl.where(keep, similarity, 0.0), product, squares


@triton.jit
def _slope(product, grad, w1, w2, ORDER: tl.constexpr, FULL: tl.constexpr):
    """The gradient of s = q·k from that of the similarity."""
    slope = w1 * w1 * grad if ORDER >= 1 else 0.0 * grad
    return slope + w2 * w2 * product * grad if ORDER == 2 and FULL else slope


@triton.jit(do_not_specialize=["n", "blocks"])
def _inside_kernel(
    q, q_b, q_h, q_n, q_d, k, k_b, k_h, k_n, k_d, v, v_b, v_h, v_n, v_d, mask, mask_b, mask_n, weights, out,
    heads, n, blocks,
    D: tl.constexpr, ORDER: tl.constexpr, FULL: tl.constexpr, PRECISION: tl.constexpr,
    SPAN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out_n (D + 1) = Σ_j ⟨φ(q_n), φ(k_j)⟩ [v_j, 1] over the tokens j ≤ n in the chunk of n."""
    block, row, batch, head, token = own_tokens(heads, blocks, BLOCK_N)
    q += batch * q_b + head * q_h
    k += batch * k_b + head * k_h
    v += batch * v_b + head * v_h
    w0, w1, w2 = weights_of(weights, head, D, FULL)
    channel = tl.arange(0, BLOCK_D)
    query = load_tile(q, q_n, q_d, token, channel, token < n, D)
    total = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    tail = tl.zeros((BLOCK_N,), tl.float32)
    for first in range(block * BLOCK_N // SPAN * SPAN, (block + 1) * BLOCK_N, BLOCK_N):
        other = (first + tl.arange(0, BLOCK_N)).to(tl.int64)
        real = is_real(mask, mask_b, mask_n, batch, other, n)
        key = load_tile(k, k_n, k_d, other, channel, real, D)
        keep = (token[:, None] >= other[None, :]) & real[None, :]
        similarity, _, _ = _similarity(query, key, keep, w0, w1, w2, ORDER, FULL, PRECISION)
        total += tl.dot(similarity, load_tile(v, v_n, v_d, other, channel, real, D), input_precision=PRECISION)
        tail += tl.sum(similarity, 1)
    place = out + (row * n + token) * (D + 1)
    tl.store(place[:, None] + channel[None, :], total, mask=(token < n)[:, None] & (channel < D)[None, :])
    tl.store(place + D, tail, mask=token < n)


@triton.jit(do_not_specialize=["n", "blocks"])
def _inside_backward_kernel(
    g, g_b, g_h, g_n, g_d, q, q_b, q_h, q_n, q_d, k, k_b, k_h, k_n, k_d, v, v_b, v_h, v_n, v_d, mask, mask_b, mask_n,
    weights, grad_q, grad_k, grad_v, grad_w, heads, n, blocks,
    D: tl.constexpr, ORDER: tl.constexpr, FULL: tl.constexpr, PRECISION: tl.constexpr,
    SPAN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The gradients of q, k and v (B, h, N, D) and each program's of the weights, for g (D + 1) of `_inside_kernel`.

    A program processes BLOCK_N tokens: first as queries of the keys before them, then as keys of the queries after
    them.
    """
    block, row, batch, head, token = own_tokens(heads, blocks, BLOCK_N)
    g += batch * g_b + head * g_h
    q += batch * q_b + head * q_h
    k += batch * k_b + head * k_h
    v += batch * v_b + head * v_h
    w0, w1, w2 = weights_of(weights, head, D, FULL)
    channel = tl.arange(0, BLOCK_D)
    chunk = block * BLOCK_N // SPAN * SPAN
    place = (row * n + token)[:, None] * D + channel[None, :]
    written = (token < n)[:, None] & (channel < D)[None, :]

    query = load_tile(q, q_n, q_d, token, channel, token < n, D)
    grad = load_tile(g, g_n, g_d, token, channel, token < n, D)
    last = load_last(g, g_n, g_d, token, token < n, D, True)
    total = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    squared, zeros = total, tl.zeros((BLOCK_N,), tl.float32)
    grad_w0, grad_w1, grad_w2 = zeros, zeros, zeros
    for first in range(chunk, (block + 1) * BLOCK_N, BLOCK_N):
        other = (first + tl.arange(0, BLOCK_N)).to(tl.int64)
        real = is_real(mask, mask_b, mask_n, batch, other, n)
        key, value = load_tile(k, k_n, k_d, other, channel, real, D), load_tile(v, v_n, v_d, other, channel, real, D)
        keep = (token[:, None] >= other[None, :]) & real[None, :]
        _, product, squares = _similarity(query, key, keep, w0, w1, w2, ORDER, FULL, PRECISION)
        grad_weights = tl.where(keep, tl.dot(grad, tl.trans(value), input_precision=PRECISION) + last[:, None], 0.0)
        total += tl.dot(_slope(product, grad_weights, w1, w2, ORDER, FULL), key, input_precision=PRECISION)
        if not FULL:
            grad_w0 += tl.sum(grad_weights, 1)
            grad_w1 += tl.sum(grad_weights * product, 1)
            grad_w2 += tl.sum(grad_weights * squares, 1)
            if ORDER == 2:
                squared += tl.dot(w2 * w2 * grad_weights, key * key, input_precision=PRECISION)
    tl.store(grad_q + place, total + 2 * query * squared, mask=written)
    if not FULL:
        grad_w += tl.program_id(0).to(tl.int64) * 3
        tl.store(grad_w, 2 * w0 * tl.sum(grad_w0, 0))
        tl.store(grad_w + 1, 2 * w1 * tl.sum(grad_w1, 0) if ORDER >= 1 else 0.0)
        tl.store(grad_w + 2, 2 * w2 * tl.sum(grad_w2, 0) if ORDER == 2 else 0.0)

    real = is_real(mask, mask_b, mask_n, batch, token, n)
    key, value = load_tile(k, k_n, k_d, token, channel, real, D), load_tile(v, v_n, v_d, token, channel, real, D)
    total = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    squared, passed = total, total
    for first in range(block * BLOCK_N, tl.minimum(chunk + SPAN, n), BLOCK_N):
        other = (first + tl.arange(0, BLOCK_N)).to(tl.int64)
        query = load_tile(q, q_n, q_d, other, channel, other < n, D)
        grad = load_tile(g, g_n, g_d, other, channel, other < n, D)
        last = load_last(g, g_n, g_d, other, other < n, D, True)
        keep = (other[:, None] >= token[None, :]) & real[None, :]
        similarity, product, _ = _similarity(query, key, keep, w0, w1, w2, ORDER, FULL, PRECISION)
        grad_weights = tl.where(keep, tl.dot(grad, tl.trans(value), input_precision=PRECISION) + last[:, None], 0.0)
        slope = _slope(product, grad_weights, w1, w2, ORDER, FULL)
        total += tl.dot(tl.trans(slope), query, input_precision=PRECISION)
        passed += tl.dot(tl.trans(similarity), grad, input_precision=PRECISION)
        if ORDER == 2 and not FULL:
            squared += tl.dot(tl.trans(w2 * w2 * grad_weights), query * query, input_precision=PRECISION)
    tl.store(grad_k + place, total + 2 * key * squared, mask=written)
    tl.store(grad_v + place, passed, mask=written)


def _small(x: Tensor) -> int:
    """Tokens in a tile where three gradients are held at once: in float32, more do not fit in a thread's registers."""
    return 16 if x.dtype == torch.float32 else 32


def _running(slots: Tensor, reverse: bool) -> None:
    """Replace slots (B, h, chunks + 1, F, d + 1) by their running sum over the chunks.

    The moments before a chunk are not computed as differences of sums, which would leak the future through rounding.
    """
    rows, count, size = slots.shape[0] * slots.shape[1], slots.shape[2], slots.shape[3] * slots.shape[4]
    grid = (rows * triton.cdiv(size, ENTRIES_PER_PROGRAM),)
    _running_kernel[grid](slots, count, size=size, REVERSE=reverse, BLOCK=ENTRIES_PER_PROGRAM, TILE=8, num_warps=4)


def _before(
    k: Tensor, v: Tensor, form: str, order: int, weights: Tensor | None, mask: Tensor | None, start: Tensor | None
) -> Tensor:
    """The moments before each chunk and, last, after the sequence: (B, h, chunks + 1, F, d + 1)."""
    batch, heads, n, d = k.shape
    shape = (batch, heads, triton.cdiv(n, CHUNK) + 1, feature_size(d, form, order), d + 1)
    slots = torch.empty(shape, dtype=torch.float32, device=k.device)
    slots[:, :, 0] = 0.0 if start is None else start
    write_moments(slots[:, :, 1:], k, v, CHUNK, form, order, weights, mask)
    _running(slots, reverse=False)
    return slots


def causal(
    q: Tensor, k: Tensor, v: Tensor, *, form: str, order: int, scale: Tensor | None = None, mask: Tensor | None = None,
    start: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute φ(q_n) (start + Σ_{j ≤ n} φ(k_j) ⊗ [v_j, 1]).

    Args:
        q: (B, h, N, d).
        k: (B, h, N, d).
        v: (B, h, N, d).
        form: "compact" or "full".
        order: 0, 1 or 2.
        scale: α, β, γ of the compact form, (3, heads, 1, 1).
        mask: (B, N), True for real tokens.
        start: the moments before the first token, (B, h, F, d + 1); None for zeros.
    Returns:
        The sums (B, h, N, d + 1) and the moments after the last token (B, h, F, d + 1), both in float32. Cost:
        N (2 F + CHUNK) (d + 1) multiply-adds per head, and N / CHUNK moments in memory.
    """
    batch, heads, n, d = q.shape
    weights, blocks = degree_weights(scale, d), triton.cdiv(n, block_n(q))
    before = _before(k, v, form, order, weights, mask, start)
    weighted = torch.empty(batch, heads, n, d + 1, dtype=torch.float32, device=q.device)
    _inside_kernel[(batch * heads * blocks,)](
        q, *q.stride(), k, *k.stride(), v, *v.stride(), *mask_arguments(mask), weights, weighted, heads, n, blocks,
        D=d, ORDER=order, FULL=form == "full", PRECISION=precision(q),
        SPAN=CHUNK, BLOCK_N=block_n(q), BLOCK_D=block_d(d), num_warps=warps(),
        num_stages=2,  # with three tiles under way, 16 bits do not fit in an A100's registers
    )  # fmt: skip
    write_query(weighted, q, before, CHUNK, form, weights, base=weighted)
    return weighted, before[:, :, -1].clone()


def causal_backward(
    grad_weighted: Tensor, grad_end: Tensor, q: Tensor, k: Tensor, v: Tensor, *, form: str, order: int,
    scale: Tensor | None = None, mask: Tensor | None = None, start: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients of q, k, v, `scale` and `start` (None if not given), for the gradients of both results."""
    (batch, heads, n, d), dtype = q.shape, torch.float32
    weights, blocks = degree_weights(scale, d), triton.cdiv(n, _small(q))
    before = _before(k, v, form, order, weights, mask, start)
    after = torch.empty(before.shape, dtype=dtype, device=q.device)  # the gradient of each chunk's moments
    after[:, :, -1] = grad_end
    write_moments(after[:, :, :-1], q, grad_weighted, CHUNK, form, order, weights, None)
    _running(after, reverse=True)

    direct = torch.empty(3, batch, heads, n, d, dtype=dtype, device=q.device)
    grad_w = None
    if weights is not None:
        grad_w = torch.empty(batch, heads, blocks, 3, dtype=dtype, device=q.device)
    _inside_backward_kernel[(batch * heads * blocks,)](
        grad_weighted, *grad_weighted.stride(), q, *q.stride(), k, *k.stride(), v, *v.stride(), *mask_arguments(mask),
        weights, *direct, grad_w, heads, n, blocks,
        D=d, ORDER=order, FULL=form == "full", PRECISION=precision(q),
        SPAN=CHUNK, BLOCK_N=_small(q), BLOCK_D=block_d(d), num_warps=warps(),
    )  # fmt: skip
    grad_q, q_w = pulled_back(q, grad_weighted, before, CHUNK, form, order, weights, base=direct[0])
    grad_k, k_w = pulled_back(k, v, after[:, :, 1:], CHUNK, form, order, weights, mask, base=direct[1])
    grad_v = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    write_query(grad_v, k, after[:, :, 1:], CHUNK, form, weights, mask, base=direct[2])
    if grad_w is not None and q_w is not None and k_w is not None:
        grad_w = torch.cat((grad_w, q_w, k_w), dim=2)
    grad_start = None if start is None else after[:, :, 0].clone()
    return grad_q, grad_k, grad_v, grad_of_scale(grad_w, d), grad_start
