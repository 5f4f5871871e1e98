"""`polymix.ops.few_rows` in C for the CPU, without gradients.

All tensors are float32 or all are bfloat16; sums are float32, and the result is rounded once. No memory besides it.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from polymix.ops.native import arrays
from polymix.ops.native.arrays import linear_of
from polymix.ops.native.library import call

Linear = tuple[Tensor, Tensor | None]

MOST_ROWS = 32  # with more, PyTorch's products are as fast
KINDS = (*arrays.KINDS, "gelu_tanh", "silu")  # ordered as in few_rows.c


def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, factor: Tensor | None) -> Tensor:
    """act(x Wᵀ + b) ⊙ f for x (…, D), a contiguous weight (E, D), bias (E) and factor (…, E): (…, E)."""
    x, bias = x.contiguous(), None if bias is None else bias.contiguous()
    factor = None if factor is None else factor.contiguous()
    out, size = weight.shape
    y = x.new_empty(*x.shape[:-1], out)
    call("few_rows_linear", x, weight, bias, factor, y, x.numel() // size, size, out, KINDS.index(activation),
         int(x.dtype == torch.bfloat16), torch.get_num_threads())  # fmt: skip
    return y


def feed_forward(x: Tensor, up: Linear, down: Linear, activation: str, gate: Linear | None) -> Tensor:
    """The network of `polymix.ops.few_rows.try_feed_forward`, whose hidden channels are rounded to the dtype of x."""
    x, rows = x.contiguous(), x.numel() // x.shape[-1]
    hidden, y = x.new_empty(rows, len(up[0])), x.new_empty(*x.shape[:-1], len(down[0]))
    third = None if gate is None else linear_of(*gate)
    call("few_rows_feed_forward", x, linear_of(*up), third, linear_of(*down), hidden, y, rows, KINDS.index(activation),
         int(x.dtype == torch.bfloat16), torch.get_num_threads())  # fmt: skip
    return y


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / √(mean x² + ε) ⊙ w for x (…, D) and a contiguous weight (D): (…, D)."""
    x = x.contiguous()
    y, size = torch.empty_like(x), x.shape[-1]
    call(
        "few_rows_rms_norm", x, weight, y, x.numel() // size, size, ctypes.c_double(eps), int(x.dtype == torch.bfloat16)
    )
    return y
