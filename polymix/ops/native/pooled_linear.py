"""`polymix.ops.pooled_linear` on a CPU, forward and backward: products in C, with all that comes before and after them.

x (B, N, D) of float32 or bf16; all is computed in float32, and what has tokens is rounded once to x's type; sums and
the gradients of weights are float32. Memory beside the results: the packed weights, for each thread a few blocks of 128
tokens and, backward, the weights' gradients. Cost in products: forward that of the maps, backward three times that of
the inner map and twice that of the outer.
"""

from __future__ import annotations

import ctypes
from typing import overload

import torch
from torch import Tensor

from polymix.ops.blocked.common import output
from polymix.ops.native.build import call, dense, tokens

KINDS = ("identity", "gelu", "relu", "clamped_leaky_relu", "sigmoid", "hardsigmoid")  # as in functions.h


class Sizes(ctypes.Structure):
    """As in pooled_linear.c."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ("batch", "tokens", "dim", "width", "out", "kind", "degree", "heads", "bf16", "threads")
    )


class Linear(ctypes.Structure):
    """As in product.h."""

    _fields_ = (("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p), ("out", ctypes.c_int64), ("in", ctypes.c_int64))


@overload
def full(x: Tensor) -> Tensor: ...
@overload
def full(x: None) -> None: ...
def full(x: Tensor | None) -> Tensor | None:
    """x in float32, its numbers side by side."""
    return None if x is None else x.float().contiguous()


def linear_of(weight: Tensor, bias: Tensor | None) -> Linear:
    """Of what `full` returned; the tensors must live as long."""
    return Linear(weight.data_ptr(), None if bias is None else bias.data_ptr(), *weight.shape)


def sizes_of(
    x: Tensor, width: int, p: Tensor | None = None, *, out: int = 0, activation: str = "identity", degree: int = 0
) -> Sizes:
    heads, bf16 = 1 if p is None else p.shape[0], int(x.dtype == torch.bfloat16)
    return Sizes(*x.shape, width, out, KINDS.index(activation), degree, heads, bf16, torch.get_num_threads())


def hidden(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.contiguous()


def powers(x: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor | None, activation: str, degree: int) -> Tensor:
    """Σ_n h_n^p, (B, degree, E)."""
    x, weight, bias, mask = dense(x), full(weight), full(bias), hidden(mask)
    sums = weight.new_empty(x.shape[0], degree, weight.shape[0])
    sizes = sizes_of(x, weight.shape[0], activation=activation, degree=degree)
    call("linear_powers", tokens(x), linear_of(weight, bias), mask, sums, sizes)
    return sums


def powers_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor | None, activation: str, degree: int
) -> tuple[Tensor | None, ...]:
    """With du = act'(u) Σ_p p g_p h^(p-1):  x: du W;  W: Σ duᵀ x;  b: Σ du."""
    grad, x, weight, mask = full(grad), dense(x), full(weight), hidden(mask)
    grad_x, grad_w, grad_b = _like(x), torch.empty_like(weight), weight.new_empty(weight.shape[0])
    bias, sizes = full(bias), sizes_of(x, weight.shape[0], activation=activation, degree=degree)
    call("linear_powers_backward", grad, tokens(x), linear_of(weight, bias), mask, tokens(grad_x),
         grad_w, grad_b, sizes)  # fmt: skip
    return grad_x, grad_w, None if bias is None else grad_b


def pairs(x: Tensor, weight: Tensor, bias: Tensor | None, p: Tensor | None, mask: Tensor | None) -> Tensor:
    """Σ_n p_n ⊙ (x_n W_1ᵀ + b_1) ⊙ (x_n W_2ᵀ + b_2), (B, E)."""
    x, weight, bias, p, mask = dense(x), full(weight), full(bias), full(p), hidden(mask)
    sums = weight.new_empty(x.shape[0], weight.shape[0] // 2)
    sizes = sizes_of(x, sums.shape[1], p)
    call("linear_pairs", tokens(x), linear_of(weight, bias), p, mask, sums, sizes)
    return sums


def pairs_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, p: Tensor | None, mask: Tensor | None
) -> tuple[Tensor | None, ...]:
    """With u and v the two maps' outputs, du = g ⊙ p ⊙ v, dv = g ⊙ p ⊙ u and p: Σ over a head of g ⊙ u ⊙ v."""
    grad, x, weight, bias, p, mask = full(grad), dense(x), full(weight), full(bias), full(p), hidden(mask)
    grad_x, grad_w, grad_b = _like(x), torch.empty_like(weight), weight.new_empty(weight.shape[0])
    grad_p = None if p is None else p.new_zeros(x.shape[0], *p.shape)  # zero where a token is padding
    call("linear_pairs_backward", grad, tokens(x), linear_of(weight, bias), p, mask,
         tokens(grad_x), grad_w, grad_b, grad_p, sizes_of(x, grad.shape[1], p))  # fmt: skip
    return grad_x, grad_w, None if bias is None else grad_b, None if grad_p is None else grad_p.sum(0)


def gated(
    x: Tensor, weight: Tensor, bias: Tensor | None, gate: Tensor, p: Tensor | None, last: Tensor | None,
    last_bias: Tensor | None, activation: str,
) -> Tensor:  # fmt: skip
    """(act(x Wᵀ + b) ⊙ gate ⊙ p_n) W_oᵀ + b_o, (B, N, D')."""
    x, weight, bias, gate, p = dense(x), full(weight), full(bias), full(gate), full(p)
    last, last_bias = full(last), full(last_bias)
    out = weight.shape[0] if last is None else last.shape[0]
    y = output(x, out)
    call("linear_gated", tokens(x), linear_of(weight, bias), gate, p,
         None if last is None else linear_of(last, last_bias), tokens(y),
         sizes_of(x, weight.shape[0], p, out=out, activation=activation))  # fmt: skip
    return y


def gated_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, gate: Tensor, p: Tensor | None, last: Tensor | None,
    last_bias: Tensor | None, activation: str,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """With a = act(u) and dz = grad W_o,  u: dz ⊙ gate ⊙ p ⊙ act'(u);  gate: Σ_n dz ⊙ a ⊙ p;  p: Σ dz ⊙ a ⊙ gate."""
    grad, x, weight, bias, gate, p = dense(grad), dense(x), full(weight), full(bias), full(gate), full(p)
    last, last_bias = full(last), full(last_bias)
    grad_x, grad_w, grad_b = _like(x), torch.empty_like(weight), weight.new_empty(weight.shape[0])
    grad_gate, grad_p = torch.empty_like(gate), None if p is None else p.new_empty(x.shape[0], *p.shape)
    grad_last, grad_last_b = (None, None) if last is None else (torch.empty_like(last), last.new_empty(last.shape[0]))
    call("linear_gated_backward", tokens(grad), tokens(x), linear_of(weight, bias), gate, p,
         None if last is None else linear_of(last, last_bias), tokens(grad_x), grad_w, grad_b,
         grad_gate, grad_p, grad_last, grad_last_b,
         sizes_of(x, weight.shape[0], p, out=grad.shape[2], activation=activation))  # fmt: skip
    return (
        grad_x, grad_w, None if bias is None else grad_b, grad_gate, None if grad_p is None else grad_p.sum(0),
        grad_last, None if last_bias is None else grad_last_b,
    )  # fmt: skip


def _like(x: Tensor) -> Tensor:
    """Room for the gradient of x, its channels side by side."""
    return x.new_empty(x.shape)
