"""Blocks of tokens for the blocked implementations, and matrix products that write into existing memory.

Besides the products themselves, two things are expensive on a CPU: intermediates that leave the cache between one
operation and the next, and fresh memory, whose pages the system has to clear. So blocks are small, and all blocks
share the same buffers.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from polymix.ops.native import library
from polymix.ops.shared.tensors import Linear, accumulator, autocast_dtype, cast

# Larger pieces go back to the system, and clearing new pages costs as much as a product.
MAX_KEPT_BYTES = 32 << 20
HUGE, ADVICE = 2 << 20, 14  # the size of a huge page in bytes, and Linux's MADV_HUGEPAGE
ROWS = 2048  # tokens in a block; with fewer, the products themselves get slower
# Asked on import, since Dynamo traces into neither question.
AMX = torch.cpu._is_amx_tile_supported()
AVX512_BF16 = torch.cpu._is_avx512_bf16_supported()


def fast_types() -> tuple[torch.dtype, ...]:
    """The dtypes that this CPU multiplies at full speed. Others are computed in float32, which is also more exact."""
    return (torch.float32, torch.float64, *([torch.bfloat16] if AMX or AVX512_BF16 else []))


MIN_CHUNK = 32  # a causal C kernel takes the tokens of each sequence apart


def slower_in_order(x: Tensor) -> str | None:
    """`slower_than_pytorch` for the causal C kernels, which also need some tokens in each sequence.

    While a graph is traced, where they do not run, it must not depend on the number of tokens.
    """
    if not torch.compiler.is_compiling() and x.shape[1] < MIN_CHUNK:
        return f"is slower with fewer than {MIN_CHUNK} tokens in a sequence"
    return slower_than_pytorch(x)


def slower_than_pytorch(x: Tensor) -> str | None:
    """Why "auto" should skip the C kernels for x on this processor, or None if it should not."""
    dtype = autocast_dtype(x.device) or x.dtype
    if dtype != torch.bfloat16 or dtype not in fast_types() or library.multiplies_bf16():
        return None
    return "is slower here: these kernels lack the bfloat16 products of this processor"


def multiplies_by_avx512(x: Tensor) -> bool:
    """Whether products of x are those of AVX512_BF16."""
    return AVX512_BF16 and not AMX and (autocast_dtype(x.device) or x.dtype) == torch.bfloat16


def computed_in(x: Tensor) -> torch.dtype:
    """The dtype in which a blocked implementation computes its products for x."""
    return x.dtype if x.dtype in fast_types() else torch.float32


class Block(NamedTuple):
    """Either `number` whole samples, or `length` tokens of one sample."""

    samples: slice
    tokens: slice
    number: int
    length: int

    def of(self, x: Tensor) -> Tensor:
        """The block's part of x (B, N, …)."""
        return x[self.samples, self.tokens]

    def rows(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The block's tokens of x (B, N, D) as rows (tokens, D)."""
        return self.of(x).flatten(0, 1).to(dtype)

    def split(self, rows: Tensor) -> Tensor:
        """Reshape rows to (samples, tokens, …)."""
        return rows.unflatten(0, (self.number, self.length))

    def hide(self, rows: Tensor, mask: Tensor | None) -> Tensor:
        """Zero the rows of padding tokens in place; mask is (B, N), True for real tokens."""
        return rows if mask is None else rows.masked_fill_(~self.of(mask).reshape(-1, 1), 0.0)

    def add_sums(self, total: Tensor, rows: Tensor) -> None:
        """Add the sum of each sample's rows to total (B, E)."""
        total[self.samples] += self.split(rows).sum(1, dtype=total.dtype)


def blocks(x: Tensor) -> Iterator[Block]:
    """Split the tokens of x (B, N, D) into blocks of about ROWS tokens, all of the same size except the last."""
    batch, n = x.shape[:2]
    samples, parts = max(1, ROWS // n), -(-n // ROWS)
    rows = -(-n // parts)
    for sample in range(0, batch, samples):
        count = min(samples, batch - sample)
        for first in range(0, n, rows):
            length = min(rows, n - first)
            yield Block(slice(sample, sample + count), slice(first, first + length), count, length)


class Product:
    """Computes x W + b block by block in one buffer. A call overwrites the result of the call before it."""

    def __init__(self, linear: Linear, dtype: torch.dtype) -> None:
        weight, self.bias = cast(linear, dtype)
        self.weight = weight.t()
        self.dtype, self.width = dtype, weight.shape[0]
        self.buffer = weight.new_empty(0, self.width)

    def __call__(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """(rows, in) -> (rows, out)."""
        if out is None:
            if self.buffer.shape[0] < rows.shape[0]:
                self.buffer = self.buffer.new_empty(rows.shape[0], self.width)
            out = self.buffer[: rows.shape[0]]
        out = torch.mm(rows, self.weight, out=out)
        return out if self.bias is None else out.add_(self.bias)  # addmm would first copy the bias to every row

    def into(self, y: Tensor, block: Block, rows: Tensor) -> None:
        """Write the product of the block's rows to the block's part of y (B, N, out)."""
        place = block.of(y)
        if y.dtype == self.dtype:
            self(rows, place.view(-1, self.width))
        else:
            place.copy_(block.split(self(rows)))


class SampleProduct:
    """Computes x M_s + b with one matrix per sample, (B, in, out).

    Multiplying a pooled vector into the weight once per sample is cheaper than multiplying it with every token.
    """

    def __init__(self, matrix: Tensor, bias: Tensor | None) -> None:
        self.matrix, self.bias = matrix, None if bias is None else bias.to(matrix.dtype)

    def into(self, y: Tensor, block: Block, tokens: Tensor) -> None:
        """Write the product of tokens (samples, tokens, in) to the block's part of y (B, N, out)."""
        place, matrix = block.of(y), self.matrix[block.samples]
        if y.dtype == matrix.dtype:
            torch.bmm(tokens, matrix, out=place)
            if self.bias is not None:
                place.add_(self.bias)
        else:
            product = torch.bmm(tokens, matrix)
            place.copy_(product if self.bias is None else product.add_(self.bias))


def output(x: Tensor, width: int | None = None) -> Tensor:
    """Allocate an output (B, N, width) like x; the default width is that of x.

    Allocators do not keep pieces above MAX_KEPT_BYTES, so the system clears their pages on every call. For such
    pieces it is asked for pages of 2 MiB, which it clears in a fraction of the time.
    """
    y = x.new_empty(*x.shape[:2], x.shape[2] if width is None else width)
    if sys.platform == "linux" and y.nbytes > MAX_KEPT_BYTES:
        first, last = -(-y.data_ptr() // HUGE), (y.data_ptr() + y.nbytes) // HUGE  # whole pages only
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first * HUGE), ctypes.c_size_t((last - first) * HUGE), ADVICE)
    return y


def zeros(x: Tensor, *shape: int, dtype: torch.dtype) -> Tensor:
    """Allocate zeros for sums on the device of x, in float32 or wider."""
    return x.new_zeros(shape, dtype=accumulator(dtype))
