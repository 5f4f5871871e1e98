"""`polymix.ops.gated` in C for the CPU, forward and backward.

x is (B, N, D) in float32 or bfloat16. All arithmetic is float32: results per token are rounded once to the dtype of
x; sums and gradients of weights stay float32. Where `arrays.in_pairs` says so, the processor multiplies bfloat16
and sums in float32: products of tokens lose nothing, what other products read is rounded to bfloat16.
Memory besides the results: the packed weights, a few blocks of 128 tokens per thread and, in the backward, copies
of the weights' gradients: one per thread as long as they fit in 32 MiB, then fewer, which threads share
(native/gradients.h). A weight that needs no gradient costs nothing in the backward. Cost: the forward takes the two
maps once; the backward takes the inner map three times and the outer map twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polymix.ops.native.arrays import Needs, as_read, dense, full, in_pairs, rooms_like, sizes_of
from polymix.ops.native.library import call
from polymix.ops.shared.blocks import output


def gated(
    x: Tensor, weight: Tensor, bias: Tensor | None, gate: Tensor, p: Tensor | None, last: Tensor | None,
    last_bias: Tensor | None, activation: str,
) -> Tensor:  # fmt: skip
    """(act(x Wᵀ + b) ⊙ gate ⊙ p_n) W_oᵀ + b_o, (B, N, D')."""
    pairs = in_pairs(x, weight, last)
    out = weight.shape[0] if last is None else last.shape[0]
    y = output(x, out)
    call("linear_gated", dense(x), as_read((weight, bias), pairs), full(gate), full(p),
         None if last is None else as_read((last, last_bias), pairs), y,
         sizes_of(x, weight.shape[0], p, out=out, activation=activation, pairs=pairs))  # fmt: skip
    return y


def gated_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, gate: Tensor, p: Tensor | None, last: Tensor | None,
    last_bias: Tensor | None, activation: str, needs: Needs,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients of `gated`: with u = x Wᵀ + b, a = act(u) and dz = grad W_o,

    du = dz ⊙ gate ⊙ p ⊙ act'(u),  dgate = Σ_n dz ⊙ a ⊙ p,  dp = Σ dz ⊙ a ⊙ gate over each head and the batch.
    """
    pairs = in_pairs(x, weight, last)
    grad, x, gate, p = dense(grad), dense(x), full(gate), full(p)
    grad_gate, grad_p = torch.empty_like(gate), None
    if p is not None and needs[4]:
        grad_p = p.new_zeros(x.shape[0], *p.shape)  # is added to
    grad_x, grad_w, grad_b, grad_last, grad_last_b = rooms_like(
        (x, weight, bias, last, last_bias), (*needs[:3], *needs[5:])
    )
    call("linear_gated_backward", grad, x, as_read((weight, bias), pairs), gate, p,
         None if last is None else as_read((last, last_bias), pairs), grad_x, grad_w, grad_b,
         grad_gate, grad_p, grad_last, grad_last_b,
         sizes_of(x, weight.shape[0], p, out=grad.shape[2], activation=activation, pairs=pairs))  # fmt: skip
    grad_p = None if grad_p is None else grad_p.sum(0)
    return grad_x, grad_w, grad_b, grad_gate if needs[3] else None, grad_p, grad_last, grad_last_b
