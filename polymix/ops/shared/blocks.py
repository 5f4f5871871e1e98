"""What the blocked forms share: the blocks, the type they compute in, products into memory that is there already.

Two things cost most beside the products on a CPU: intermediates that leave the cache between one op and the next, and
fresh memory, whose pages the system clears first. So a block is small, and its buffers serve every block.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from polymix.ops.shared.tensors import Linear, accumulator, cast

KEPT = 32 << 20  # bytes: no allocator keeps larger pieces, and clearing their pages takes as long as a product
HUGE, ADVICE = 2 << 20, 14  # bytes of a large page, and Linux's MADV_HUGEPAGE
ROWS = 2048  # tokens a block: fewer, and the products themselves get slower


@cache
def fast_types() -> frozenset[torch.dtype]:
    """The types in which this CPU multiplies at full speed; others are computed in float32, which is more exact too."""
    native = {torch.float32, torch.float64}
    if torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported():
        native.add(torch.bfloat16)
    return frozenset(native)


def slower_in_float32(x: Tensor) -> str | None:
    """Why "auto" should not take a kernel that multiplies in float32 for x on this processor, or None."""
    fast = x.dtype == torch.bfloat16 and x.dtype in fast_types()
    return "this processor multiplies bfloat16 itself" if fast else None


def computed_in(x: Tensor) -> torch.dtype:
    """The type in which a blocked form of x computes its products."""
    return x.dtype if x.dtype in fast_types() else torch.float32


class Block(NamedTuple):
    """`number` whole samples, or `length` tokens of one."""

    samples: slice
    tokens: slice
    number: int
    length: int

    def of(self, x: Tensor) -> Tensor:
        """Its part of x (B, N, …)."""
        return x[self.samples, self.tokens]

    def rows(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Its tokens of x (B, N, D), one a row."""
        return self.of(x).flatten(0, 1).to(dtype)

    def split(self, rows: Tensor) -> Tensor:
        """Rows back as (samples, tokens, …)."""
        return rows.unflatten(0, (self.number, self.length))

    def hide(self, rows: Tensor, mask: Tensor | None) -> Tensor:
        """Zeros, in place, in the rows of padding; mask (B, N)."""
        return rows if mask is None else rows.masked_fill_(~self.of(mask).reshape(-1, 1), 0.0)

    def add_sums(self, total: Tensor, rows: Tensor) -> None:
        """total (B, E) += Σ over the tokens of each sample."""
        total[self.samples] += self.split(rows).sum(1, dtype=total.dtype)


def blocks(x: Tensor) -> Iterator[Block]:
    """The tokens of x (B, N, D) in blocks of about ROWS, all of one size but the last."""
    batch, n = x.shape[:2]
    samples, parts = max(1, ROWS // n), -(-n // ROWS)
    rows = -(-n // parts)
    for sample in range(0, batch, samples):
        count = min(samples, batch - sample)
        for first in range(0, n, rows):
            length = min(rows, n - first)
            yield Block(slice(sample, sample + count), slice(first, first + length), count, length)


class Product:
    """x W + b for block after block, in one buffer: what a call returns is overwritten by the next."""

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
        return out if self.bias is None else out.add_(self.bias)  # addmm would first spread the bias over memory

    def into(self, y: Tensor, block: Block, rows: Tensor) -> None:
        """Write the product of the block's rows to its place in y (B, N, out)."""
        place = block.of(y)
        if y.dtype == self.dtype:
            self(rows, place.view(-1, self.width))
        else:
            place.copy_(block.split(self(rows)))


class SampleProduct:
    """x M_s + b with a matrix for each sample, (B, in, out): what was pooled goes into a weight, not to every token."""

    def __init__(self, matrix: Tensor, bias: Tensor | None) -> None:
        self.matrix, self.bias = matrix, None if bias is None else bias.to(matrix.dtype)

    def into(self, y: Tensor, block: Block, tokens: Tensor) -> None:
        """Write the product of tokens (samples, tokens, in) to the block's place in y (B, N, out)."""
        place, matrix = block.of(y), self.matrix[block.samples]
        if y.dtype == matrix.dtype:
            torch.bmm(tokens, matrix, out=place)
            if self.bias is not None:
                place.add_(self.bias)
        else:
            product = torch.bmm(tokens, matrix)
            place.copy_(product if self.bias is None else product.add_(self.bias))


def output(x: Tensor, width: int | None = None) -> Tensor:
    """x.new_empty(B, N, width), x's own width where that is None.

    Where no allocator keeps so large a piece the system is asked for pages of 2 MiB, which it clears in a fraction of
    the time that small ones take.
    """
    y = x.new_empty(*x.shape[:2], x.shape[2] if width is None else width)
    if sys.platform == "linux" and y.nbytes > KEPT:
        first, last = -(-y.data_ptr() // HUGE), (y.data_ptr() + y.nbytes) // HUGE  # the whole pages within
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first * HUGE), ctypes.c_size_t((last - first) * HUGE), ADVICE)
    return y


def zeros(x: Tensor, *shape: int, dtype: torch.dtype) -> Tensor:
    """Sums to come: float32 at least."""
    return x.new_zeros(shape, dtype=accumulator(dtype))
