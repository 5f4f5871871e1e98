"""Tensors as the kernels in C take them: addresses, strides and sizes."""

from __future__ import annotations

import ctypes
from typing import overload

import torch
from torch import Tensor

KINDS = ("identity", "gelu", "relu", "clamped_leaky_relu", "sigmoid", "hardsigmoid")  # as in functions.h


class Tokens(ctypes.Structure):
    """An array (batch, tokens, channels): where it lies, its strides in elements; the channels side by side."""

    _fields_ = (("data", ctypes.c_void_p), ("batch", ctypes.c_int64), ("token", ctypes.c_int64))


def tokens(x: Tensor | None) -> Tokens | None:
    """x (B, N, D) as C takes it; its last stride must be 1."""
    return None if x is None else Tokens(x.data_ptr(), x.stride(0), x.stride(1))


@overload
def dense(x: Tensor) -> Tensor: ...
@overload
def dense(x: None) -> None: ...
def dense(x: Tensor | None) -> Tensor | None:
    """x with its channels side by side, copied only where they are not."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


class Sizes(ctypes.Structure):
    """As in pooled_linear.c."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ("batch", "tokens", "dim", "width", "out", "kind", "degree", "heads", "bf16", "threads")
    )


class Linear(ctypes.Structure):
    """As in product.h."""

    _fields_ = (("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p), ("out", ctypes.c_int64), ("in", ctypes.c_int64))


@overload
def full(x: Tensor) -> Tensor: ...
@overload
def full(x: None) -> None: ...
def full(x: Tensor | None) -> Tensor | None:
    """x in float32, its numbers side by side."""
    return None if x is None else x.float().contiguous()


def linear_of(weight: Tensor, bias: Tensor | None) -> Linear:
    """Of what `full` returned; the tensors must live as long."""
    return Linear(weight.data_ptr(), None if bias is None else bias.data_ptr(), *weight.shape)


def sizes_of(
    x: Tensor, width: int, p: Tensor | None = None, *, out: int = 0, activation: str = "identity", degree: int = 0
) -> Sizes:
    heads, bf16 = 1 if p is None else p.shape[0], int(x.dtype == torch.bfloat16)
    return Sizes(*x.shape, width, out, KINDS.index(activation), degree, heads, bf16, torch.get_num_threads())


def hidden(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.contiguous()


def room_like(x: Tensor) -> Tensor:
    """Memory for the gradient of x, its channels side by side."""
    return x.new_empty(x.shape)
