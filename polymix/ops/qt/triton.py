"""Quadratic-Taylor attention in Triton for GPUs. The features φ are computed on the fly and never written to memory.

A feature is the product of two entries of [x, 1], weighted by its degree in x: w_0, w_1 x_i or w_2 x_i x_j, in the
order of `taylor_features`. Three kernels are enough. Each works with rows of d + 1 numbers per token ([v, 1], or the
gradient of a query's result):
    moments:  features times rows
    query:    features times moments, which gives rows
    pull:     rows times moments, which is the gradient of the features, converted to the gradient of x right away
The moments may differ from part to part of the tokens.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from polymix.ops.qt.eager import feature_size
from polymix.ops.shared.triton_functions import precision

PROGRAMS = 512  # the number of programs that pooling aims for: several per multiprocessor of the largest GPUs
FEATURES = 64  # features held in registers at a time
THREADS = 256  # of a program: with 128, the tiles do not fit in the registers of a thread
COLUMNS_PER_PROGRAM = 64  # columns of the gradient of x that one program computes: a whole head of the usual size


@triton.jit
def weights_of(weights, head, D: tl.constexpr, FULL: tl.constexpr):
    """(w_0, w_1, w_2) of a head: 1, d^-¼, d^-½ in the full form; from `weights` (heads, 3) in the compact form."""
    if FULL:
        return 1.0, D**-0.25, D**-0.5
    else:  # noqa: RET505  Triton compiles only the branch that is taken
        return tl.load(weights + head * 3), tl.load(weights + head * 3 + 1), tl.load(weights + head * 3 + 2)


@triton.jit
def own_tokens(heads, blocks, BLOCK_N: tl.constexpr):
    """The program's BLOCK_N tokens: their block number, row of batch × heads, batch, head and indices."""
    block, row = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    token = (block * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    return block, row, row // heads, row % heads, token


@triton.jit
def is_real(mask, mask_b, mask_n, batch, token, n):
    """Which tokens exist and are real; `mask` may be None."""
    real = token < n
    if mask is not None:
        real = tl.load(mask + batch * mask_b + token * mask_n, mask=real, other=0) != 0
    return real


@triton.jit
def load_tile(x, x_n, x_d, token, channel, real, D: tl.constexpr):
    """Load (tokens, channels) as float32; tokens that are not real are zero and never read."""
    keep = real[:, None] & (channel < D)[None, :]
    return tl.load(x + token[:, None] * x_n + channel[None, :] * x_d, mask=keep, other=0.0).to(tl.float32)


@triton.jit
def load_last(rows, r_n, r_d, token, real, D: tl.constexpr, LAST: tl.constexpr):
    """The last column of the rows: column D with LAST, else the 1 of [v, 1]; zero for tokens that are not real."""
    if LAST:
        return tl.load(rows + token * r_n + D * r_d, mask=real, other=0.0).to(tl.float32)
    else:  # noqa: RET505
        return real.to(tl.float32)


@triton.jit
def _diagonal(i, D: tl.constexpr):
    """The index of x_i² among the features of the full form."""
    return 1 + D + i * D - i * (i - 1) // 2


@triton.jit
def _entries(f, D: tl.constexpr, FULL: tl.constexpr):
    """The two entries of [x, 1] whose product feature f is; entry D is the 1."""
    linear = tl.where(f > 0, f - 1, D)
    i = tl.minimum(tl.maximum(f - 1 - D, 0), D - 1)
    j = i
    if FULL:
        pair = tl.minimum(tl.maximum(f - 1 - D, 0), D * (D + 1) // 2 - 1)
        root = tl.sqrt(((2 * D + 1) * (2 * D + 1) - 8 * pair).to(tl.float32))
        i = ((2 * D + 1 - root) / 2).to(tl.int32)
        i -= (_diagonal(i, D) > pair + 1 + D).to(tl.int32)  # correct i, because the root may round up or down
        i += (_diagonal(i + 1, D) <= pair + 1 + D).to(tl.int32)
        j = pair + 1 + D - _diagonal(i, D) + i
    return tl.where(f > D, i, D), tl.where(f > D, j, linear)


@triton.jit
def _features(x, x_n, x_d, token, real, f, w0, w1, w2, D: tl.constexpr, F: tl.constexpr, FULL: tl.constexpr):
    """φ_f of the tokens; `token` and `f` must broadcast. The result is finite even for tokens that are not real."""
    left, right = _entries(f, D, FULL)
    keep = real & (f < F)
    one = tl.load(x + token * x_n + left * x_d, mask=keep & (left < D), other=1.0).to(tl.float32)
    two = tl.load(x + token * x_n + right * x_d, mask=keep & (right < D), other=1.0).to(tl.float32)
    quadratic = w2 * tl.where(left == right, 0.7071067811865476, 1.0) if FULL else w2
    return one * two * tl.where(f == 0, w0, tl.where(f <= D, w1, quadratic))


@triton.jit(do_not_specialize=["n", "span", "parts"])
def _moments_kernel(
    x, x_b, x_h, x_n, x_d, rows, r_b, r_h, r_n, r_d, mask, mask_b, mask_n, weights, out, out_row, heads, n, span, parts,
    D: tl.constexpr, F: tl.constexpr, FULL: tl.constexpr, LAST: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out[row, part] (F, D + 1) = Σ φ(x_n) ⊗ rows_n over the `span` tokens of a part, BLOCK_F rows per program."""
    TILES: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    tile, part = tl.program_id(0) % TILES, tl.program_id(0) // TILES % parts
    row = (tl.program_id(0) // TILES // parts).to(tl.int64)  # of batch × heads
    batch, head = row // heads, row % heads
    x += batch * x_b + head * x_h
    rows += batch * r_b + head * r_h
    w0, w1, w2 = weights_of(weights, head, D, FULL)
    f, channel = tile * BLOCK_F + tl.arange(0, BLOCK_F), tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_F, BLOCK_D), tl.float32)
    tail = tl.zeros((BLOCK_F,), tl.float32)
    for first in range(part * span, tl.minimum((part + 1) * span, n), BLOCK_N):
        token = (first + tl.arange(0, BLOCK_N)).to(tl.int64)
        real = is_real(mask, mask_b, mask_n, batch, token, n)
        phi = _features(x, x_n, x_d, token[None, :], real[None, :], f[:, None], w0, w1, w2, D, F, FULL)
        values = load_tile(rows, r_n, r_d, token, channel, real, D)
        total += tl.dot(phi, values, input_precision=PRECISION)
        tail += tl.sum(phi * load_last(rows, r_n, r_d, token, real, D, LAST)[None, :], 1)
    out += row * out_row + part.to(tl.int64) * F * (D + 1)
    tl.store(out + f[:, None] * (D + 1) + channel[None, :], total, mask=(f < F)[:, None] & (channel < D)[None, :])
    tl.store(out + f * (D + 1) + D, tail, mask=f < F)


@triton.jit(do_not_specialize=["n", "span", "blocks"])
def _query_kernel(
    x, x_b, x_h, x_n, x_d, mask, mask_b, mask_n, moments, m_row, m_part, weights, base, out, heads, n, span, blocks,
    D: tl.constexpr, F: tl.constexpr, FULL: tl.constexpr, LAST: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out_n (D, or D + 1 with LAST) = base_n + φ(x_n) · moments of token n's part; zero if n is not real."""
    block, row, batch, head, token = own_tokens(heads, blocks, BLOCK_N)
    x += batch * x_b + head * x_h
    moments += row * m_row + (block * BLOCK_N // span).to(tl.int64) * m_part
    w0, w1, w2 = weights_of(weights, head, D, FULL)
    channel = tl.arange(0, BLOCK_D)
    real = is_real(mask, mask_b, mask_n, batch, token, n)
    total = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    tail = tl.zeros((BLOCK_N,), tl.float32)
    for first in range(0, F, BLOCK_F):
        f = first + tl.arange(0, BLOCK_F)
        phi = _features(x, x_n, x_d, token[:, None], real[:, None], f[None, :], w0, w1, w2, D, F, FULL)
        total += tl.dot(phi, load_tile(moments, D + 1, 1, f, channel, f < F, D), input_precision=PRECISION)
        if LAST:
            tail += tl.sum(phi * load_last(moments, D + 1, 1, f, f < F, D, True)[None, :], 1)
    WIDTH: tl.constexpr = D + 1 if LAST else D
    place = (row * n + token) * WIDTH
    keep = (token < n)[:, None] & (channel < D)[None, :]
    if base is not None:
        total += tl.load(base + place[:, None] + channel[None, :], mask=keep, other=0.0)
    tl.store(out + place[:, None] + channel[None, :], tl.where(real[:, None], total, 0.0), mask=keep)
    if LAST:
        if base is not None:
            tail += tl.load(base + place + D, mask=token < n, other=0.0)
        tl.store(out + place + D, tl.where(real, tail, 0.0), mask=token < n)


@triton.jit
def _pull(rows, last, moments, f, inside, D: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr):
    """rows · moments[f], the gradient of the features f, (tokens, columns); f holds one feature per column."""
    e = tl.arange(0, BLOCK_D)
    keep = (e < D)[:, None] & inside[None, :]
    body = tl.load(moments + f[None, :] * (D + 1) + e[:, None], mask=keep, other=0.0)
    tail = tl.load(moments + f * (D + 1) + D, mask=inside, other=0.0)
    return tl.dot(rows, body, input_precision=PRECISION) + last[:, None] * tail[None, :]


@triton.jit
def _sum_of_all(x):
    """The sum of a tile, (1). By sums that keep the tile's axes: Triton 3.7 fails on two others for sm_100."""
    return tl.sum(tl.sum(x, 1, keep_dims=True), 0)


@triton.jit(do_not_specialize=["n", "span", "blocks"])
def _pull_kernel(
    x, x_b, x_h, x_n, x_d, rows, r_b, r_h, r_n, r_d, mask, mask_b, mask_n, moments, m_row, m_part, weights,
    base, out, grad_w, heads, n, span, blocks,
    D: tl.constexpr, ORDER: tl.constexpr, FULL: tl.constexpr, LAST: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out_n (D) = base_n + (∂φ(x_n)/∂x_n)ᵀ · (moments · rows_n), and each program's gradient of w_0, w_1, w_2.

    A program computes BLOCK_N tokens and BLOCK_J columns of x. The full form visits every pair (i, j) in both orders,
    which doubles the products but avoids scattered writes.
    """
    block, row, batch, head, token = own_tokens(heads, blocks, BLOCK_N)
    x += batch * x_b + head * x_h
    rows += batch * r_b + head * r_h
    moments += row * m_row + (block * BLOCK_N // span).to(tl.int64) * m_part
    _, w1, w2 = weights_of(weights, head, D, FULL)
    real = is_real(mask, mask_b, mask_n, batch, token, n)
    e, j = tl.arange(0, BLOCK_D), tl.program_id(1) * BLOCK_J + tl.arange(0, BLOCK_J)
    inside = j < D
    grad = load_tile(rows, r_n, r_d, token, e, real, D)
    last = load_last(rows, r_n, r_d, token, real, D, LAST)
    x_columns = load_tile(x, x_n, x_d, token, j, real, D)
    total = tl.zeros((BLOCK_N, BLOCK_J), tl.float32)
    grad_w1, grad_w2 = total, total
    if ORDER >= 1:
        linear = _pull(grad, last, moments, 1 + j, inside, D, BLOCK_D, PRECISION)
        total += w1 * linear
        grad_w1 = linear * x_columns
    if ORDER == 2 and FULL:
        for i in range(D):
            f = _diagonal(tl.minimum(i, j), D) + tl.maximum(i, j) - tl.minimum(i, j)
            slope = _pull(grad, last, moments, f, inside, D, BLOCK_D, PRECISION)
            slope *= tl.where(i == j, 1.4142135623730951 * w2, w2)[None, :]  # x_i²/√2 has the slope √2 x_i
            total += slope * tl.load(x + token * x_n + i * x_d, mask=real, other=0.0).to(tl.float32)[:, None]
    elif ORDER == 2:
        square = _pull(grad, last, moments, 1 + D + j, inside, D, BLOCK_D, PRECISION)
        total += 2 * w2 * x_columns * square
        grad_w2 = square * x_columns * x_columns
    place = (row * n + token)[:, None] * D + j[None, :]
    keep = (token < n)[:, None] & inside[None, :]
    if base is not None:
        total += tl.load(base + place, mask=keep, other=0.0)
    tl.store(out + place, tl.where(real[:, None], total, 0.0), mask=keep)
    if not FULL:
        constant = tl.load(moments + e, mask=e < D, other=0.0)[None, :] * grad
        grad_w0 = tl.sum(tl.sum(constant, 1) + last * tl.load(moments + D), 0)
        grad_w += (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * 3
        tl.store(grad_w, tl.where(tl.program_id(1) == 0, grad_w0, 0.0))  # counted once, by the first block of columns
        tl.store(grad_w + 1 + tl.arange(0, 1), _sum_of_all(grad_w1))
        tl.store(grad_w + 2 + tl.arange(0, 1), _sum_of_all(grad_w2))


def warps() -> int:
    """The warps of a program. Those of AMD's cards for servers have 64 threads."""
    return THREADS // (32 if torch.version.hip is None else 64)


def block_d(d: int) -> int:
    """The number of channels in a tile."""
    return max(16, triton.next_power_of_2(d))


def block_n(x: Tensor) -> int:
    """Tokens in a tile, a divisor of every `span`. Wide or float32 tiles of 64 do not fit on small GPUs."""
    return 64 if x.shape[-1] <= 64 and x.dtype != torch.float32 else 32


def degree_weights(scale: Tensor | None, d: int) -> Tensor | None:
    """Convert (α, β, γ), (3, heads, 1, 1), to the weights of the degrees, (heads, 3); None for the full form."""
    if scale is None:
        return None
    alpha, beta, gamma = scale.detach().float().flatten(1)
    return torch.stack((gamma, beta * (4 / d) ** 0.25, alpha), dim=1)


def grad_of_scale(grad_w: Tensor | None, d: int) -> Tensor | None:
    """Sum the gradients of the degrees' weights, (B, heads, …, 3), to that of `scale`, (3, heads, 1, 1)."""
    if grad_w is None:
        return None
    constant, linear, quadratic = grad_w.flatten(2, -2).sum((0, 2)).unbind(1)
    return torch.stack((quadratic, linear * (4 / d) ** 0.25, constant))[:, :, None, None]


def mask_arguments(mask: Tensor | None) -> tuple[Tensor | None, int, int]:
    """A mask and its strides, as the kernels take them."""
    return (None, 0, 0) if mask is None else (mask, mask.stride(0), mask.stride(1))


def write_moments(
    out: Tensor, x: Tensor, rows: Tensor, span: int, form: str, order: int, weights: Tensor | None, mask: Tensor | None
) -> None:
    """Write out (B, h, parts, F, d + 1) = Σ φ(x_n) ⊗ rows_n over each `span` tokens.

    `out` may have gaps between heads, but nowhere else.
    """
    (batch, heads, n, d), (parts, size) = x.shape, out.shape[2:4]
    _moments_kernel[(batch * heads * parts * triton.cdiv(size, FEATURES),)](
        x, *x.stride(), rows, *rows.stride(), *mask_arguments(mask), weights, out, out.stride(1), heads, n, span, parts,
        D=d, F=size, FULL=form == "full", LAST=rows.shape[-1] > d, PRECISION=precision(x),
        BLOCK_N=32, BLOCK_F=FEATURES, BLOCK_D=block_d(d), num_warps=warps(),
    )  # fmt: skip


def write_query(
    out: Tensor, x: Tensor, moments: Tensor, span: int, form: str, weights: Tensor | None, mask: Tensor | None = None,
    base: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Write out (B, h, N, d or d + 1) = base + φ(x) · moments (B, h, parts, F, d + 1), zero at masked tokens."""
    batch, heads, n, d = x.shape
    blocks = triton.cdiv(n, block_n(x))
    _query_kernel[(batch * heads * blocks,)](
        x, *x.stride(), *mask_arguments(mask), moments, moments.stride(1), moments.stride(2), weights, base, out,
        heads, n, span, blocks,
        D=d, F=moments.shape[3], FULL=form == "full", LAST=out.shape[-1] > d, PRECISION=precision(x),
        BLOCK_N=block_n(x), BLOCK_F=FEATURES, BLOCK_D=block_d(d), num_warps=warps(),
    )  # fmt: skip
    return out


def pulled_back(
    x: Tensor, rows: Tensor, moments: Tensor, span: int, form: str, order: int, weights: Tensor | None,
    mask: Tensor | None = None, base: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """base + the gradient of x, if that of φ(x_n) is moments · rows_n.

    The second result is the gradient of the weights, (B, h, programs, 3).
    """
    batch, heads, n, d = x.shape
    blocks, width = triton.cdiv(n, block_n(x)), min(COLUMNS_PER_PROGRAM, block_d(d))
    columns = triton.cdiv(d, width)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grad_w = None
    if weights is not None:
        grad_w = torch.empty(batch, heads, blocks * columns, 3, dtype=torch.float32, device=x.device)
    _pull_kernel[(batch * heads * blocks, columns)](
        x, *x.stride(), rows, *rows.stride(), *mask_arguments(mask), moments, moments.stride(1), moments.stride(2),
        weights, base, out, grad_w, heads, n, span, blocks,
        D=d, ORDER=order, FULL=form == "full", LAST=rows.shape[-1] > d, PRECISION=precision(x),
        BLOCK_N=block_n(x), BLOCK_J=width, BLOCK_D=block_d(d), num_warps=warps(),
    )  # fmt: skip
    return out, grad_w


def _pool(x: Tensor, rows: Tensor, form: str, order: int, weights: Tensor | None, mask: Tensor | None) -> Tensor:
    """Σ_n φ(x_n) ⊗ rows_n, (B, h, F, d + 1), in as many parts as fill a GPU, added in a fixed order."""
    batch, heads, n, d = x.shape
    size = feature_size(d, form, order)
    splits = triton.cdiv(PROGRAMS, max(1, batch * heads * triton.cdiv(size, FEATURES)))
    span = max(128, triton.cdiv(triton.cdiv(n, splits), 64) * 64)
    out = torch.empty(batch, heads, max(1, triton.cdiv(n, span)), size, d + 1, dtype=torch.float32, device=x.device)
    write_moments(out, x, rows, span, form, order, weights, mask)
    return out.sum(2)


def _one_part(moments: Tensor) -> Tensor:
    """Add the axis of parts to moments that hold for all tokens."""
    return moments.contiguous().unsqueeze(2)


def moments(
    k: Tensor, v: Tensor, *, form: str, order: int, scale: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """Σ_n φ(k_n) ⊗ [v_n, 1]: k and v (B, h, N, d), mask (B, N) -> (B, h, F, d + 1) in float32.

    Cost: N F (d + 1) multiply-adds per head.
    """
    return _pool(k, v, form, order, degree_weights(scale, k.shape[-1]), mask)


def query(q: Tensor, moments: Tensor, *, form: str, order: int, scale: Tensor | None = None) -> Tensor:
    """φ(q) · moments: q (B, h, M, d), moments (B, h, F, d + 1) -> (B, h, M, d + 1) in float32.

    Cost: M F (d + 1) multiply-adds per head.
    """
    m, d = q.shape[2:]
    out = torch.empty(*q.shape[:3], d + 1, dtype=torch.float32, device=q.device)
    return write_query(out, q, _one_part(moments), max(m, 1), form, degree_weights(scale, d))


def moments_backward(
    grad: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    form: str,
    order: int,
    scale: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of k, v and `scale` (None in the full form) for grad (B, h, F, d + 1) of `moments`."""
    n, d = k.shape[2:]
    weights, grad = degree_weights(scale, d), _one_part(grad)
    grad_v = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    write_query(grad_v, k, grad, max(n, 1), form, weights, mask)
    grad_k, grad_w = pulled_back(k, v, grad, max(n, 1), form, order, weights, mask)
    return grad_k, grad_v, grad_of_scale(grad_w, d)


def query_backward(
    grad: Tensor, q: Tensor, moments: Tensor, *, form: str, order: int, scale: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of q, of the moments (in float32) and of `scale`, for grad (B, h, M, d + 1) of `query`."""
    m, d = q.shape[2:]
    weights = degree_weights(scale, d)
    grad_q, grad_w = pulled_back(q, grad, _one_part(moments), max(m, 1), form, order, weights)
    return grad_q, _pool(q, grad, form, order, weights, None), grad_of_scale(grad_w, d)
