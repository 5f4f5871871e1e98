"""Mixers under torch.compile: plain PyTorch compiled, the C kernels as nodes of the graph, and plain calls.

    python benchmarks/compiled.py benchmarks/results/compiled.json [--only pom,qt] [--clock processor --threads 1]

"auto" decides by this table (MIN_TOKENS_IN_A_GRAPH in polymix/ops/dispatch.py). One graph per row, of fixed shapes, by
Inductor; the compilation takes several minutes and is not part of the times. A row of training is a forward and a
backward. Other mixers' rows stay in the file.
"""

from __future__ import annotations

import argparse
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from saving import read, save
from target_steps.common import mixer, tokens

import polymix
from polymix.convert.tracing import Cotangents
from polymix.measure.clock import CLOCKS, Clock, check_clock
from polymix.measure.machine import manifest
from polymix.measure.timing import interleaved

COTANGENTS = Cotangents()
MIXERS = ("padre-2", "pom", "qt", "poly_sa", "poly_nl")
INFERENCE = ((64, 1), (196, 1), (576, 1), (1024, 1), (4096, 1))  # tokens and batch
TRAINING = ((64, 1), (196, 16))
WAYS = ("compiled eager", "kernels as nodes", "plain call")


class Case(NamedTuple):
    """A row: which mixer, its tokens and batch, and whether gradients are recorded."""

    mixer: str
    tokens: int
    batch: int
    training: bool


def cases(mixers: Sequence[str] = MIXERS) -> list[Case]:
    shapes = [(shape, False) for shape in INFERENCE] + [(shape, True) for shape in TRAINING]
    return [Case(name, *shape, training) for name in mixers for shape, training in shapes]


def _own(module: torch.nn.Module) -> Callable[[torch.Tensor], Any]:
    """A function with a code object of its own: PyTorch keeps graphs by code object, and tries them one by one."""

    def run(x: torch.Tensor) -> Any:
        return module(x)

    return types.FunctionType(run.__code__.replace(co_name="run_mixer"), globals(), "run", None, run.__closure__)


def prepare(case: Case, backend: str = "inductor") -> dict[str, Callable[[], Any]]:
    """One call for each of WAYS, compiled."""
    calls: dict[str, Callable[[], Any]] = {}
    x = tokens(case.tokens, batch=case.batch).requires_grad_(case.training)
    for way, impl in zip(WAYS, ("eager", "native", "auto"), strict=True):
        module = mixer(case.mixer, case.tokens, impl=impl)
        run = module if impl == "auto" else torch.compile(_own(module), fullgraph=True, dynamic=False, backend=backend)

        def call(run: Any = run, module: torch.nn.Module = module) -> None:
            if not case.training:
                with torch.no_grad():
                    run(x)
                return
            module.zero_grad(set_to_none=True)
            x.grad = None
            y = run(x)
            y.backward(COTANGENTS(y))

        call()
        calls[way] = call
    return calls


def measure(
    prepared: Mapping[Case, Mapping[str, Callable[[], Any]]], seconds: float, clock: Clock = "wall"
) -> list[dict[str, Any]]:
    """Milliseconds of each call, and what ran in the plain one."""
    rows = []
    for case, calls in prepared.items():
        timings = interleaved(calls, seconds=seconds, clock=clock)
        module = mixer(case.mixer, case.tokens)
        with torch.set_grad_enabled(case.training):
            impl = polymix.explain(module, tokens(case.tokens, batch=case.batch))[0].impl
        rows.append(
            {**case._asdict(), "plain": impl, "clock": clock, "ms": {way: 1e3 * timings[way].median for way in calls}}
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.25, help="of measuring each call")
    parser.add_argument("--only", default=",".join(MIXERS))
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="processor: beside other work, with --threads 1"
    )
    options = parser.parse_args()
    check_clock(options.clock, threads=options.threads)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    machine, names = manifest("cpu", options.threads), options.only.split(",")
    content = read(options.out, {"machine": machine, "rows": []})
    others = [row for row in content["rows"] if row["mixer"] not in names] if content["machine"] == machine else []
    rows = measure({case: prepare(case) for case in cases(names)}, options.seconds, options.clock)
    rows = sorted([*others, *rows], key=lambda row: MIXERS.index(row["mixer"]))
    save({"machine": machine, "rows": rows}, options.out)


if __name__ == "__main__":
    main()
