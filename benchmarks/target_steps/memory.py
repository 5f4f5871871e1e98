"""Peak memory of a forward, and the cost of a step after a million tokens."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from polymix.measure import interleaved, peak_memory
from target_steps.common import DIM, LENGTH, MIXERS, Row, mixer, tokens


@torch.inference_mode()
def memory(_: argparse.Namespace) -> Iterator[Row]:
    """The peak beyond input, output and weights, in MiB."""
    n = 16384
    x = tokens(n)
    for name in MIXERS:
        module = mixer(name, n)
        peak = peak_memory(partial(module, x)) - x.nbytes
        largest = max(_largest(op) for op in module.cost(n).ops) * 4
        limit = 2 * n * DIM * 4 * int(name[-1]) if name.startswith("padre") else largest
        yield Row("memory", f"{name}, peak of a forward, N = {n:,}, MiB", peak / 2**20, "≤", limit / 2**20)


def _largest(op: Any) -> int:
    """The number of elements in an op's largest output."""
    if op.kind == "linear":
        return op.shape[0] * op.shape[2]
    if op.kind == "matmul":
        batch, m, k, n = op.shape
        return batch * max(m * k, k * n, m * n)
    return math.prod(op.shape) * op.dim


@torch.inference_mode()
def decoding(_: argparse.Namespace) -> Iterator[Row]:
    """A step after a million tokens over one after a thousand: time, and size of the state."""
    for name, options in (("pom", {}), ("qt", {}), ("padre-2", {"causal": True, "grid": None})):
        module = mixer(name, LENGTH, **options)
        states: dict[int, Any] = {}
        for count in (1_000, 1_000_000):
            state = None
            for start in range(0, count, 20_000):
                _, state = module.prefill(tokens(min(20_000, count - start)), state)
            states[count] = state
        token = torch.randn(1, DIM)
        calls = {count: partial(module.step, token, state) for count, state in states.items()}
        times = interleaved(calls, seconds=2)
        sizes = [sum(part.nbytes for part in flat(state)) for state in states.values()]
        detail = f"{1e6 * times[1_000].median:.0f} and {1e6 * times[1_000_000].median:.0f} µs; state {sizes} bytes"
        ratio = times[1_000_000].median / times[1_000].median
        yield Row("decoding", f"{name}, step after 1,000,000 / after 1,000 tokens", ratio, "≤", 1.05, detail)
        yield Row("decoding", f"{name}, state after 1,000,000 / after 1,000 tokens", sizes[1] / sizes[0], "≤", 1.0)


def flat(state: Any) -> list[torch.Tensor]:
    return [state] if isinstance(state, torch.Tensor) else [tensor for part in state for tensor in flat(part)]
