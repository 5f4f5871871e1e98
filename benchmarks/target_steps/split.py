"""Where the time goes, and the best that the same products allow."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from polymix.measure import interleaved, once
from polymix.measure.floor import floor
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

PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "mkldnn_convolution", "mkldnn_linear"}  # operators of PyTorch
KERNELS = ("depthwise", "linear_", "moments", "pom_causal", "qt_")  # in C, with the passes in them
FUNCTIONS = {"gelu", "sigmoid", "exp", "gelu_backward", "sigmoid_backward"}
CALLS = 20  # in a profile


def kind_of(operator: str) -> str:
    """The kind of work that an operator does."""
    name = operator.split("::")[-1].rstrip("_")
    if operator.startswith("polymix::") and name.startswith(KERNELS):
        return "kernels in C"
    return "products" if name in PRODUCTS else "functions" if name in FUNCTIONS else "other passes"


def split(given: argparse.Namespace) -> Iterator[Row]:
    """What each ratio would be if everything except products and C kernels were free."""
    yield from _forwards()
    for n, batch in SHAPES:
        for name in MIXERS:
            module = mixer(name, n).train()
            run, bare = step(module, tokens(n, batch=batch).requires_grad_()), floor(module.cost(n), batch=batch)
            yield _alone(
                f"{name}, step, its products and kernels alone / 3 floors, N = {n:,} × {batch}", run, bare, 3, 1.5
            )
    yield from _ratios()


@torch.inference_mode()
def _forwards() -> Iterator[Row]:
    for name in MIXERS:
        module, what = mixer(name, LENGTH), f"{name}, its products and kernels alone / floor, N = {LENGTH:,}"
        yield _alone(what, partial(module, tokens(LENGTH)), floor(module.cost(LENGTH)), 1, 1.15)


def _alone(what: str, run: Callable[[], Any], bare: Callable[[], Any], floors: int, target: float) -> Row:
    """The share of products and C kernels in the time over the floor."""
    times = interleaved({"run": run, "floor": bare}, seconds=1.5)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        whole = 1e6 * CALLS * once(run, repeats=CALLS)
    spent = dict.fromkeys(("products", "kernels in C", "functions", "other passes"), 0.0)
    for event in profile.key_averages():
        spent[kind_of(event.key)] += event.self_cpu_time_total
    spent["Python"] = max(0.0, whole - sum(spent.values()))
    shares = {kind: part / sum(spent.values()) for kind, part in spent.items()}
    ratio = times["run"].median / times["floor"].median / floors
    detail = ", ".join(f"{kind} {share:.0%}" for kind, share in shares.items()) + f"; in all {ratio:.2f}"
    return Row("split", what, (shares["products"] + shares["kernels in C"]) * ratio, "≤", target, detail)


@torch.inference_mode()
def _ratios() -> Iterator[Row]:
    """Attention over bare products: the best speedup that padre-2, folded, and pom could reach."""
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
