"""Linear maps, feed-forward networks and norms of a few rows, as in a step of decoding.

All tensors are float32 or all are bfloat16; sums are float32, and a result is rounded once.
"""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.ops.dispatch import obstacle
from polymix.ops.native import arrays
from polymix.ops.native.library import call
from polymix.ops.shared.activations import FUNCTIONS
from polymix.ops.shared.tensors import Linear

MAX_ROWS = 32  # with more, PyTorch's products are as fast
MIN_WEIGHTS = 1 << 16  # entries of a weight from which the kernel saves more than its call costs
ACTIVATIONS = {**FUNCTIONS, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu}
KINDS = (*arrays.KINDS, "gelu_tanh", "silu")  # ordered as in decode_rows.c


def linear(
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
    y = try_linear(x, weight, bias, activation, factor)
    if y is not None:
        return y
    y = ACTIVATIONS[activation](F.linear(x, weight, bias))
    return y if factor is None else y * factor


def try_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "identity", factor: Tensor | None = None
) -> Tensor | None:
    """`linear` by the kernel, or None if it cannot run or would not be faster."""
    if not _fits(x.shape[-1], x, weight, bias) or weight.numel() < MIN_WEIGHTS:
        return None
    if factor is not None and (factor.dtype != x.dtype or factor.shape != (*x.shape[:-1], len(weight))):
        return None
    if obstacle("native", (x, weight) if factor is None else (x, weight, factor)) is not None:
        return None
    return call_linear(x, weight, bias, activation, factor)


def try_feed_forward(x: Tensor, up: Linear, down: Linear, activation: str, gate: Linear | None = None) -> Tensor | None:
    """W_d h + b_d with h = act(W_u x + b_u), or h = act(W_g x + b_g) ⊙ (W_u x + b_u) with a gate, by one kernel.

    None if it cannot run or would not be faster. up, down, gate: weight (E, D) and bias (E) or None.
    """
    if not _fits(x.shape[-1], x, *up) or not _fits(len(up[0]), x, *down) or up[0].numel() < MIN_WEIGHTS:
        return None
    if gate is not None and (not _fits(x.shape[-1], x, *gate) or len(gate[0]) != len(up[0])):
        return None
    weights = (up[0], down[0]) if gate is None else (up[0], down[0], gate[0])
    return None if obstacle("native", (x, *weights)) else call_feed_forward(x, up, down, activation, gate)


def try_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor | None:
    """x / √(mean x² + ε) ⊙ w for weight (D), or None if the kernel cannot run or would not be faster."""
    if not _fits(x.shape[-1], x, weight[None], None) or obstacle("native", (x, weight)) is not None:
        return None
    x = x.contiguous()
    y, size = torch.empty_like(x), x.shape[-1]
    call("decode_rms_norm", x, weight, y, x.numel() // size, size, ctypes.c_double(eps),
         int(x.dtype == torch.bfloat16))  # fmt: skip
    return y


def _fits(size: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernels take a map of `size` inputs for the rows of x. The cheapest questions come first."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or weight.ndim != 2 or weight.shape[1] != size:
        return False
    if weight.dtype != x.dtype or not weight.is_contiguous() or not 0 < x.numel() <= MAX_ROWS * x.shape[-1]:
        return False
    return bias is None or (bias.dtype == x.dtype and bias.shape == (len(weight),) and bias.is_contiguous())


# -- the kernels


def call_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, factor: Tensor | None) -> Tensor:
    """act(x Wᵀ + b) ⊙ f for x (…, D), a contiguous weight (E, D), bias (E) and factor (…, E): (…, E)."""
    x, bias = x.contiguous(), None if bias is None else bias.contiguous()
    factor = None if factor is None else factor.contiguous()
    out, size = weight.shape
    y = x.new_empty(*x.shape[:-1], out)
    call("decode_linear", x, weight, bias, factor, y, x.numel() // size, size, out, KINDS.index(activation),
         int(x.dtype == torch.bfloat16), torch.get_num_threads())  # fmt: skip
    return y


def call_feed_forward(x: Tensor, up: Linear, down: Linear, activation: str, gate: Linear | None) -> Tensor:
    """The network of `try_feed_forward`, whose hidden channels are rounded to the dtype of x."""
    x, rows = x.contiguous(), x.numel() // x.shape[-1]
    hidden, y = x.new_empty(rows, len(up[0])), x.new_empty(*x.shape[:-1], len(down[0]))
    call("decode_feed_forward", x, up, gate, down, hidden, y, rows, KINDS.index(activation),
         int(x.dtype == torch.bfloat16), torch.get_num_threads())  # fmt: skip
    return y
