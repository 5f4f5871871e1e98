"""The floor of a mixer: the time of its own products and convolutions, run bare."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from polymix.measure.timing import Call, once
from polymix.ops.native import library
from polymix.ops.padre import native
from polymix.structured.cost import Cost, Op

_MAX_SECONDS = 0.5  # seconds of a floor beyond which other numbers of threads are not tried
_MIN_C_WORK = 1 << 20  # multiply-adds of a convolution from which the C kernel is tried


def floor(cost: Cost, *, batch: int = 1, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Callable[[], None]:
    """A call that runs every op of `cost` once, for `batch` sequences of random numbers, and nothing else.

    On a CPU each op is run in the fastest of the ways at hand: into memory that is there already, whole or in blocks
    of rows, by PyTorch or by the C kernel, and in float32 where that is faster than a half-precision type. The call
    uses a single thread where the threads that are set make it slower, as they do for small ops and on busy cores.
    """
    kinds = [dtype] if dtype == torch.float32 or device != "cpu" else [dtype, torch.float32]
    place = [{"device": device, "dtype": kind} for kind in kinds]
    if device != "cpu":
        calls = [_ways(op, batch, place[0])[0] for op in cost.ops]
        threads = torch.get_num_threads()
    else:
        threads, calls, seconds = _plan(cost, batch, place, torch.get_num_threads())
        if threads > 1 and seconds < _MAX_SECONDS:
            threads, calls, _ = min((threads, calls, seconds), _plan(cost, batch, place, 1), key=lambda plan: plan[2])

    def run() -> None:
        with torch.inference_mode(), _using(threads):
            for call in calls:
                call()

    return run


def _plan(cost: Cost, batch: int, place: list[dict[str, Any]], threads: int) -> tuple[int, list[Call], float]:
    """The fastest way to run each op with so many threads, and the seconds of all of them."""
    calls, seconds = [], 0.0
    with torch.inference_mode(), _using(threads):
        for op in cost.ops:
            timed = [(_least(way), way) for kind in place for way in _ways(op, batch, kind)]
            least, way = min(timed, key=lambda pair: pair[0])
            calls.append(way)
            seconds += least
    return threads, calls, seconds


def _least(call: Call) -> float:
    """The seconds of the fastest of a few runs."""
    first = once(call, "cpu")
    return first if first > 0.1 else min(once(call, "cpu") for _ in range(3))


@contextmanager
def _using(threads: int) -> Iterator[None]:
    """Run with so many CPU threads."""
    before = torch.get_num_threads()
    if threads == before:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def weights(op: Op) -> int:
    """How many of `op.elements` are weights. They move once, however large the batch is."""
    if op.kind == "linear":
        _, inside, outside, groups = op.shape
        return inside * outside // groups
    return math.prod(op.kernel) * op.dim


def bytes_moved(cost: Cost, batch: int) -> int:
    """`cost.bytes` for a batch."""
    return cost.itemsize * sum(batch * op.elements - (batch - 1) * weights(op) for op in cost.ops)


def _ways(op: Op, batch: int, kw: dict[str, Any]) -> list[Call]:
    """Calls that each do the work of the op. The first is PyTorch's own."""
    if op.kind == "linear":
        rows, inside, outside, groups = op.shape
        rows *= batch
        if groups > 1:
            return _batched(groups, rows, inside // groups, outside // groups, kw)
        x, weight, out = (
            torch.randn(rows, inside, **kw),
            torch.randn(outside, inside, **kw),
            torch.empty(rows, outside, **kw),
        )
        ways: list[Call] = [lambda: F.linear(x, weight), lambda: torch.mm(x, weight.t(), out=out)]
        if rows > _ROWS:
            blocks = [(x[i : i + _ROWS], out[: min(_ROWS, rows - i)]) for i in range(0, rows, _ROWS)]
            ways.append(lambda: [torch.mm(part, weight.t(), out=place) for part, place in blocks])
        return ways
    if op.kind == "matmul":
        count, m, k, n = op.shape
        return _batched(batch * count, m, k, n, kw)
    if op.kind == "attention":
        heads, m, n, d = op.shape
        q, k_, v = (torch.randn(batch, heads, size, d, **kw) for size in (m, n, n))
        return [lambda: F.scaled_dot_product_attention(q, k_, v)]
    if op.kind == "fft":
        rows, length = op.shape
        signal = torch.randn(batch * rows, length, device=kw["device"])  # float32 at least, as in the mixers
        return [lambda: torch.fft.rfft(signal)]
    if op.kind == "elementwise":
        x, product = torch.randn(batch, *op.shape, **kw), torch.empty(batch, *op.shape, **kw)
        return [lambda: x * x, lambda: torch.mul(x, x, out=product)]
    return _convolutions(op, batch, kw)


_ROWS = 512  # in a block of a product: its output stays in a cache


def _batched(count: int, m: int, k: int, n: int, kw: dict[str, Any]) -> list[Call]:
    left, right, out = (torch.randn(count, *size, **kw) for size in ((m, k), (k, n), (m, n)))
    return [lambda: torch.bmm(left, right), lambda: torch.bmm(left, right, out=out)]


def _convolutions(op: Op, batch: int, kw: dict[str, Any]) -> list[Call]:
    grid, kernel = op.shape, op.kernel
    if len(grid) == 1:
        grid, kernel = (1, *grid), (1, *kernel)
    tokens = torch.randn(batch, *grid, op.dim, **kw)
    image = tokens.movedim(-1, 1)  # channels last in memory, as a mixer has them
    weight = torch.randn(op.dim, 1, *kernel, **kw)
    convolve = F.conv2d if len(grid) == 2 else F.conv3d
    # An even kernel stands for a causal one, for which padding="same" would add a copy to the floor.
    padding = tuple(k // 2 for k in kernel)
    ways: list[Call] = [lambda: convolve(image, weight, padding=padding, groups=op.dim)]
    ours = kw["device"] == "cpu" and kw["dtype"] in (torch.float32, torch.bfloat16) and library.why_not() is None
    if ours and len(grid) == 2 and all(k % 2 for k in kernel) and op.multiply_adds >= _MIN_C_WORK:
        flat = tokens.reshape(batch, math.prod(grid), op.dim)
        out = torch.empty_like(flat)
        ways.append(lambda: native.step(flat, weight, None, None, grid, out=out))
    return ways
