"""`polymix.ops.few_rows` in C for the CPU, without gradients.

All tensors are float32 or all are bfloat16; sums are float32, and the result is rounded once. No memory besides it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polymix.ops.native import arrays
from polymix.ops.native.library import call

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
