"""The pooling of Poly-SA and Poly-NL, and the last map of Poly-NL, in C for the CPU, forward and backward.

x is (B, N, D) in float32 or bfloat16. All arithmetic is float32: results per token are rounded once to the dtype of
x; sums and gradients of weights stay float32. Where `arrays.in_pairs` says so, the processor multiplies bfloat16
and sums in float32: products of tokens lose nothing, what other products read is rounded to bfloat16.
Memory besides the results: the packed weights, a few blocks of 128 tokens per thread and, in the backward, copies
of the weights' gradients: one per thread as long as they fit in 32 MiB, then fewer, which threads share
(native/gradients.h). A weight that needs no gradient costs nothing in the backward. Cost: the forward takes the
maps once, the backward three times.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polymix.ops.native.arrays import (
    Needs,
    as_read,
    dense,
    full,
    hidden,
    in_pairs,
    room_like,
    rooms_like,
    sizes_of,
)
from polymix.ops.native.library import call
from polymix.ops.shared.blocks import output
from polymix.ops.shared.tensors import count_real


def pairs(x: Tensor, weight: Tensor, bias: Tensor | None, p: Tensor | None, mask: Tensor | None) -> Tensor:
    """Σ_n p_n ⊙ (x_n W_1ᵀ + b_1) ⊙ (x_n W_2ᵀ + b_2), (B, E)."""
    pairs = in_pairs(x, weight)
    sums = x.new_empty(x.shape[0], weight.shape[0] // 2, dtype=torch.float32)
    sizes = sizes_of(x, sums.shape[1], p, pairs=pairs)
    call("linear_pairs", dense(x), as_read((weight, bias), pairs), full(p), hidden(mask), sums, sizes)
    return sums


def pairs_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, p: Tensor | None, mask: Tensor | None, needs: Needs
) -> tuple[Tensor | None, ...]:
    """The gradients of `pairs`: with u and v the maps' outputs and g = grad,

    du = g ⊙ p ⊙ v,  dv = g ⊙ p ⊙ u,  dp = Σ g ⊙ u ⊙ v over each head and the batch.
    """
    pairs = in_pairs(x, weight)
    grad, x, p, mask = full(grad), dense(x), full(p), hidden(mask)
    grad_x, grad_w, grad_b = rooms_like((x, weight, bias), needs[:3])
    grad_p = None
    if p is not None and needs[3]:
        grad_p = p.new_zeros(x.shape[0], *p.shape)  # is added to; stays zero at padding
    call("linear_pairs_backward", grad, x, as_read((weight, bias), pairs), p, mask,
         grad_x, grad_w, grad_b, grad_p, sizes_of(x, grad.shape[1], p, pairs=pairs))  # fmt: skip
    return grad_x, grad_w, grad_b, None if grad_p is None else grad_p.sum(0)


def moments(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The mean μ (B, D) and Σ (x_n - μ)(x_n - μ)ᵀ (B, D, D). Cost: slightly over N D² / 2 multiply-adds."""
    x, mask = dense(x), hidden(mask)
    count, batch, dim = _count(x, mask), x.shape[0], x.shape[2]
    centre = x.new_empty(batch, dim, dtype=torch.float32)
    moment = x.new_empty(batch, dim, dim, dtype=torch.float32)
    call("moments", x, mask, count, centre, moment, sizes_of(x, 0))
    return centre, moment


def moments_backward(
    grad_centre: Tensor, grad_moment: Tensor, x: Tensor, mask: Tensor | None, needs: Needs
) -> tuple[Tensor]:
    """The gradient of `moments`: dx_n = g_μ / count + (x_n - μ)(G + Gᵀ) at real tokens. Cost: N D² multiply-adds.

    μ is taken as two floats, because tokens far from zero are not much larger than its rounding error.
    """
    x, mask, sizes = dense(x), hidden(mask), sizes_of(x, 0)
    count, batch, dim = _count(x, mask), x.shape[0], x.shape[2]
    centre, rest = x.new_empty(2, batch, dim, dtype=torch.float32)
    call("centres", x, mask, count, centre, rest, sizes)
    both = (grad_moment.float() + grad_moment.mT).contiguous()
    last = (grad_centre / count[:, None] - (rest.unsqueeze(1) @ both).squeeze(1)).contiguous()
    grad_x = room_like(x)
    call("moments_backward", x, mask, centre, both, last, grad_x, sizes)
    return (grad_x,)


def scaled(x: Tensor, scale: Tensor, weight: Tensor, bias: Tensor | None, rest: Tensor | None) -> Tensor:
    """(x ⊙ scale) Wᵀ + b + rest x, (B, N, D')."""
    pairs = in_pairs(x, weight)
    sizes, y = sizes_of(x, 0, out=weight.shape[0], pairs=pairs), output(x, weight.shape[0])
    call("linear_scaled", dense(x), full(scale), as_read((weight, bias), pairs), full(rest), y, sizes)
    return y


def scaled_backward(
    grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor, bias: Tensor | None, rest: Tensor | None, needs: Needs
) -> tuple[Tensor | None, ...]:
    """The gradients of `scaled`: with dz = grad W,

    dx = dz ⊙ scale + rest grad,  dscale = Σ_n dz ⊙ x,  dW = Σ gradᵀ (x ⊙ scale),  drest = Σ grad ⊙ x.
    """
    pairs = in_pairs(x, weight)
    grad, x, scale, rest = dense(grad), dense(x), full(scale), full(rest)
    grad_x, grad_scale, grad_w, grad_b = rooms_like((x, scale, weight, bias), needs[:4])
    grad_rest = None if rest is None or not needs[4] else scale.new_zeros(torch.get_num_threads())
    call("linear_scaled_backward", grad, x, scale, as_read((weight, bias), pairs), rest,
         grad_x, grad_scale, grad_w, grad_b, grad_rest,
         sizes_of(x, 0, out=weight.shape[0], pairs=pairs))  # fmt: skip
    total_rest = None if rest is None or grad_rest is None else grad_rest.sum().view(rest.shape)
    return grad_x, grad_scale, grad_w, grad_b, total_rest


def _count(x: Tensor, mask: Tensor | None) -> Tensor:
    """The number of real tokens of each sample, at least 1, as floats (B,)."""
    count = count_real(x, mask, ndim=1)
    return count.float() if isinstance(count, Tensor) else x.new_full(x.shape[:1], count, dtype=torch.float32)
