"""`polymix.ops.pooled.moments` and `polymix.ops.pooled_linear.linear_scaled` on a CPU, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from polymix.ops.blocked.common import output
from polymix.ops.common import count_real
from polymix.ops.native.build import call, dense, tokens
from polymix.ops.native.pooled_linear import full, hidden, linear_of, sizes_of


def moments(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The mean μ (B, D) and Σ (x_n - μ)(x_n - μ)ᵀ (B, D, D). Cost: N D² / 2 multiply-adds and a little more."""
    x, mask = dense(x), hidden(mask)
    count, centre = _count(x, mask), torch.empty(x.shape[0], x.shape[2])
    moment = torch.empty(x.shape[0], x.shape[2], x.shape[2])
    call("moments", tokens(x), mask, count, centre, moment, sizes_of(x, 0))
    return centre, moment


def moments_backward(grad_centre: Tensor, grad_moment: Tensor, x: Tensor, mask: Tensor | None) -> tuple[Tensor]:
    """g_μ / count + (x_n - μ)(G + Gᵀ) for the real tokens: N D² multiply-adds."""
    x, mask = dense(x), hidden(mask)
    count = _count(x, mask)[:, None]
    centre = (x if mask is None else x.masked_fill(~mask.unsqueeze(-1), 0.0)).sum(1, dtype=torch.float32) / count
    both = (grad_moment.float() + grad_moment.mT).contiguous()
    last = (grad_centre / count - (centre.unsqueeze(1) @ both).squeeze(1)).contiguous()
    grad_x = x.new_empty(x.shape)
    call("moments_backward", tokens(x), mask, both, last, tokens(grad_x), sizes_of(x, 0))
    return (grad_x,)


def scaled(x: Tensor, scale: Tensor, weight: Tensor, bias: Tensor | None, rest: Tensor | None) -> Tensor:
    """(x ⊙ scale) Wᵀ + b + rest x, (B, N, D')."""
    x, scale, weight, bias, rest = dense(x), full(scale), full(weight), full(bias), full(rest)
    y = output(x, weight.shape[0])
    call("linear_scaled", tokens(x), scale, linear_of(weight, bias), rest, tokens(y),
         sizes_of(x, 0, out=weight.shape[0]))  # fmt: skip
    return y


def scaled_backward(
    grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor, bias: Tensor | None, rest: Tensor | None
) -> tuple[Tensor | None, ...]:
    """With dz = grad W:  x: dz ⊙ scale + rest grad;  scale: Σ_n dz ⊙ x;  W: Σ gradᵀ (x ⊙ scale);  rest: Σ grad ⊙ x."""
    grad, x, scale, weight, bias, rest = dense(grad), dense(x), full(scale), full(weight), full(bias), full(rest)
    grad_x, grad_scale, grad_w = x.new_empty(x.shape), torch.empty_like(scale), torch.empty_like(weight)
    grad_b, grad_rest = weight.new_empty(weight.shape[0]), weight.new_zeros(torch.get_num_threads())
    call("linear_scaled_backward", tokens(grad), tokens(x), scale, linear_of(weight, bias), rest,
         tokens(grad_x), grad_scale, grad_w, grad_b, grad_rest,
         sizes_of(x, 0, out=weight.shape[0]))  # fmt: skip
    own_rest = None if rest is None else grad_rest.sum().view(rest.shape)
    return grad_x, grad_scale, grad_w, None if bias is None else grad_b, own_rest


def _count(x: Tensor, mask: Tensor | None) -> Tensor:
    """How many real tokens each sample has, (B,), at least 1."""
    count = count_real(x, mask, ndim=1)
    return count.float() if isinstance(count, Tensor) else torch.full(x.shape[:1], float(count))
