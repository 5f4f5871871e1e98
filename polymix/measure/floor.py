"""The floor of a mixer: the time of its own products and convolutions, run bare."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.measure.timing import Call, once
from polymix.structured.cost import Cost, Op


def floor(cost: Cost, *, batch: int = 1, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Callable[[], None]:
    """A call that runs every op of `cost` once, for `batch` sequences of random numbers, and nothing else.

    On a CPU an op may be faster in float32 than in a half-precision type. Then float32 is its floor.
    """
    types = [dtype] if dtype == torch.float32 or device != "cpu" else [dtype, torch.float32]
    calls = [_fastest([_bare(op, batch, {"device": device, "dtype": kind}) for kind in types]) for op in cost.ops]

    def run() -> None:
        with torch.inference_mode():
            for call in calls:
                call()

    return run


def _fastest(calls: list[Call]) -> Call:
    if len(calls) == 1:
        return calls[0]
    with torch.inference_mode():
        return min(calls, key=lambda call: min(once(call, "cpu") for _ in range(3)))


def weights(op: Op) -> int:
    """How many of `op.elements` are weights. They move once, however large the batch is."""
    if op.kind == "linear":
        _, inside, outside, groups = op.shape
        return inside * outside // groups
    return math.prod(op.kernel) * op.dim


def bytes_moved(cost: Cost, batch: int) -> int:
    """`cost.bytes` for a batch."""
    return cost.itemsize * sum(batch * op.elements - (batch - 1) * weights(op) for op in cost.ops)


def _bare(op: Op, batch: int, kw: dict[str, Any]) -> Callable[[], Tensor]:
    if op.kind == "linear":
        rows, inside, outside, groups = op.shape
        rows *= batch
        if groups == 1:
            x, weight = torch.randn(rows, inside, **kw), torch.randn(outside, inside, **kw)
            return lambda: F.linear(x, weight)
        blocks = (
            torch.randn(groups, rows, inside // groups, **kw),
            torch.randn(groups, inside // groups, outside // groups, **kw),
        )
        return lambda: torch.bmm(*blocks)
    if op.kind == "matmul":
        count, m, k, n = op.shape
        left, right = torch.randn(batch * count, m, k, **kw), torch.randn(batch * count, k, n, **kw)
        return lambda: torch.bmm(left, right)
    if op.kind == "attention":
        heads, m, n, d = op.shape
        q, k_, v = (torch.randn(batch, heads, size, d, **kw) for size in (m, n, n))
        return lambda: F.scaled_dot_product_attention(q, k_, v)
    if op.kind == "fft":
        rows, length = op.shape
        signal = torch.randn(batch * rows, length, device=kw["device"])  # float32 at least, as in the mixers
        return lambda: torch.fft.rfft(signal)
    if op.kind == "elementwise":
        x = torch.randn(batch, *op.shape, **kw)
        return lambda: x * x
    grid, kernel = op.shape, op.kernel
    if len(grid) == 1:
        grid, kernel = (1, *grid), (1, *kernel)
    image = torch.randn(batch, *grid, op.dim, **kw).movedim(-1, 1)  # channels last in memory, as a mixer has them
    weight = torch.randn(op.dim, 1, *kernel, **kw)
    convolve = F.conv2d if len(grid) == 2 else F.conv3d
    # An even kernel stands for a causal one, for which padding="same" would add a copy to the floor.
    padding = tuple(k // 2 for k in kernel)
    return lambda: convolve(image, weight, padding=padding, groups=op.dim)
