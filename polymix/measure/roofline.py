"""The machine's ceilings, measured: FLOP/s of dense products and bytes/s of a copy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
import torch.nn.functional as F

from polymix.measure.timing import interleaved
from polymix.results import Count

_SIZES = (512, 1024, 2048)  # of square products
_COPY_BYTES = 256 << 20  # bytes: larger than every cache


@dataclass(frozen=True)
class Ceiling:
    """FLOP/s of dense products in one type, and bytes/s of a copy (reads plus writes), with this many threads."""

    dtype: str
    threads: Count
    flops_per_second: Annotated[float, "dense products, best of a few sizes"]
    bytes_per_second: Annotated[float, "a copy out of every cache, read and written"]

    def roof(self, intensity: float) -> float:
        """The most FLOP/s that code with `intensity` FLOPs per byte can reach."""
        return min(self.flops_per_second, intensity * self.bytes_per_second)


@torch.inference_mode()
def ceiling(dtype: str, threads: int, device: str, seconds: float) -> Ceiling:
    """Measure both: the best of a few sizes of product, and of the rounds of a copy, about `seconds` each."""
    torch.set_num_threads(threads)
    kw = {"device": device, "dtype": getattr(torch, dtype)}
    squares = {n: (torch.randn(n, n, **kw), torch.randn(n, n, **kw)) for n in _SIZES}
    products = interleaved({n: partial(F.linear, *ab) for n, ab in squares.items()}, seconds=seconds, device=device)
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    copies = interleaved({"copy": lambda: target.copy_(source)}, seconds=seconds, device=device)
    return Ceiling(
        dtype,
        threads,
        max(2 * n**3 / min(t.runs) for n, t in products.items()),
        2 * _COPY_BYTES / min(copies["copy"].runs),
    )
