"""Activations, gates and normalisations, selected by name."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.ops.shared.tensors import forward_mode


def clamped_leaky_relu(x: Tensor) -> Tensor:
    """clamp(leaky_relu(x, 0.01), -0.1, 6), the activation in the code published with PoM."""
    return F.leaky_relu(x, 0.01).clamp(-0.1, 6.0)


def hardsigmoid(x: Tensor) -> Tensor:
    """clamp(x / 6 + 1/2, 0, 1). The fused one has no second derivative in forward mode."""
    return (x + 3.0).clamp(0.0, 6.0) / 6.0 if forward_mode() else F.hardsigmoid(x)


def identity(x: Tensor) -> Tensor:
    return x


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "relu": F.relu,
    "identity": identity,
    "clamped_leaky_relu": clamped_leaky_relu,
}
GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "hardsigmoid": hardsigmoid,
    "identity": identity,
}
FUNCTIONS = {**ACTIVATIONS, **GATES}
SIGMAS: dict[str, Callable[[Tensor], Tensor] | None] = {
    "softmax": None,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "identity": identity,
}
IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {  # ACTIVATIONS and GATES that overwrite their input
    "gelu": torch.ops.aten.gelu_.default,
    "relu": torch.relu_,
    "identity": identity,
    "clamped_leaky_relu": lambda x: F.leaky_relu_(x, 0.01).clamp_(-0.1, 6.0),
    "sigmoid": torch.sigmoid_,
    "hardsigmoid": torch.ops.aten.hardsigmoid_.default,
}


def sigma(x: Tensor, kind: str) -> Tensor:
    """Apply Poly-SA's normalisation σ over the last axis, the channels of one head (Poly-SA, Eq. 18)."""
    function = SIGMAS[kind]
    return x.softmax(-1) if function is None else function(x)
