"""What a mixer costs: the list of its products and convolutions, to be counted or run by themselves."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class Op:
    """One dense product or convolution over a sequence.

    linear     (rows, in, out, groups)     rows × in by in × out, in `groups` blocks
    depthwise  (*grid) with kernel, dim    a kernel per channel over a grid, zero padding included
    matmul     (batch, m, k, n)            batched product of two activations
    attention  (heads, m, n, d)            softmax attention of m queries and n keys: two products of m × n × d
    fft        (rows, length)              a real transform of each row, 2.5 length log₂ length operations
    elementwise (count,)                   multiply-adds that are not products: diagonals, bands, running sums

    PyTorch's own FLOP counter sees only the first four.
    """

    kind: Literal["linear", "depthwise", "matmul", "attention", "fft", "elementwise"]
    shape: tuple[int, ...]
    kernel: tuple[int, ...] = ()
    dim: int = 0

    @property
    def multiply_adds(self) -> int:
        if self.kind == "depthwise":
            return math.prod(self.shape) * math.prod(self.kernel) * self.dim
        if self.kind == "linear":
            rows, inside, outside, groups = self.shape
            return rows * inside * outside // groups
        if self.kind == "fft":
            rows, length = self.shape
            return math.ceil(rows * 1.25 * length * math.log2(max(length, 2)))
        return math.prod(self.shape) * (2 if self.kind == "attention" else 1)

    @property
    def elements(self) -> int:
        """Values read and written: inputs, weights and outputs, each once."""
        if self.kind == "depthwise":
            return (2 * math.prod(self.shape) + math.prod(self.kernel)) * self.dim
        if self.kind == "linear":
            rows, inside, outside, groups = self.shape
            return rows * (inside + outside) + inside * outside // groups
        if self.kind == "matmul":
            batch, m, k, n = self.shape
            return batch * (m * k + k * n + m * n)
        if self.kind == "fft":
            return 2 * math.prod(self.shape)
        if self.kind == "elementwise":
            return 3 * math.prod(self.shape)
        heads, m, n, d = self.shape
        return heads * 2 * (m + n) * d


@dataclass(frozen=True)
class Cost:
    """The cost of a mixer for one sequence of one length."""

    parameters: int
    ops: tuple[Op, ...]
    itemsize: int = 4

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of the products and convolutions. Hadamard products add O(N D)."""
        return sum(op.multiply_adds for op in self.ops)

    @property
    def flops(self) -> int:
        """2 × multiply_adds: what `torch.utils.flop_counter` counts, plus the ops that it does not see."""
        return 2 * self.multiply_adds

    @property
    def counted_flops(self) -> int:
        """The part of `flops` that `torch.utils.flop_counter` sees: all but transforms and elementwise ops."""
        return 2 * sum(op.multiply_adds for op in self.ops if op.kind not in ("fft", "elementwise"))

    @property
    def bytes(self) -> int:
        """Bytes moved if every input, weight and output of each op moves once."""
        return self.itemsize * sum(op.elements for op in self.ops)


def cost_of(module: torch.nn.Module, ops: Iterable[Op], dtype: torch.dtype) -> Cost:
    return Cost(sum(p.numel() for p in module.parameters()), tuple(ops), dtype.itemsize)


def linear_op(rows: int, layer: torch.nn.Module) -> Op:
    """The product of a linear or block-diagonal layer with `rows` tokens."""
    inside, outside = layer.in_features, layer.out_features
    blocks = getattr(layer, "blocks", 1)
    assert isinstance(inside, int) and isinstance(outside, int) and isinstance(blocks, int)
    return Op("linear", (rows, inside, outside, blocks))
