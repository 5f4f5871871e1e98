"""Forward passes: over the floor, against attention and the authors' code, by length."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

import polymix
from polymix.measure import interleaved
from polymix.measure.floor import floor
from polymix.measure.timing import once
from target_steps.common import DIM, LENGTH, MIXERS, PADRE_GOALS, POM_GOALS, TYPES, Row, mixer, step, tokens


@torch.inference_mode()
def forward(_: argparse.Namespace) -> Iterator[Row]:
    """Time over the floor."""
    for kind, dtype in TYPES.items():
        calls: dict[Any, Callable[[], Any]] = {}
        x = tokens(LENGTH, dtype)
        for name in MIXERS:
            module = mixer(name, LENGTH, dtype)
            calls[name, "mixer"] = partial(module, x)
            calls[name, "floor"] = floor(module.cost(LENGTH), dtype=dtype)
        times = interleaved(calls, seconds=1.5)
        for name in MIXERS:
            ours, bare = times[name, "mixer"].median, times[name, "floor"].median
            detail = f"{1e3 * ours:.2f} ms over {1e3 * bare:.2f}"
            limit = 1.15 if kind == "float32" else 1.25
            yield Row("forward", f"{name} / floor, {kind}, N = {LENGTH:,}", ours / bare, "≤", limit, detail)


@torch.inference_mode()
def attention(_: argparse.Namespace) -> Iterator[Row]:
    """The speedup over attention of padre-2, folded, and of pom."""
    for kind, dtype in TYPES.items():
        for n, goal in PADRE_GOALS[kind].items():
            x = tokens(n, dtype)
            softmax, padre = mixer("softmax", n, dtype), mixer("padre-2", n, dtype).fold()
            calls: dict[str, Callable[[], Any]] = {"padre-2": partial(padre, x)}
            if n == LENGTH:
                calls["pom"] = partial(mixer("pom", n, dtype), x)
            if n < 65536:
                calls["softmax"] = partial(softmax, x)
            times = {name: timing.median for name, timing in interleaved(calls, seconds=1.5).items()}
            base = times["softmax"] if n < 65536 else once(partial(softmax, x), "cpu")
            for name, limit in (("padre-2", goal), ("pom", POM_GOALS[kind])):
                if name in times:
                    detail = f"{1e3 * base:.1f} ms over {1e3 * times[name]:.2f}"
                    what = f"attention / {name}{' folded' if name == 'padre-2' else ''}, {kind}, N = {n:,}"
                    yield Row("attention", what, base / times[name], "≥", limit, detail)


@torch.inference_mode()
def slope(_: argparse.Namespace) -> Iterator[Row]:
    """The slope of log time against log N, by least squares over 1,024 … 65,536 tokens."""
    counts = [1024, 4096, 16384, 65536]
    for name in MIXERS:
        calls = {n: partial(mixer(name, n), tokens(n)) for n in counts}
        times = interleaved(calls, seconds=1)
        x, y = torch.tensor(counts).log(), torch.tensor([times[n].median for n in counts]).log()
        value = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
        detail = ", ".join(f"{1e3 * times[n].median:.2f}" for n in counts) + " ms"
        yield Row("slope", f"{name}, log time / log N, 1,024 … 65,536", value.item(), "≤", 1.05, detail)


def authors(given: argparse.Namespace) -> Iterator[Row]:
    """The time of the PoM authors' module over ours, with the same weights."""
    if given.pom is None:
        print("authors: skipped, since --pom was not given", file=sys.stderr)
        return
    sys.path.insert(0, given.pom)
    from pom.pom import PoM

    theirs = PoM(DIM, 2, 2, 1, 1, bias=True)
    ours = polymix.PoM.from_reference(theirs.state_dict(), degree=2, expand=2)
    n = LENGTH
    x = tokens(n).requires_grad_()
    past = torch.ones(1, n, n).tril()
    torch.testing.assert_close(ours(x[:, :64]), theirs(x[:, :64]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        ours(x[:, :64], causal=True), theirs(x[:, :64], mask=past[:, :64, :64]), rtol=1e-4, atol=1e-5
    )
    calls: dict[Any, Callable[[], Any]] = {}
    with torch.inference_mode():
        calls["theirs", "forward"], calls["ours", "forward"] = lambda: theirs(x), lambda: ours(x)
        calls["theirs", "causal"], calls["ours", "causal"] = lambda: theirs(x, mask=past), lambda: ours(x, causal=True)
        times = interleaved(calls, seconds=1.5)
    calls = {("theirs", "forward + backward"): step(theirs, x), ("ours", "forward + backward"): step(ours, x)}
    times |= interleaved(calls, seconds=1.5)
    for what, goal in (("forward", 2.2), ("forward + backward", 2.2), ("causal", 8)):
        a, b = times["theirs", what].median, times["ours", what].median
        detail = f"{1e3 * a:.1f} ms over {1e3 * b:.2f}"
        yield Row("authors", f"pom authors' code / ours, {what}, N = {n:,}", a / b, "≥", goal, detail)
