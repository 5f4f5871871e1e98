"""A library's 1×1 convolutions run on tokens, and its weights taken in: what the wrapped feature-map layers share."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from polymix.errors import OptionError, check_int, check_number
from polymix.structured.base import init_
from polymix.structured.cost import Op


def pointwise(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """A 1×1 convolution on tokens (B, N, D) -> (B, N, D'), without going through (B, D, H, W) and back."""
    return F.linear(x, conv.weight.flatten(1), conv.bias)


def pointwise_op(rows: int, conv: nn.Conv2d) -> Op:
    """The product that `pointwise` does on `rows` tokens."""
    return Op("linear", (rows, conv.in_channels, conv.out_channels, 1))


def pointwise_letters(name: str, conv: nn.Conv2d) -> dict[str, Tensor | None]:
    """W_name as it acts on row tokens, and b_name."""
    return {f"W_{name}": conv.weight.flatten(1).t(), f"b_{name}": conv.bias}


def restart(conv: nn.Conv2d, bias: bool, gain: float = 1.0, shift: float = 0.0) -> None:
    """Our init in the place of the library's: variance kept times gain², biases at `shift`; none without `bias`."""
    init_(conv.weight, conv.in_channels, gain)
    if not bias:
        conv.bias = None
    elif conv.bias is not None:
        nn.init.constant_(conv.bias, shift)


def check_reduced(rd_ratio: float | None, rd_channels: int | None) -> None:
    """The two ways to say how wide a bottleneck is: one of them at most."""
    if rd_ratio is not None:
        check_number("rd_ratio", rd_ratio, 1e-6, float("inf"), "a positive number, or None for the usual one", 0.25)
    if rd_channels is not None:
        check_int("rd_channels", rd_channels, 1)
        if rd_ratio is not None:
            raise OptionError(
                "rd_ratio", rd_ratio, "None beside rd_channels, which settles the width", "Leave one out."
            )


def reduced(rd_ratio: float | None, rd_channels: int | None) -> dict[str, Any]:
    """The same two as arguments of a timm layer, whose own default stands where neither is given."""
    given = {"rd_ratio": rd_ratio, "rd_channels": rd_channels}
    return {name: value for name, value in given.items() if value is not None}
