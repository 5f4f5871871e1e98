"""PoM's pooled powers in Triton for GPUs: the product, the activation and the sums in one pass, which reads the tokens.

In two passes, the product writes its outputs and `polymix.ops.pom.triton` reads them again.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from polymix.ops.pom.triton import PROGRAMS, pool_backward
from polymix.ops.pom.triton import _split as own_split
from polymix.ops.pom.triton import _tokens as tokens_at
from polymix.ops.shared.triton_functions import activation as activate
from polymix.ops.shared.triton_functions import precision


@triton.jit(do_not_specialize=["n", "splits", "span"])
def _powers_kernel(
    sums, x, x_b, x_n, x_d, weight, w_e, w_d, bias, mask, n, dim, width, splits, span,
    ACTIVATION: tl.constexpr, DEGREE: tl.constexpr, POWERS: tl.constexpr, PRECISION: tl.constexpr, TILE: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """sums (B, splits, k, E) = Σ act(x W + b)^p over the tokens of a split, TILE columns per program.

    Products of 16 bits are exact in float32, so WIDEN changes no result; Triton's interpreter multiplies no bfloat16.
    """
    batch, split, begin, end = own_split(n, splits, span)
    channel, power = tl.program_id(1) * TILE + tl.arange(0, TILE), tl.arange(0, POWERS)
    inside = channel < width
    x += batch * x_b
    weight += channel.to(tl.int64)[None, :] * w_e
    offset = tl.zeros((TILE,), tl.float32)
    if bias is not None:
        offset += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((POWERS, TILE), tl.float32)
    for tile in range(begin, end, TILE):
        place = tile + tl.arange(0, TILE)
        token, real = tokens_at(place, place < end, batch, n, mask, None)
        u = tl.zeros((TILE, TILE), tl.float32)
        for first in range(0, dim, TILE):
            inner = (first + tl.arange(0, TILE)).to(tl.int64)
            keep = inner < dim
            rows = tl.load(
                x + token[:, None] * x_n + inner[None, :] * x_d, mask=real[:, None] & keep[None, :], other=0.0
            )
            columns = tl.load(weight + inner[:, None] * w_d, mask=keep[:, None] & inside[None, :], other=0.0)
            if WIDEN:
                rows, columns = rows.to(tl.float32), columns.to(tl.float32)
            u = tl.dot(rows, columns, u, input_precision=PRECISION)
        a, _ = activate(u + offset[None, :], ACTIVATION)
        a = tl.where(real[:, None], a, 0.0)
        term = a
        for p in tl.static_range(DEGREE):
            total += tl.where((power == p)[:, None], tl.sum(term, 0)[None, :], 0.0)
            term *= a
    at = ((batch * splits + split) * DEGREE + power)[:, None] * width + channel[None, :]
    tl.store(sums + at, total, mask=(power < DEGREE)[:, None] & inside[None, :])


def powers(x: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor | None, activation: str, degree: int) -> Tensor:
    """Σ_n h_n^p for p = 1 … degree over the real tokens, with h = act(x Wᵀ + b).

    Args:
        x: (B, N, D), any strides.
        weight: (E, D), any strides.
        bias: (E) or None.
        mask: (B, N), True for real tokens.
        activation: a name in `polymix.ops.shared.activations.ACTIVATIONS`.
        degree: at least 1.
    Returns:
        (B, degree, E) in float32. Cost: N D E multiply-adds; x is read E / 64 times, in float32 E / 32 times, and from
        memory once.
    """
    (batch, n, dim), width = x.shape, weight.shape[0]
    tile = 64 if x.element_size() == 2 else 32  # wide tiles of float32 do not fit in a thread's registers
    blocks = triton.cdiv(width, tile)
    span = tile * max(1, triton.cdiv(n, tile * max(1, PROGRAMS // max(1, batch * blocks))))
    splits = triton.cdiv(n, span)
    sums = torch.empty((batch, splits, degree, width), dtype=torch.float32, device=x.device)
    weight = weight.to(x.dtype)
    _powers_kernel[(batch * splits, blocks)](
        sums, x, *x.stride(), weight, *weight.stride(), None if bias is None else bias.contiguous(),
        None if mask is None else mask.contiguous(), n, dim, width, splits, span,
        ACTIVATION=activation, DEGREE=degree, POWERS=triton.next_power_of_2(degree), PRECISION=precision(x), TILE=tile,
        WIDEN=not isinstance(_powers_kernel, triton.JITFunction),
        num_warps=8 if torch.version.hip is None and tile == 64 else 4,
        num_stages=2,  # with three tiles under way, float32 does not fit in a B200's registers
    )  # fmt: skip
    return sums.sum(1)


def powers_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor | None, activation: str, degree: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of `powers` for grad (B, degree, E); the product's outputs are computed again, and written."""
    tokens, (batch, n, _) = x.transpose(0, 1), x.shape
    # The coefficients of the sums differ from sequence to sequence, as they do from channel to channel.
    u = F.linear(tokens, weight, bias).reshape(1, n, batch * len(weight))
    one = torch.ones((1, u.shape[2]), device=x.device)
    grad_u = pool_backward(one, u, grad.mT.flatten(0, 1), activation=activation)[0].view(n, batch, len(weight))
    if mask is not None:
        grad_u = grad_u.masked_fill(~mask.t()[..., None], 0)
    rows = grad_u.flatten(0, 1)
    grad_weight = rows.t() @ tokens.flatten(0, 1).nan_to_num()
    return (grad_u @ weight).transpose(0, 1).contiguous(), grad_weight, None if bias is None else rows.sum(0)
