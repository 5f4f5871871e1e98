"""The pooled products of Poly-SA and Poly-NL on a GPU, forward and backward.

All four are partial derivatives of one form, F = Σ_{b,n,h,d} x ⊙ y ⊙ gate ⊙ w with x, y (B, N, h, d), gate (B, h, d)
and w (h, N) or none: pooling is ∂F/∂gate, spreading ∂F/∂y, and so are their gradients. One kernel therefore reads x
and y once and writes those derivatives that are asked for. The tokens are cut into splits, so that batch 1 fills the
card; what is summed is written split by split and added in a fixed order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 1024  # what a launch aims for: several for each multiprocessor of the largest cards
TILE = 32  # tokens in registers at a time


@triton.jit
def _load(x, stride_n, stride_d, token, channel, keep):
    """A tile (tokens, channels) in float32, zero where it is not kept: what is hidden is never read."""
    return tl.load(x + token[:, None] * stride_n + channel[None, :] * stride_d, mask=keep, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["n", "splits", "span"])
def _form_kernel(
    x, x_b, x_n, x_h, x_d, y, y_b, y_n, y_h, y_d, gate, w, w_h, w_n, mask, mask_b, mask_n,
    grad_x, grad_y, grad_gate, grad_w, batches, n, heads, width, splits, span,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """∂F/∂x and ∂F/∂y (B, N, h, d), ∂F/∂gate (splits, B, h, d), ∂F/∂w (blocks, B, h, N): those that are not None.

    A program owns one split of the tokens and one block of the channels of one head; a split is `span` tokens.
    """
    split, row = tl.program_id(0) % splits, (tl.program_id(0) // splits).to(tl.int64)  # row: of batch × heads
    batch, head = row // heads, row % heads
    channel = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < width
    x += batch * x_b + head * x_h
    if y is not None:
        y += batch * y_b + head * y_h
    if gate is not None:
        g = tl.load(gate + row * width + channel, mask=inside, other=0.0)[None, :]
    pooled = tl.zeros((TILE, BLOCK), tl.float32)
    for tile in range(split * span, tl.minimum((split + 1) * span, n), TILE):
        token = (tile + tl.arange(0, TILE)).to(tl.int64)
        here = token < n
        real = here
        if mask is not None:
            real = tl.load(mask + batch * mask_b + token * mask_n, mask=here, other=0) != 0
        keep = real[:, None] & inside[None, :]
        out = ((batch * n + token) * heads + head)[:, None] * width + channel[None, :]
        written = here[:, None] & inside[None, :]
        product = _load(x, x_n, x_d, token, channel, keep)
        scale = tl.where(keep, 1.0, 0.0)
        if w is not None:
            scale *= tl.load(w + head * w_h + token * w_n, mask=real, other=0.0).to(tl.float32)[:, None]
        if grad_y is not None:
            tl.store(grad_y + out, tl.where(keep, product * g * scale, 0.0), mask=written)
        other = scale
        if y is not None:
            other = _load(y, y_n, y_d, token, channel, keep)
            product *= other
            other *= scale
        if grad_x is not None:
            tl.store(grad_x + out, tl.where(keep, other * g, 0.0), mask=written)
        if grad_gate is not None:
            pooled += product * scale
        if grad_w is not None:
            at = (tl.program_id(1) * batches + batch) * heads + head
            share = tl.sum(tl.where(keep, product * g, 0.0), 1)
            tl.store(grad_w + at * n + token, share, mask=here)
    if grad_gate is not None:
        at = (split * batches + batch) * heads + head
        tl.store(grad_gate + at * width + channel, tl.sum(pooled, 0), mask=inside)


def _form(
    x: Tensor, y: Tensor | None, gate: Tensor | None, w: Tensor | None, mask: Tensor | None,
    grad_x: Tensor | None = None, grad_y: Tensor | None = None, pooled: bool = False, weighed: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Fill grad_x and grad_y where given; ∂F/∂gate (B, h, d) if `pooled` and ∂F/∂w (h, N) if `weighed`, else empty."""
    batch, n, heads, width = x.shape
    block = min(64, max(16, triton.next_power_of_2(width)))
    blocks = triton.cdiv(width, block)
    span = TILE * max(1, triton.cdiv(n, TILE * max(1, PROGRAMS // max(1, batch * heads * blocks))))
    splits = max(1, triton.cdiv(n, span))
    sums = torch.empty((splits, batch, heads, width) if pooled else 0, dtype=torch.float32, device=x.device)
    shares = torch.empty((blocks, batch, heads, n) if weighed else 0, dtype=torch.float32, device=x.device)
    _form_kernel[(splits * batch * heads, blocks)](
        x, *x.stride(), y, *((0,) * 4 if y is None else y.stride()), None if gate is None else gate.contiguous(),
        w, *((0,) * 2 if w is None else w.stride()), mask, *((0,) * 2 if mask is None else mask.stride()),
        grad_x, grad_y, sums if pooled else None, shares if weighed else None, batch, n, heads, width, splits, span,
        TILE=TILE, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return sums.sum(0), shares.sum((0, 1)) if weighed else shares


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def product(k: Tensor, v: Tensor | None, p_2: Tensor | None, mask: Tensor | None) -> Tensor:
    """Σ_n w_n k_n ⊙ v_n over the real tokens, with w = p_2 or one: not yet divided by their number.

    k and v (B, N, h, d) of any strides, v None for ones; p_2 (h, N) or None; mask (B, N), True takes part, or None.
    Returns (B, h, d) in float32. Cost: 3 B N h d multiply-adds, k and v read once.
    """
    return _form(k, v, None, p_2, mask, pooled=True)[0]


def product_backward(
    grad: Tensor, k: Tensor, v: Tensor | None, p_2: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of `product`: w_n v_n ⊙ grad, w_n k_n ⊙ grad and, in float32, Σ_{b,d} grad ⊙ k ⊙ v.

    grad (B, h, d) in float32. Nothing reaches or leaves a token that the mask hides. Cost: k and v read and their
    gradients written once.
    """
    grad_k, grad_v = _like(k), None if v is None else _like(v)
    _, grad_p_2 = _form(k, v, grad, p_2, mask, grad_x=grad_k, grad_y=grad_v, weighed=p_2 is not None)
    return grad_k, grad_v, None if p_2 is None else grad_p_2


def gate_tokens(q: Tensor, gate: Tensor, p_1: Tensor | None) -> Tensor:
    """q ⊙ gate ⊙ p_1, the gate given to every token.

    q (B, N, h, d) of any strides; gate (B, h, d) in float32; p_1 (h, N) or None. Returns (B, N, h, d) in q's type.
    Cost: 2 B N h d multiplications, q read once.
    """
    out = _like(q)
    _form(q, None, gate, p_1, None, grad_y=out)
    return out


def gate_tokens_backward(
    grad: Tensor, q: Tensor, gate: Tensor, p_1: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients: grad ⊙ gate ⊙ p_1 and, in float32, Σ_n grad ⊙ q ⊙ p_1 and Σ_{b,d} grad ⊙ q ⊙ gate.

    grad (B, N, h, d) of any strides. Cost: grad and q read and q's gradient written once.
    """
    grad_q = _like(q)
    grad_gate, grad_p_1 = _form(grad, q, gate, p_1, None, grad_y=grad_q, pooled=True, weighed=p_1 is not None)
    return grad_q, grad_gate, None if p_1 is None else grad_p_1
