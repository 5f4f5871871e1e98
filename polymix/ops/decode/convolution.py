"""A causal depthwise convolution of one token in C, as in a step of decoding: one call for its ten small operations."""

from __future__ import annotations

import torch
from torch import Tensor

from polymix.ops.dispatch import obstacle
from polymix.ops.native.library import call


def try_convolution(x: Tensor, window: Tensor, weight: Tensor, dilation: int) -> tuple[Tensor, Tensor] | None:
    """y = Σ_t w_t ⊙ s_{δ t} for the sequence s of the window and x, and the next window; None if the kernel cannot run.

    Args:
        x: the token, (B, 1, D).
        window: the δ (k - 1) tokens before it, (B, δ (k - 1), D), in float32.
        weight: (D, 1, k).
        dilation: δ.
    Returns:
        y (B, 1, D) in the dtype of x, rounded once, and the next window. Cost: D k multiply-adds a sequence.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    (rows, tokens, width), taps = x.shape, weight.shape[-1]
    if tokens != 1 or taps == 1 or window.shape != (rows, dilation * (taps - 1), width) or not x.numel():
        return None
    if weight.dtype != x.dtype or window.dtype != torch.float32 or obstacle("native", (x, window, weight)) is not None:
        return None
    x, window, weight = x.contiguous(), window.contiguous(), weight.contiguous()
    y, following = torch.empty_like(x), torch.empty_like(window)
    sizes = rows, width, taps, dilation, int(x.dtype == torch.bfloat16), torch.get_num_threads()
    call("decode_convolution", x, window, weight, y, following, *sizes)
    return y, following
