"""Types of sums, counts of real tokens, linear maps and memory: what every op needs of its tensors."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Linear = tuple[Tensor, Tensor | None]  # a weight (out, in) as nn.Linear's, or (G, out / G, in / G), and a bias


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


def forward_mode() -> bool:
    """Whether forward-mode derivatives are being taken: torch.func.jvp, jacfwd, hessian, or dual tensors.

    Fused kernels and operators of our own have no forward-mode formula: plain PyTorch has to run instead.
    """
    return not torch.compiler.is_compiling() and torch.autograd.forward_ad._current_level >= 0


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The type that autocast would compute in on this device; None where it is off or unknown (meta)."""
    if not torch.amp.is_autocast_available(device.type) or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which products keep the type of their operands."""
    return torch.autocast(device.type, enabled=False) if autocast_dtype(device) else nullcontext()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (B, N, in) under a map (out, in), or a block-diagonal one (G, out / G, in / G): (B, N, out)."""
    if weight.ndim == 2:
        return F.linear(x, weight, bias)
    blocks = x.unflatten(-1, (weight.shape[0], -1)).transpose(-2, -3)  # (B, G, N, in / G)
    y = (blocks @ weight.mT).transpose(-2, -3).flatten(-2)
    return y if bias is None else y + bias


def share(linear: Linear, first: int, last: int) -> Linear:
    """Outputs first … last - 1 of a linear map alone."""
    weight, bias = linear
    return weight[first:last], None if bias is None else bias[first:last]


def cast(linear: Linear, dtype: torch.dtype) -> Linear:
    """The same map in another type."""
    weight, bias = linear
    return weight.to(dtype), None if bias is None else bias.to(dtype)


def scaled_linear(x: Tensor, scale: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(x ⊙ scale) Wᵀ + b for a scale a sample: x (B, N, E), scale (B, 1, E), weight (D, E) -> (B, N, D).

    Where there are more tokens than channels the scale goes into the weight, which is smaller than x.
    """
    if torch.compiler.is_compiling() or x.shape[1] < 2 * weight.shape[0]:  # a graph should not depend on the length
        return F.linear(x * scale, weight, bias)
    y = x @ (scale.mT * weight.t())
    return y if bias is None else y + bias


@cache
def keep_memory() -> None:
    """Let the allocator keep what is freed, from the first call of a process on.

    One such as glibc's maps every large piece anew, and the system clears it page by page, which takes up to a fifth of
    a training step; once a larger piece has been freed it keeps those up to its size, 32 MiB at most, and twice as much
    in all. So a piece of that size is taken and freed, untouched.
    """
    torch.UntypedStorage(31 << 20)
