"""A linear map of a few rows, as in a step of decoding: with a kernel at the speed of reading the weight once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.ops.dispatch import obstacle
from polymix.ops.few_rows import native
from polymix.ops.few_rows.native import MOST_ROWS
from polymix.ops.shared.activations import FUNCTIONS

SMALLEST = 1 << 16  # entries of a weight from which the kernel saves more than its call costs
ACTIVATIONS = {**FUNCTIONS, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu}


def few_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "identity", factor: Tensor | None = None
) -> Tensor:
    """Apply a linear map and an activation to the rows of x: act(x Wᵀ + b) ⊙ f.

    Without gradients, for at most 32 rows on a CPU, a kernel reads the weight once, in its own dtype. PyTorch's
    products of so few rows take two to four times as long. Every other call is plain PyTorch.

    Args:
        x: (…, D).
        weight: (E, D).
        bias: (E) or None.
        activation: a name in ACTIVATIONS.
        factor: (…, E), of as many rows as x; None for ones.
    Returns:
        (…, E) in the dtype of x. The kernel rounds it once, PyTorch after each operation. Cost: D E multiply-adds per
        row.
    """
    y = try_native(x, weight, bias, activation, factor)
    if y is not None:
        return y
    y = ACTIVATIONS[activation](F.linear(x, weight, bias))
    return y if factor is None else y * factor


def try_native(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "identity", factor: Tensor | None = None
) -> Tensor | None:
    """`few_rows` by the kernel, or None if it cannot run or would not be faster. The cheapest questions come first."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or weight.ndim != 2:
        return None
    out, size = weight.shape
    if x.numel() > MOST_ROWS * size or out * size < SMALLEST or x.shape[-1] != size or not x.numel():
        return None
    dtype = x.dtype
    if weight.dtype != dtype or not weight.is_contiguous():
        return None
    if bias is not None and (bias.dtype != dtype or bias.shape != (out,)):
        return None
    if factor is not None and (factor.dtype != dtype or factor.shape != (*x.shape[:-1], out)):
        return None
    if obstacle("native", (x, weight) if factor is None else (x, weight, factor)) is not None:
        return None
    return native.few_rows(x, weight, bias, activation, factor)


__all__ = ["ACTIVATIONS", "MOST_ROWS", "few_rows", "try_native"]
