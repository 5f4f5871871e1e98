"""The pooled products of Poly-SA and Poly-NL in Triton for GPUs, forward and backward.

Pooling, gating and their gradients are all partial derivatives of one form, F = Σ_{b,n,h,d} x ⊙ y ⊙ gate ⊙ w, with x
and y (B, N, h, d), gate (B, h, d) and w (h, N) or none: pooling is ∂F/∂gate, and gating is ∂F/∂y. So a single kernel
reads x and y once and writes the derivatives that are needed. The tokens are divided into splits, so that even a
batch of 1 fills the GPU; the sums of the splits are added in a fixed order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 1024  # the number of programs that a launch aims for: several per multiprocessor of the largest GPUs
TILE = 32  # tokens held in registers at a time


@triton.jit
def _load(x, stride_n, stride_d, token, channel, keep):
    """Load a tile (tokens, channels) as float32; elements that are not kept are zero and never read."""
    return tl.load(x + token[:, None] * stride_n + channel[None, :] * stride_d, mask=keep, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["n", "splits", "span"])
def _form_kernel(
    x, x_b, x_n, x_h, x_d, y, y_b, y_n, y_h, y_d, gate, w, w_h, w_n, mask, mask_b, mask_n,
    grad_x, grad_y, grad_gate, grad_w, batches, n, heads, width, splits, span,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write ∂F/∂x and ∂F/∂y (B, N, h, d), ∂F/∂gate (splits, B, h, d) and ∂F/∂w (blocks, B, h, N), if not None.

    A program processes one split of `span` tokens and one block of the channels of one head.
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
    grad_x: Tensor | None = None, grad_y: Tensor | None = None, pooled: bool = False, weighted: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Fill grad_x and grad_y if given; return ∂F/∂gate (B, h, d) if `pooled` and ∂F/∂w (h, N) if `weighted`."""
    batch, n, heads, width = x.shape
    block = min(64, max(16, triton.next_power_of_2(width)))
    blocks = triton.cdiv(width, block)
    span = TILE * max(1, triton.cdiv(n, TILE * max(1, PROGRAMS // max(1, batch * heads * blocks))))
    splits = max(1, triton.cdiv(n, span))
    sums = torch.empty((splits, batch, heads, width) if pooled else 0, dtype=torch.float32, device=x.device)
    shares = torch.empty((blocks, batch, heads, n) if weighted else 0, dtype=torch.float32, device=x.device)
    _form_kernel[(splits * batch * heads, blocks)](
        x, *x.stride(), y, *((0,) * 4 if y is None else y.stride()), None if gate is None else gate.contiguous(),
        w, *((0,) * 2 if w is None else w.stride()), mask, *((0,) * 2 if mask is None else mask.stride()),
        grad_x, grad_y, sums if pooled else None, shares if weighted else None, batch, n, heads, width, splits, span,
        TILE=TILE, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return sums.sum(0), shares.sum((0, 1)) if weighted else shares


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def product(k: Tensor, v: Tensor | None, p_2: Tensor | None, mask: Tensor | None) -> Tensor:
    """Compute Σ_n p_2[n] k_n ⊙ v_n over the real tokens; the sum is not divided by their number.

    Args:
        k: (B, N, h, d) of any strides.
        v: (B, N, h, d) of any strides; None for ones.
        p_2: (h, N); None for ones.
        mask: (B, N), True for real tokens; None if all are.
    Returns:
        (B, h, d) in float32. Cost: 3 B N h d multiply-adds; k and v are read once.
    """
    return _form(k, v, None, p_2, mask, pooled=True)[0]


def product_backward(
    grad: Tensor, k: Tensor, v: Tensor | None, p_2: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of `product` for grad (B, h, d) in float32.

        dk_n = p_2[n] v_n ⊙ grad,   dv_n = p_2[n] k_n ⊙ grad,   dp_2 = Σ_{b,d} grad ⊙ k ⊙ v (in float32)

    They are zero at masked tokens. Cost: k and v are read once, and their gradients written once.
    """
    grad_k, grad_v = _like(k), None if v is None else _like(v)
    _, grad_p_2 = _form(k, v, grad, p_2, mask, grad_x=grad_k, grad_y=grad_v, weighted=p_2 is not None)
    return grad_k, grad_v, None if p_2 is None else grad_p_2


def gate_tokens(q: Tensor, gate: Tensor, p_1: Tensor | None) -> Tensor:
    """Multiply every token with the gate: q_n ⊙ gate ⊙ p_1[n].

    Args:
        q: (B, N, h, d) of any strides.
        gate: (B, h, d) in float32.
        p_1: (h, N); None for ones.
    Returns:
        (B, N, h, d) in the dtype of q. Cost: 2 B N h d multiplications; q is read once.
    """
    out = _like(q)
    _form(q, None, gate, p_1, None, grad_y=out)
    return out


def gate_tokens_backward(
    grad: Tensor, q: Tensor, gate: Tensor, p_1: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of `gate_tokens` for grad (B, N, h, d) of any strides.

        dq_n = grad_n ⊙ gate ⊙ p_1[n],   dgate = Σ_n grad ⊙ q ⊙ p_1,   dp_1 = Σ_{b,d} grad ⊙ q ⊙ gate

    The last two are float32. Cost: grad and q are read once, and the gradient of q written once.
    """
    grad_q = _like(q)
    grad_gate, grad_p_1 = _form(grad, q, gate, p_1, None, grad_y=grad_q, pooled=True, weighted=p_1 is not None)
    return grad_q, grad_gate, None if p_1 is None else grad_p_1
