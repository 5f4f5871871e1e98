"""What several ops share: accumulator types, counts of real tokens, activations, rotary positions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Turns = tuple[Tensor, Tensor]  # cosines and sines of a rotation


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """float32 at least: the type in which sums over tokens are kept."""
    return torch.promote_types(dtype, torch.float32)


def count_real(x: Tensor, mask: Tensor | None, ndim: int = 2) -> Tensor | int:
    """What a sum over the real tokens of x (B, N, …) is divided by for a mean: at least 1, `ndim` axes (B, 1, …)."""
    return x.shape[1] if mask is None else _a_row(mask.sum(1).clamp_min(1), ndim)


def without_empty(x: Tensor, mask: Tensor | None) -> Tensor:
    """x (B, …) with zeros for every row of the mask (B, N) in which no token is real."""
    return x if mask is None else x.masked_fill(~_a_row(mask.any(1), x.ndim), 0.0)


def _a_row(values: Tensor, ndim: int) -> Tensor:
    return values.view(-1, *(1,) * (ndim - 1))


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The type that autocast would compute in on this device; None where it is off or unknown (meta)."""
    if not torch.amp.is_autocast_available(device.type) or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which products keep the type of their operands."""
    return torch.autocast(device.type, enabled=False) if autocast_dtype(device) else nullcontext()


def clamped_leaky_relu(x: Tensor) -> Tensor:
    """clamp(leaky_relu(x, 0.01), -0.1, 6), the activation of the PoM authors' code."""
    return F.leaky_relu(x, 0.01).clamp(-0.1, 6.0)


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
    "hardsigmoid": F.hardsigmoid,
    "identity": identity,
}
SIGMAS: dict[str, Callable[[Tensor], Tensor] | None] = {
    "softmax": None,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "identity": identity,
}


def scaled_linear(x: Tensor, scale: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(x ⊙ scale) Wᵀ + b for a scale a sample: x (B, N, E), scale (B, 1, E), weight (D, E) -> (B, N, D).

    Where there are more tokens than channels the scale goes into the weight, which is smaller than x.
    """
    if torch.compiler.is_compiling() or x.shape[1] < 2 * weight.shape[0]:  # a graph should not depend on the length
        return F.linear(x * scale, weight, bias)
    y = x @ (scale.mT * weight.t())
    return y if bias is None else y + bias


def sigma(x: Tensor, kind: str) -> Tensor:
    """The normalisation σ of Poly-SA over the last axis (one head's channels)."""
    function = SIGMAS[kind]
    return x.softmax(-1) if function is None else function(x)


def rotary(position: Tensor, width: int, *, axes: int, heads: int | None, base: float = 1e4) -> Turns:
    """Cosines and sines (…, width / 2) of the angles by which the pairs of `width` features turn at a position.

    axes=1: pair k turns by position · base^(-k / (width/2)). axes=2: `position` is (…, 2); the first half of the
    features turns by the row, the second by the column, each with width/4 frequencies. A gate of `heads` scalars
    borrows the frequencies of the channels that it gates (as the PoM authors do): base^(-k / heads) in 1-D,
    base^(-4k / heads) in 2-D. Kept in float64 so that a position of a million is as exact as the first.
    """
    pairs = width // (2 * axes)
    exponent = torch.arange(pairs, dtype=torch.float64, device=position.device)
    exponent = exponent / (pairs if heads is None or axes == 2 else heads)
    angles = position.to(torch.float64).unsqueeze(-1) * base**-exponent
    angles = angles if axes == 1 else angles.flatten(-2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, turns: Turns, *, axes: int) -> Tensor:
    """Turn the pairs (k, k + width/2) of x (…, width), within each half of the features when axes = 2."""
    cos, sin = (part.to(x.dtype) for part in turns)
    halves = x.unflatten(-1, (axes, 2, -1))  # (…, axis, first or second of the pair, pair)
    first, second = halves.unbind(-2)
    cos, sin = cos.unflatten(-1, (axes, -1)), sin.unflatten(-1, (axes, -1))
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-2)
    return turned.flatten(-3)


@cache
def keep_memory() -> None:
    """Let the allocator keep what is freed, from the first call of a process on.

    One such as glibc's maps every large piece anew, and the system clears it page by page, which takes up to a fifth of
    a training step; once a larger piece has been freed it keeps those up to its size, 32 MiB at most, and twice as much
    in all. So a piece of that size is taken and freed, untouched.
    """
    torch.UntypedStorage(31 << 20)
