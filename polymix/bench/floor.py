"""The floor of a mixer: its own dense products and convolutions, run bare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.structured.cost import Cost, Op


def floor(cost: Cost, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Callable[[], None]:
    """A call that does every op of `cost` once, on random operands, and nothing else."""
    calls = [_bare(op, {"device": device, "dtype": dtype}) for op in cost.ops]

    def run() -> None:
        with torch.inference_mode():
            for call in calls:
                call()

    return run


def _bare(op: Op, kw: dict[str, Any]) -> Callable[[], Tensor]:
    if op.kind == "linear":
        rows, inside, outside, groups = op.shape
        if groups == 1:
            x, weight = torch.randn(rows, inside, **kw), torch.randn(outside, inside, **kw)
            return lambda: F.linear(x, weight)
        blocks = (
            torch.randn(groups, rows, inside // groups, **kw),
            torch.randn(groups, inside // groups, outside // groups, **kw),
        )
        return lambda: torch.bmm(*blocks)
    if op.kind == "matmul":
        batch, m, k, n = op.shape
        left, right = torch.randn(batch, m, k, **kw), torch.randn(batch, k, n, **kw)
        return lambda: torch.bmm(left, right)
    if op.kind == "attention":
        heads, m, n, d = op.shape
        q, k_, v = (torch.randn(1, heads, size, d, **kw) for size in (m, n, n))
        return lambda: F.scaled_dot_product_attention(q, k_, v)
    if op.kind == "fft":
        rows, length = op.shape
        signal = torch.randn(rows, length, device=kw["device"])  # in float32 at least, as the mixers transform
        return lambda: torch.fft.rfft(signal)
    if op.kind == "elementwise":
        x = torch.randn(*op.shape, **kw)
        return lambda: x * x
    grid, kernel = op.shape, op.kernel
    if len(grid) == 1:
        grid, kernel = (1, *grid), (1, *kernel)
    image = torch.randn(1, *grid, op.dim, **kw).movedim(-1, 1)  # tokens first, as a mixer holds them
    weight = torch.randn(op.dim, 1, *kernel, **kw)
    convolve = F.conv2d if len(grid) == 2 else F.conv3d
    # An even kernel stands for a causal one: padding="same" then needs a copy, which is not the floor's to pay.
    padding = tuple(k // 2 for k in kernel)
    return lambda: convolve(image, weight, padding=padding, groups=op.dim)
