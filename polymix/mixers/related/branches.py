"""Depthwise convolutions beside an attention, on the grid of its tokens, and as matrices."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.ops.shared.depthwise import depthwise_conv
from polymix.structured.conv import conv_matrix


def on_grid(x: Tensor, weight: Tensor, grid: tuple[int, ...], prefix: int) -> Tensor:
    """Convolve the tokens (B, N, D) behind the prefix on their grid with weight (D, 1, *k); zeros for the prefix."""
    y = depthwise_conv(x[:, prefix:], weight, grid)
    return torch.cat((y.new_zeros(x.shape[0], prefix, x.shape[2]), y), dim=1) if prefix else y


def dense(weight: Tensor, grid: tuple[int, ...], prefix: int = 0) -> Tensor:
    """The same convolution as matrices (D, N, N); zero rows and columns for the prefix."""
    return F.pad(conv_matrix(weight, grid), (prefix, 0, prefix, 0))
