"""Tensor helpers of all ops: accumulator dtypes, counts of real tokens, autocast, linear maps, memory."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Linear = tuple[Tensor, Tensor | None]  # a weight (out, in), or block-diagonal (G, out / G, in / G), and a bias


class Counts(NamedTuple):
    """The shape of a part of a recurrent state that counts tokens, in int64."""

    shape: tuple[int, ...]


Shape = tuple[int, ...] | Counts  # of a part of a state; what does not count has the dtype of `accumulator`


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over tokens are kept: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def count_real(x: Tensor, mask: Tensor | None, ndim: int = 2) -> Tensor | int:
    """The number of real tokens of each row of x (B, N, …), at least 1: N, or a tensor (B, 1, …) of `ndim` axes."""
    return x.shape[1] if mask is None else _per_row(mask.sum(1).clamp_min(1), ndim)


def without_empty(x: Tensor, mask: Tensor | None) -> Tensor:
    """Zero the rows of x (B, …) that have no real token in mask (B, N)."""
    return x if mask is None else x.masked_fill(~_per_row(mask.any(1), x.ndim), 0.0)


def _per_row(values: Tensor, ndim: int) -> Tensor:
    """Reshape values (B,) to `ndim` axes, (B, 1, …)."""
    return values.view(-1, *(1,) * (ndim - 1))


def forward_mode() -> bool:
    """Whether forward-mode derivatives are being taken: torch.func.jvp, jacfwd, hessian, or dual tensors.

    Fused kernels and operators of our own have no forward-mode formula: plain PyTorch has to run instead.
    """
    return not torch.compiler.is_compiling() and torch.autograd.forward_ad._current_level >= 0


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast computes in on this device; None if it is off or not available (meta)."""
    if not torch.amp.is_autocast_available(device.type) or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which products keep the dtype of their operands."""
    return torch.autocast(device.type, enabled=False) if autocast_dtype(device) else nullcontext()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply a linear map (out, in), or a block-diagonal one (G, out / G, in / G), to x (B, N, in): (B, N, out)."""
    if weight.ndim == 2:
        return F.linear(x, weight, bias)
    blocks = x.unflatten(-1, (weight.shape[0], -1)).transpose(-2, -3)  # (B, G, N, in / G)
    y = (blocks @ weight.mT).transpose(-2, -3).flatten(-2)
    return y if bias is None else y + bias.to(y.dtype)


def share(linear: Linear, first: int, last: int) -> Linear:
    """The part of a linear map that computes the outputs first … last - 1."""
    weight, bias = linear
    return weight[first:last], None if bias is None else bias[first:last]


def project(qkv: Linear, x: Tensor, context: Tensor, values: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Q from x, K from the context and V from `values`, or without them from the context: (B, ·, D) each.

    qkv: W_q, W_k and W_v in one map (3D, D). Maps that read the same tokens share a product. Cost: 3 N D².
    """
    size = qkv[0].shape[0] // 3
    if values is not None and values is not context:
        v = F.linear(values, *share(qkv, 2 * size, 3 * size))
        if context is x:
            q, k = F.linear(x, *share(qkv, 0, 2 * size)).chunk(2, dim=-1)
        else:
            q, k = F.linear(x, *share(qkv, 0, size)), F.linear(context, *share(qkv, size, 2 * size))
        return q, k, v
    if context is x:
        q, k, v = F.linear(x, *qkv).chunk(3, dim=-1)
        return q, k, v
    k, v = F.linear(context, *share(qkv, size, 3 * size)).chunk(2, dim=-1)
    return F.linear(x, *share(qkv, 0, size)), k, v


def cast(linear: Linear, dtype: torch.dtype) -> Linear:
    """Convert a linear map to another dtype."""
    weight, bias = linear
    if weight.dtype == dtype and (bias is None or bias.dtype == dtype):
        return linear
    return weight.to(dtype), None if bias is None else bias.to(dtype)


def scaled_linear(x: Tensor, scale: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(x ⊙ scale) Wᵀ + b with one scale per sample: x (B, N, E), scale (B, 1, E), weight (D, E) -> (B, N, D).

    If there are many more tokens than channels, the weight is scaled instead of x, because it is smaller.
    """
    # A traced graph must not depend on the number of tokens.
    if torch.compiler.is_compiling() or x.shape[1] < 2 * weight.shape[0]:
        return F.linear(x * scale, weight, bias)
    y = x @ (scale.mT * weight.t())
    return y if bias is None else y + bias.to(y.dtype)


@cache
def keep_memory() -> None:
    """Make the C allocator keep freed memory instead of returning it to the system. Has an effect once per process.

    glibc's allocator maps every large piece anew, and the system clears it page by page, which takes up to a fifth of
    a training step. After a large piece has been freed, it keeps pieces of up to that size (at most 32 MiB), and
    twice as much in total. So this allocates a piece of 31 MiB, does not touch it, and frees it.
    """
    torch.UntypedStorage(31 << 20)
