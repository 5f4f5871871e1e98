"""Step 2: what this card does at most, measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from gpu_steps.bench import Bench, Jobs, Row

PRODUCTS = {"float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def jobs(bench: Bench) -> Jobs:
    yield "copy", partial(_copy, bench)
    for name in PRODUCTS:
        yield f"product {name}", partial(_product, bench, name)


def _copy(bench: Bench) -> list[Row]:
    source = torch.zeros(bench.sizes.copy_bytes, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    runs = bench.clock({"copy": lambda: target.copy_(source)}, bench.sizes.seconds)["copy"]
    return [{"what": "copy", "bytes_per_second": 2 * bench.sizes.copy_bytes / runs.median}]


@contextmanager
def _tf32(on: bool) -> Iterator[None]:
    torch.backends.cuda.matmul.allow_tf32 = on
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def _product(bench: Bench, name: str) -> list[Row]:
    best = 0.0
    for n in bench.sizes.squares:
        a, b = (torch.randn(n, n, device=bench.device, dtype=PRODUCTS[name]) for _ in range(2))
        with _tf32(name == "tf32"):
            best = max(best, 2 * n**3 / bench.clock({n: partial(torch.matmul, a, b)}, bench.sizes.seconds)[n].median)
    return [{"what": name, "flops_per_second": best}]


def copied(bench: Bench) -> float:
    """Bytes/s, read and written."""
    return float(bench.rows("ceilings", what="copy")[0]["bytes_per_second"])


def multiplied(bench: Bench, name: str) -> float:
    """FLOP/s of dense products."""
    return float(bench.rows("ceilings", what=name)[0]["flops_per_second"])
