"""What a call of a mixer costs in Python: the time before its first kernel, and the whole call on few tokens.

    python benchmarks/overhead.py [benchmarks/results/overhead.json] [--tokens 196] [--clock processor --threads 1]

The first column is the median time from the call to the first kernel (a product, a softmax, or C), warm, without
gradients: argument checks and the choice of the implementation. The second is the whole call with 16 tokens, most of it
overhead.
"""

import argparse
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from saving import save
from torch import nn

from polymix.measure import manifest, repeated
from polymix.measure.clock import CLOCKS, Clock, check_clock
from polymix.mixers.spec import parse_mixer
from polymix.ops.native import library

MIXERS = ("padre", "pom", "qt", "poly_sa", "poly_nl", "softmax")
FIRST = [
    (F, "linear"),
    (torch, "addmm"),
    (torch, "mm"),
    (torch, "matmul"),
    (torch, "bmm"),
    (torch, "baddbmm"),
    (torch.Tensor, "softmax"),
]


class Reached(Exception):
    """The first kernel of a call."""


class Stopping:
    """Stands in for the library of C kernels."""

    def __getattr__(self, name: str) -> Any:
        return _stop


def _stop(*_: Any, **__: Any) -> None:
    raise Reached


@contextmanager
def stopped_at_the_first_kernel() -> Iterator[None]:
    """Inside, the first product or C kernel raises Reached."""
    originals = [(owner, name, getattr(owner, name)) for owner, name in FIRST]
    load = library._library
    try:
        for owner, name, _ in originals:
            setattr(owner, name, _stop)
        library._library = Stopping
        yield
    finally:
        for owner, name, function in originals:
            setattr(owner, name, function)
        library._library = load


def median_us(call: Any, repeats: int, clock: Clock) -> float:
    """The lowest of 20 medians: the median of a stretch in which nothing else had the processor."""
    count = max(1, repeats // 20)
    return 1e6 * min(repeated(call, least=count, most=count, clock=clock).median for _ in range(20))


def until_the_first_kernel(mixer: nn.Module, x: torch.Tensor, repeats: int, clock: Clock) -> float:
    """The median time from the call to the first kernel, in µs."""
    with torch.no_grad():
        for _ in range(3):
            mixer(x)

    def call() -> None:
        try:
            with torch.no_grad():
                mixer(x)
        except Reached:
            return
        raise AssertionError("no kernel ran")

    with stopped_at_the_first_kernel():
        return median_us(call, repeats, clock)


def built(name: str, tokens: int, dim: int) -> nn.Module:
    """A mixer on a square grid, or on a line of tokens."""
    side = math.isqrt(tokens)
    grid = (side, side) if side**2 == tokens else (tokens,)
    return parse_mixer(name)[1].for_grid(grid).build(dim).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--tokens", type=int, default=196)
    parser.add_argument("--dim", type=int, default=192)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2000)
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="processor: beside other work, with --threads 1"
    )
    options = parser.parse_args()
    check_clock(options.clock, threads=options.threads)
    torch.set_num_threads(options.threads)
    rows = []
    print(f"{'':12}{'first kernel':>14}{'16 tokens':>12}")
    for name in MIXERS:
        mixer = built(name, options.tokens, options.dim)
        x = torch.randn(1, options.tokens, options.dim)
        first = until_the_first_kernel(mixer, x, options.repeats, options.clock)
        mixer_of_few = built(name, 16, options.dim)
        few = torch.randn(1, 16, options.dim)
        with torch.no_grad():
            whole = median_us(lambda: mixer_of_few(few), options.repeats, options.clock)  # noqa: B023
        rows.append(
            {
                "mixer": name,
                "tokens": options.tokens,
                "first_kernel_us": first,
                "call_16_tokens_us": whole,
                "clock": options.clock,
            }
        )
        print(f"{name:12}{first:11.1f} µs{whole:9.1f} µs", flush=True)
    if options.out:
        save({"machine": manifest("cpu", options.threads), "rows": rows}, options.out)


if __name__ == "__main__":
    main()
