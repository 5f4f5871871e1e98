"""A linear map of a few rows, as in a step of decoding: with a kernel at the speed of reading the weight once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.ops.dispatch import obstacle
from polymix.ops.few_rows import native
from polymix.ops.few_rows.native import MOST_ROWS, Linear
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
    """`few_rows` by the kernel, or None if it cannot run or would not be faster."""
    if not _fits(x.shape[-1], x, weight, bias) or weight.numel() < SMALLEST:
        return None
    if factor is not None and (factor.dtype != x.dtype or factor.shape != (*x.shape[:-1], len(weight))):
        return None
    if obstacle("native", (x, weight) if factor is None else (x, weight, factor)) is not None:
        return None
    return native.few_rows(x, weight, bias, activation, factor)


def try_feed_forward(x: Tensor, up: Linear, down: Linear, activation: str, gate: Linear | None = None) -> Tensor | None:
    """W_d h + b_d with h = act(W_u x + b_u), or h = act(W_g x + b_g) ⊙ (W_u x + b_u) with a gate, by one kernel.

    None if it cannot run or would not be faster, as `try_native`. up, down, gate: weight (E, D) and bias (E) or None.
    """
    if not _fits(x.shape[-1], x, *up) or not _fits(len(up[0]), x, *down) or up[0].numel() < SMALLEST:
        return None
    if gate is not None and (not _fits(x.shape[-1], x, *gate) or len(gate[0]) != len(up[0])):
        return None
    weights = (up[0], down[0]) if gate is None else (up[0], down[0], gate[0])
    return None if obstacle("native", (x, *weights)) else native.feed_forward(x, up, down, activation, gate)


def try_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor | None:
    """x / √(mean x² + ε) ⊙ w, or None if the kernel cannot run or would not be faster. weight: (D)."""
    if not _fits(x.shape[-1], x, weight[None], None) or obstacle("native", (x, weight)) is not None:
        return None
    return native.rms_norm(x, weight, eps)


def _fits(size: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernels take a map of `size` inputs for the rows of x. The cheapest questions come first."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or weight.ndim != 2 or weight.shape[1] != size:
        return False
    if weight.dtype != x.dtype or not weight.is_contiguous() or not 0 < x.numel() <= MOST_ROWS * x.shape[-1]:
        return False
    return bias is None or (bias.dtype == x.dtype and bias.shape == (len(weight),) and bias.is_contiguous())


__all__ = ["ACTIVATIONS", "MOST_ROWS", "few_rows", "try_feed_forward", "try_native", "try_rms_norm"]
