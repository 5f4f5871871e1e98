"""Where the time goes, and how near to a target anything could come that makes the same products."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from polymix.bench import floor, interleaved
from polymix.bench.measure import once
from target_steps.common import (
    DIM,
    LENGTH,
    MIXERS,
    PADRE_GOALS,
    POM_GOALS,
    SHAPES,
    TYPES,
    Row,
    mixer,
    step,
    tokens,
)

PASSES = {  # kinds of operators, by what they spend
    "products": (
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "mkldnn_convolution",
        "mkldnn_linear",
        "depthwise",
        "depthwise_weight",
    ),
    "functions": ("gelu", "sigmoid", "exp", "gelu_backward", "sigmoid_backward"),
}


def split(given: argparse.Namespace) -> Iterator[Row]:
    """What would be left of each time if every pass between its products and convolutions cost nothing."""
    yield from _forwards()
    for n, batch in SHAPES:
        for name in MIXERS:
            module = mixer(name, n).train()
            run, bare = step(module, tokens(n, batch=batch).requires_grad_()), floor(module.cost(n), batch=batch)
            yield _alone(f"{name}, step, its products alone / 3 floors, N = {n:,} × {batch}", run, bare, 3, 1.5)
    yield from _ratios()


@torch.inference_mode()
def _forwards() -> Iterator[Row]:
    for name in MIXERS:
        module, what = mixer(name, LENGTH), f"{name}, its products alone / floor, N = {LENGTH:,}"
        yield _alone(what, partial(module, tokens(LENGTH)), floor(module.cost(LENGTH)), 1, 1.15)


def _alone(what: str, run: Callable[[], Any], bare: Callable[[], Any], floors: int, target: float) -> Row:
    """The share of products and convolutions, as they run within, of the time over the floor."""
    times = interleaved({"run": run, "floor": bare}, seconds=1.5)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(10):
            run()
    spent: dict[str, float] = {event.key: event.self_cpu_time_total for event in profile.key_averages()}
    parts = {
        kind: sum(time for key, time in spent.items() if key.split("::")[-1].rstrip("_") in keys)
        for kind, keys in PASSES.items()
    }
    parts["other passes"] = sum(spent.values()) - sum(parts.values())
    shares = {kind: time / sum(spent.values()) for kind, time in parts.items()}
    ratio = times["run"].median / times["floor"].median / floors
    detail = ", ".join(f"{kind} {share:.0%}" for kind, share in shares.items()) + f"; in all {ratio:.2f}"
    return Row("split", what, shares["products"] * ratio, "≤", target, detail)


@torch.inference_mode()
def _ratios() -> Iterator[Row]:
    """Attention over bare products: as fast beside attention as padre-2, folded, and pom could be."""
    for kind, dtype in TYPES.items():
        for n, goal in PADRE_GOALS[kind].items():
            softmax = mixer("softmax", n, dtype)
            whole = mixer("padre-2", n, dtype).cost(n)
            folded = replace(whole, ops=tuple(op for op in whole.ops if op.shape != (n, DIM, DIM, 1)))  # D_1 is in B_1
            bare = {"padre-2 folded": (floor(folded, dtype=dtype), goal)}
            if n == LENGTH:
                bare["pom"] = floor(mixer("pom", n, dtype).cost(n), dtype=dtype), POM_GOALS[kind]
            base = once(partial(softmax, tokens(n, dtype)), "cpu")
            for name, (call, limit) in bare.items():
                least = interleaved({"floor": call}, seconds=1)["floor"].median
                detail = f"{1e3 * base:.1f} ms over {1e3 * least:.2f}"
                what = f"attention / bare products of {name}, {kind}, N = {n:,}"
                yield Row("split", what, base / least, "≥", limit, detail)
