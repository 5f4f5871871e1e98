"""Layers of timm by name, and what the mixers that wrap them share: 1×1 convolutions on tokens, widths, inits."""

from __future__ import annotations

import importlib
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from polymix.compat import cure_torchvision
from polymix.errors import OptionError, check_int, check_number
from polymix.extras import needs
from polymix.structured.base import init_
from polymix.structured.cost import Op

_MODULE_OF_CLASS = {
    "NonLocalAttn": "timm.layers",
    "SEModule": "timm.layers",
    "EffectiveSEModule": "timm.layers",
    "GlobalContext": "timm.layers",
    "LiteMLA": "timm.models.efficientvit_mit",
    "XCA": "timm.models.xcit",
}


def timm_layer(name: str) -> type[Any]:
    """The class `name` of timm. Raises MissingExtraError if timm is not installed."""
    cure_torchvision()
    with needs("vision", f"This mixer wraps its {name}."):
        import timm
    assert timm
    return getattr(importlib.import_module(_MODULE_OF_CLASS[name]), name)


def pointwise(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """Apply a 1×1 convolution to tokens: (B, N, D) -> (B, N, D'), without reshaping to (B, D, H, W)."""
    return F.linear(x, conv.weight.flatten(1), conv.bias)


def pointwise_op(rows: int, conv: nn.Conv2d) -> Op:
    """The cost of `pointwise` on `rows` tokens."""
    return Op("linear", (rows, conv.in_channels, conv.out_channels, 1))


def pointwise_matrices(name: str, conv: nn.Conv2d) -> dict[str, Tensor | None]:
    """The convolution as W_name, acting on row tokens, and b_name."""
    return {f"W_{name}": conv.weight.flatten(1).t(), f"b_{name}": conv.bias}


def initialise(conv: nn.Conv2d, bias: bool, gain: float = 1.0, shift: float = 0.0) -> None:
    """Initialise a timm convolution as ours: output variance gain², bias `shift`, or no bias at all."""
    init_(conv.weight, conv.in_channels, gain)
    if not bias:
        conv.bias = None
    elif conv.bias is not None:
        nn.init.constant_(conv.bias, shift)


def check_reduced(rd_ratio: float | None, rd_channels: int | None) -> None:
    """Check the two options for the width of a bottleneck, of which at most one may be given."""
    if rd_ratio is not None:
        check_number("rd_ratio", rd_ratio, 1e-6, float("inf"), "a positive number, or None for timm's default", 0.25)
    if rd_channels is not None:
        check_int("rd_channels", rd_channels, 1)
        if rd_ratio is not None:
            raise OptionError("rd_ratio", rd_ratio, "None with rd_channels, which sets the width", "Leave one out.")


def reduced(rd_ratio: float | None, rd_channels: int | None) -> dict[str, Any]:
    """The same options as arguments of a timm layer, which has its own default if neither is given."""
    arguments = {"rd_ratio": rd_ratio, "rd_channels": rd_channels}
    return {name: value for name, value in arguments.items() if value is not None}


def batch_norm(norm: Any, rows: Tensor) -> Tensor:
    """A BatchNorm of rows (R, D), which has a variance of at least two.

    Of fewer, as a batch of one real token has, it uses its running statistics, as in evaluation, and keeps them.
    """
    if norm.training and len(rows) < 2:
        return F.batch_norm(rows, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps)
    y: Tensor = norm(rows)
    return y
