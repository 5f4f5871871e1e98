"""Passes tensors to the C kernels as addresses, strides and sizes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

from polymix.ops.shared.blocks import fast_types
from polymix.ops.shared.tensors import Linear

KINDS = (
    "identity",
    "gelu",
    "relu",
    "clamped_leaky_relu",
    "sigmoid",
    "hardsigmoid",
)  # ordered as in functions.h


@overload
def dense(x: Tensor) -> Tensor: ...
@overload
def dense(x: None) -> None: ...
def dense(x: Tensor | None) -> Tensor | None:
    """Return x with contiguous channels, copied only if necessary."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


class Sizes(ctypes.Structure):
    """The struct Sizes of blocks.h."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ("batch", "tokens", "dim", "width", "out", "kind", "degree", "heads", "bf16", "pairs", "threads")
    )


@overload
def full(x: Tensor) -> Tensor: ...
@overload
def full(x: None) -> None: ...
def full(x: Tensor | None) -> Tensor | None:
    """Return x as contiguous float32."""
    return None if x is None else x.float().contiguous()


def as_read(linear: Linear, pairs: bool) -> Linear:
    """A map (out, in) as the kernels take it: contiguous, in float32; with `pairs`, the weight stays bfloat16."""
    weight, bias = linear
    return (weight.contiguous() if pairs else full(weight)), full(bias)


def in_pairs(x: Tensor, *weights: Tensor | None) -> bool:
    """Whether to multiply tokens x and these weights in bfloat16: they are, and this processor is faster with them."""
    halves = x.dtype == torch.bfloat16 and all(w is None or w.dtype == torch.bfloat16 for w in weights)
    return halves and torch.bfloat16 in fast_types()


def sizes_of(
    x: Tensor, width: int, p: Tensor | None = None, *, out: int = 0, activation: str = "identity", degree: int = 0,
    heads: int = 1, pairs: bool = False,
) -> Sizes:  # fmt: skip
    """The sizes of a call: x (B, N, D), the inner width, the heads, those of p (heads, N) if given, and `in_pairs`."""
    heads, bf16 = heads if p is None else p.shape[0], int(x.dtype == torch.bfloat16)
    threads = torch.get_num_threads()
    return Sizes(*x.shape, width, out, KINDS.index(activation), degree, heads, bf16, int(pairs), threads)


def hidden(mask: Tensor | None) -> Tensor | None:
    """Return a mask as the kernels take it, contiguous."""
    return None if mask is None else mask.contiguous()


def room_like(x: Tensor) -> Tensor:
    """Allocate a contiguous gradient of x."""
    return x.new_empty(x.shape)


Needs = Sequence[bool]  # for each argument that has gradients, in order: whether anybody asks for its gradient


def rooms_like(arguments: Sequence[Tensor | None], needs: Needs) -> list[Tensor | None]:
    """Allocate the gradients that are needed, that of the tokens, which come first, in their dtype and the others in
    float32; None for gradients that are not needed, for which the kernels do no work.
    """
    return [None if x is None or not needed else x.new_empty(x.shape, dtype=torch.float32 if i else x.dtype)
            for i, (x, needed) in enumerate(zip(arguments, needs, strict=True))]  # fmt: skip
