"""PoM's sums in Triton for GPUs: the pooled polynomial terms, their running sum, and the gradients of both.

The tokens are divided into splits, so that even a batch of 1 fills the GPU. A running sum takes two passes: first the
sum of each split, then the running sums within each split on top of the sums of the splits before it. There are no
atomic additions, so results are reproducible to the bit.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from polymix.ops.shared.triton_functions import activation as activate
from polymix.ops.shared.triton_functions import polynomial

PROGRAMS = 1024  # the number of programs that a launch aims for: several per multiprocessor of the largest GPUs
TILE = 32  # tokens held in registers at a time


@triton.jit
def _channels(width, AXES: tl.constexpr, BLOCK: tl.constexpr):
    """The channels of this program's columns. With rotary, column i is paired with column i + BLOCK / 2."""
    block, column = tl.program_id(1), tl.arange(0, BLOCK)
    if AXES == 0:
        channel = block * BLOCK + column
        inside = channel < width
    else:
        pairs = width // (2 * AXES)
        blocks = tl.cdiv(pairs, BLOCK // 2)
        pair = block % blocks * (BLOCK // 2) + column % (BLOCK // 2)
        channel = block // blocks * 2 * pairs + column // (BLOCK // 2) * pairs + pair
        inside = pair < pairs
    return channel, inside


@triton.jit
def _split(n, splits, span):
    """The program's batch row (int64), its split, and the split's range begin … end - 1 of places."""
    split = tl.program_id(0) % splits
    begin = split * span
    return (tl.program_id(0) // splits).to(tl.int64), split, begin, tl.minimum(begin + span, n)


@triton.jit
def _tokens(place, here, batch, n, mask, order):
    """The token at each place, and whether it is real."""
    token = place.to(tl.int64)
    if order is not None:
        token = tl.load(order + batch * n + place, mask=here, other=0)
    take = here
    if mask is not None:
        take = tl.load(mask + batch * n + token, mask=here, other=0) != 0
    return token, take


@triton.jit
def _load(x, batch, row, channel, stride_b, stride_n, stride_e, keep):
    """Load a (rows, columns) tile of x (B, N, E) as float32; elements that are not kept are zero and never read."""
    at = batch * stride_b + row.to(tl.int64)[:, None] * stride_n + channel.to(tl.int64)[None, :] * stride_e
    return tl.load(x + at, mask=keep, other=0.0).to(tl.float32)


@triton.jit
def _turned(
    x, batch, token, take, cos, sin, turn_b, width,
    BACK: tl.constexpr, AXES: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate the tile's pairs by their token's angles, or back with BACK; without rotary, return x."""
    if AXES > 0:
        pairs = width // (2 * AXES)
        blocks = tl.cdiv(pairs, BLOCK // 2)
        pair = tl.program_id(1) % blocks * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
        keep = take[:, None] & (pair < pairs)[None, :]
        pair += tl.program_id(1) // blocks * pairs
        c = _load(cos, batch, token, pair, turn_b, width // 2, 1, keep)
        s = _load(sin, batch, token, pair, turn_b, width // 2, 1, keep)
        if BACK:
            s = -s
        first, second = tl.split(tl.permute(tl.reshape(x, (TILE, 2, BLOCK // 2)), (0, 2, 1)))
        x = tl.join(first * c - second * s, second * c + first * s)
        x = tl.reshape(tl.permute(x, (0, 2, 1)), (TILE, BLOCK))
    return x


@triton.jit
def _terms(
    place, here, batch, channel, inside, h, stride_b, stride_n, stride_e, alpha, mask, cos, sin, turn_b,
    order, n, width,
    ACTIVATION: tl.constexpr, DEGREE: tl.constexpr, AXES: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The terms t (TILE, BLOCK) of the tokens at these places; masked tokens give zero, because t(0) = 0."""
    token, take = _tokens(place, here, batch, n, mask, order)
    x = _load(h, batch, token, channel, stride_b, stride_n, stride_e, take[:, None] & inside[None, :])
    x, _ = activate(x, ACTIVATION)
    x, _ = polynomial(x, alpha + channel[None, :] * DEGREE, 1, inside[None, :], DEGREE)
    return _turned(x, batch, token, take, cos, sin, turn_b, width, False, AXES, TILE, BLOCK)


@triton.jit
def _add_within(x, cut_x, y, cut_y):
    return tl.where(cut_y != 0, y, x + y), cut_x | cut_y


@triton.jit
def _running(x, carry, cut, TILE: tl.constexpr):
    """The running sum down the rows of x on top of `carry`, restarting at every `cut`, and the new carry."""
    if cut is None:
        total = tl.cumsum(x, 0) + carry[None, :]
    else:
        cuts = tl.broadcast_to(cut.to(tl.int32)[:, None], x.shape)
        total, cuts = tl.associative_scan((x, cuts), 0, _add_within)
        total = tl.where(cuts != 0, total, total + carry[None, :])
    last = (tl.arange(0, TILE) == TILE - 1)[:, None]
    return total, tl.sum(tl.where(last, total, 0.0), 0)


@triton.jit(do_not_specialize=["n", "splits", "span"])
def _sum_kernel(
    sums, h, stride_b, stride_n, stride_e, alpha, mask, cos, sin, turn_b, order, first,
    n, width, splits, span,
    ACTIVATION: tl.constexpr, DEGREE: tl.constexpr, AXES: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """sums (B, splits, E): the sum of the terms of each split; with segments, only those of its last segment."""
    batch, split, begin, end = _split(n, splits, span)
    channel, inside = _channels(width, AXES, BLOCK)
    if first is not None:
        begin = tl.maximum(begin, tl.load(first + batch * n + end - 1).to(tl.int32))
    total = tl.zeros((TILE, BLOCK), tl.float32)
    for tile in range(begin, end, TILE):
        place = tile + tl.arange(0, TILE)
        total += _terms(
            place, place < end, batch, channel, inside, h, stride_b, stride_n, stride_e, alpha, mask, cos, sin,
            turn_b, order, n, width, ACTIVATION, DEGREE, AXES, TILE, BLOCK,
        )  # fmt: skip
    tl.store(sums + (batch * splits + split) * width + channel, tl.sum(total, 0), mask=inside)


@triton.jit(do_not_specialize=["n", "splits", "span"])
def _scan_kernel(
    running, sums, start, h, stride_b, stride_n, stride_e, alpha, mask, cos, sin, turn_b, order, first,
    n, width, splits, span,
    ACTIVATION: tl.constexpr, DEGREE: tl.constexpr, AXES: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """running (B, N, E): the running sum in a split, on top of the earlier splits that its first segment spans."""
    batch, split, begin, end = _split(n, splits, span)
    channel, inside = _channels(width, AXES, BLOCK)
    row = tl.arange(0, TILE)
    carry = tl.zeros((BLOCK,), tl.float32)
    if start is not None:
        carry += tl.load(start + batch * width + channel, mask=inside, other=0.0)
    earliest = 0
    if first is not None:
        earliest = tl.load(first + batch * n + begin).to(tl.int32) // span
    for earlier in range(earliest, split, TILE):
        keep = (earlier + row < split)[:, None] & inside[None, :]
        carry += tl.sum(_load(sums, batch, earlier + row, channel, splits * width, width, 1, keep), 0)
    for tile in range(begin, end, TILE):
        place = tile + row
        here = place < end
        x = _terms(
            place, here, batch, channel, inside, h, stride_b, stride_n, stride_e, alpha, mask, cos, sin,
            turn_b, order, n, width, ACTIVATION, DEGREE, AXES, TILE, BLOCK,
        )  # fmt: skip
        cut = None
        if first is not None:
            cut = tl.load(first + batch * n + place, mask=here, other=0) == place
        x, carry = _running(x, carry, cut, TILE)
        at = (batch * n + place)[:, None] * width + channel[None, :]
        tl.store(running + at, x, mask=here[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["n", "splits", "span"])
def _sum_grad_kernel(
    sums, grad, grad_b, grad_n, grad_e, first, n, width, splits, span,
    AXES: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """sums (B, splits, E): the sum of the gradients of each split; with segments, only those of its first segment."""
    batch, split, begin, end = _split(n, splits, span)
    channel, inside = _channels(width, AXES, BLOCK)
    total = tl.zeros((TILE, BLOCK), tl.float32)
    for tile in range(begin, end, TILE):
        place = tile + tl.arange(0, TILE)
        keep = place < end
        if first is not None:
            keep &= tl.load(first + batch * n + place, mask=keep, other=n) <= begin
        total += _load(grad, batch, place, channel, grad_b, grad_n, grad_e, keep[:, None] & inside[None, :])
    tl.store(sums + (batch * splits + split) * width + channel, tl.sum(total, 0), mask=inside)


@triton.jit(do_not_specialize=["n", "splits", "span"])
def _backward_kernel(
    grad_h, grad_alpha, sums, grad, grad_b, grad_n, grad_e,
    h, stride_b, stride_n, stride_e, alpha, mask, cos, sin, turn_b, order, first,
    n, width, splits, span,
    ACTIVATION: tl.constexpr, DEGREE: tl.constexpr, AXES: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    POWERS: tl.constexpr,
):  # fmt: skip
    """grad_h (B, N, E) and each split's contribution to grad_alpha (B, splits, k, E).

    For `pool`, the gradient of a term is `grad` at its place. For `scan` (`sums` is given), it is the sum of grad
    from its place to the end of its segment; so the split is processed backwards, on top of the later splits.
    """
    batch, split, begin, end = _split(n, splits, span)
    channel, inside = _channels(width, AXES, BLOCK)
    row, power = tl.arange(0, TILE), tl.arange(0, POWERS)
    carry = tl.zeros((BLOCK,), tl.float32)
    if sums is not None:
        for later in range(split + 1, splits, TILE):
            keep = later + row < splits
            if first is not None:
                keep &= tl.load(first + batch * n + (later + row) * span, mask=keep, other=n) < end
            keep = keep[:, None] & inside[None, :]
            carry += tl.sum(_load(sums, batch, later + row, channel, splits * width, width, 1, keep), 0)
    shares = tl.zeros((POWERS, BLOCK), tl.float32)
    for tile in range(0, end - begin, TILE):
        place = end - 1 - tile - row
        here = place >= begin
        keep = here[:, None] & inside[None, :]
        g = _load(grad, batch, place, channel, grad_b, grad_n, grad_e, keep)
        if sums is not None:
            cut = None
            if first is not None:
                follows = here & (place + 1 < n)
                cut = tl.load(first + batch * n + place + 1, mask=follows, other=n) > place
            g, carry = _running(g, carry, cut, TILE)
        token, take = _tokens(place, here, batch, n, mask, order)
        g = tl.where(take[:, None], g, 0.0)
        g = _turned(g, batch, token, take, cos, sin, turn_b, width, True, AXES, TILE, BLOCK)
        x = _load(h, batch, token, channel, stride_b, stride_n, stride_e, take[:, None] & inside[None, :])
        a, slope = activate(x, ACTIVATION)
        _, steep = polynomial(a, alpha + channel[None, :] * DEGREE, 1, inside[None, :], DEGREE)
        at = (batch * n + token)[:, None] * width + channel[None, :]
        tl.store(grad_h + at, g * steep * slope, mask=keep)
        for p in tl.static_range(DEGREE):
            g *= a
            shares += tl.where((power == p)[:, None], tl.sum(g, 0)[None, :], 0.0)
    at = ((batch * splits + split) * DEGREE + power)[:, None] * width + channel[None, :]
    tl.store(grad_alpha + at, shares, mask=(power < DEGREE)[:, None] & inside[None, :])


def _launch(
    h: Tensor, alpha: Tensor, activation: str, mask: Tensor | None, cos: Tensor | None,
    sin: Tensor | None, axes: int, order: Tensor | None = None, first: Tensor | None = None,
) -> tuple[tuple[int, int], dict[str, Any]]:  # fmt: skip
    """The launch grid and the arguments that all kernels share. Tensors that are small compared with h are copied."""
    batch, n, width = h.shape
    axes = 0 if cos is None else axes
    block = min(64, max(16, triton.next_power_of_2(width // max(axes, 1))))
    blocks = axes * triton.cdiv(width // (2 * axes), block // 2) if axes else triton.cdiv(width, block)
    span = TILE * max(1, triton.cdiv(n, TILE * max(1, PROGRAMS // max(1, batch * blocks))))
    splits = triton.cdiv(n, span)
    small = (mask, order, first, *(None if x is None else x.float() for x in (cos, sin)))
    mask, order, first, cos, sin = (None if x is None else x.contiguous() for x in small)
    return (batch * splits, blocks), {
        "h": h, "stride_b": h.stride(0), "stride_n": h.stride(1), "stride_e": h.stride(2), "alpha": alpha.contiguous(),
        "mask": mask, "cos": cos, "sin": sin, "turn_b": 0 if cos is None or len(cos) == 1 else cos.stride(0),
        "order": order, "first": first,
        "n": n, "width": width, "splits": splits, "span": span,
        "ACTIVATION": activation, "DEGREE": alpha.shape[1], "AXES": axes, "TILE": TILE, "BLOCK": block,
    }  # fmt: skip


def _sums(grid: tuple[int, int], shared: dict[str, Any]) -> Tensor:
    h = shared["h"]
    sums = torch.empty((h.shape[0], shared["splits"], h.shape[2]), dtype=torch.float32, device=h.device)
    _sum_kernel[grid](sums=sums, **shared)
    return sums


def _grad_strides(grad: Tensor) -> dict[str, int]:
    return {"grad_b": grad.stride(0), "grad_n": grad.stride(1), "grad_e": grad.stride(2)}


def _backward(
    grad: Tensor, sums: Tensor | None, grid: tuple[int, int], shared: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    h, degree, splits = shared["h"], shared["DEGREE"], shared["splits"]
    grad_h = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    shares = torch.empty((h.shape[0], splits, degree, h.shape[2]), dtype=torch.float32, device=h.device)
    powers = triton.next_power_of_2(degree)
    _backward_kernel[grid](
        grad_h=grad_h, grad_alpha=shares, sums=sums, grad=grad, **_grad_strides(grad), **shared, POWERS=powers
    )
    return grad_h, shares.sum((0, 1)).mT.contiguous()


def pool(
    h: Tensor,
    alpha: Tensor,
    *,
    activation: str,
    mask: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    axes: int = 1,
) -> Tensor:
    """Compute Σ_n R_n Σ_{p=1..k} α_p ⊙ act(h_n)^p over the real tokens.

    Args:
        h: (B, N, E) before the activation, any strides.
        alpha: (E, k).
        activation: a name in `polymix.ops.shared.activations.ACTIVATIONS`.
        mask: (B, N), True for real tokens.
        cos: (B or 1, N, E / 2), the cosines of the rotation R_n (see `polymix.ops.shared.rotary.rotate`).
        sin: its sines.
        axes: of the rotary positions, 1 or 2.
    Returns:
        (B, E) in float32. Cost: O(B N E k); h is read once.
    """
    grid, shared = _launch(h, alpha, activation, mask, cos, sin, axes)
    with torch.cuda.device_of(h):
        return _sums(grid, shared).sum(1)


def pool_backward(
    grad: Tensor, h: Tensor, alpha: Tensor, *, activation: str, mask: Tensor | None = None, cos: Tensor | None = None,
    sin: Tensor | None = None, axes: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of `pool` for grad (B, E). With a = act(h):

        grad_h_n = (R_nᵀ grad) ⊙ Σ_p p α_p a_n^(p-1) ⊙ act'(h_n),   grad_alpha_p = Σ_n (R_nᵀ grad) ⊙ a_n^p

    Returns:
        grad_h like h, zero at masked tokens, and grad_alpha (E, k) in float32. h is read once, grad_h written once.
    """
    grid, shared = _launch(h, alpha, activation, mask, cos, sin, axes)
    with torch.cuda.device_of(h):
        return _backward(grad.unsqueeze(1).expand(h.shape), None, grid, shared)


def scan(
    h: Tensor, alpha: Tensor, *, activation: str, mask: Tensor | None = None, cos: Tensor | None = None,
    sin: Tensor | None = None, axes: int = 1, order: Tensor | None = None, first: Tensor | None = None,
    start: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The inclusive running sum of the terms of `pool`: output i sums the places first[i] … i.

    Args:
        order: (B, N) int64, the token at each place, a permutation of each row. None: token i is at place i.
        first: (B, N) int64, the place at which the segment of each place begins; the sum restarts there.
        start: (B, E), added to every output; not together with `first`.
    The other arguments are those of `pool`.

    Returns:
        (B, N, E) in float32, by place. Cost: O(B N E k); h is read twice and the result written once.
    """
    grid, shared = _launch(h, alpha, activation, mask, cos, sin, axes, order, first)
    running = torch.empty(h.shape, dtype=torch.float32, device=h.device)
    with torch.cuda.device_of(h):
        start = None if start is None else start.contiguous()
        _scan_kernel[grid](running=running, sums=_sums(grid, shared), start=start, **shared)
    return running


def scan_backward(
    grad: Tensor, h: Tensor, alpha: Tensor, *, activation: str, mask: Tensor | None = None, cos: Tensor | None = None,
    sin: Tensor | None = None, axes: int = 1, order: Tensor | None = None, first: Tensor | None = None,
    start: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The gradients of `scan` for grad (B, N, E), by place.

    They are those of `pool_backward`, where the gradient of a term is the sum of grad from its place to the end of
    its segment.

    Returns:
        grad_h like h, by token; grad_alpha (E, k) in float32; grad_start (B, E), or None without a start. grad is
        read twice, h once, and grad_h is written once.
    """
    grid, shared = _launch(h, alpha, activation, mask, cos, sin, axes, order, first)
    with torch.cuda.device_of(h):
        sums = torch.empty((h.shape[0], shared["splits"], h.shape[2]), dtype=torch.float32, device=h.device)
        names = ("first", "n", "width", "splits", "span", "AXES", "TILE", "BLOCK")
        _sum_grad_kernel[grid](sums=sums, grad=grad, **_grad_strides(grad), **{name: shared[name] for name in names})
        return *_backward(grad, sums, grid, shared), None if start is None else grad.sum(1)
