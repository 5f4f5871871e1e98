"""Steps paper, mixers and compiled: whole mixers against attention with each of PyTorch's backends."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu_steps.bench import DTYPES, Bench, Jobs, Row, Sizes, foreseen, reason, timing
from polymix.measure.case import Case, check, disagreement, prepare
from polymix.mixers import MixerConfig, config_class
from polymix.workflows.bench.run import Group

Who = tuple[str, str]  # a mixer and an implementation, or attention and a backend
MIXERS: dict[str, tuple[str, dict[str, Any]]] = {
    "padre-2": ("padre", {"degree": 2}), "padre-3": ("padre", {"degree": 3}), "pom": ("pom", {}), "qt": ("qt", {}),
    "poly_sa": ("poly_sa", {}), "poly_nl": ("poly_nl", {}),
}  # fmt: skip
TESTS = {
    "padre-2": "padre/test_triton.py", "padre-3": "padre/test_triton.py", "pom": "pom/test_triton.py",
    "qt": "qt/test_triton.py",
    "poly_sa": "pooled/test_triton.py", "poly_nl": "pooled/test_triton.py",
}  # fmt: skip
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION, "math": SDPBackend.MATH,
}  # fmt: skip
ATTENTION = tuple(("softmax", backend) for backend in BACKENDS)
KERNELS_AND_EAGER = tuple(product(MIXERS, ("triton", "eager")))
PAPER = 11  # times as fast as unfused float32 attention: padre-2 at 4,096 tokens


def config(label: str, impl: str, sizes: Sizes) -> MixerConfig:
    """The config of a mixer, or of attention, whose `impl` is a backend."""
    if label == "softmax":
        return config_class("softmax")()
    name, options = MIXERS[label]
    options = {**options, "kernel_size": sizes.kernel} if name == "padre" else options
    return config_class(name)(**options, impl="eager" if impl == "compiled" else impl)


def paper_jobs(bench: Bench) -> Jobs:
    sizes, who = bench.sizes, (*ATTENTION, ("padre-2", "triton"), ("padre-2", "eager"))
    for dtype, pass_ in product(DTYPES, ("forward", "folded")):
        group = Group(sizes.paper_tokens, sizes.dim, 1, dtype, pass_, 1)
        yield from _group_jobs(bench, "paper", group, who)


def mixer_jobs(bench: Bench) -> Jobs:
    sizes = bench.sizes
    for dim, dtype, pass_, n in product(sizes.dims, DTYPES, ("forward", "training"), sizes.tokens):
        yield from _group_jobs(bench, "mixers", Group(n, dim, 1, dtype, pass_, 1), (*ATTENTION, *KERNELS_AND_EAGER))


def compiled_jobs(bench: Bench) -> Jobs:
    """Compiled mixers at a short and a long token count. They come last: compiling takes longer than all timings."""
    sizes, counts = bench.sizes, sorted({n for n in bench.sizes.tokens if n in (4096, 65536) or bench.dry})
    for dim, dtype, pass_, n, label in product(sizes.dims, DTYPES, ("forward", "training"), counts, MIXERS):
        group = Group(n, dim, 1, dtype, pass_, 1)
        yield from _group_jobs(bench, "compiled", group, (*ATTENTION, (label, "eager"), (label, "compiled")), label)


def _group_jobs(bench: Bench, step: str, group: Group, who: Sequence[Who], name: str = "") -> Jobs:
    who = [(label, impl) for label, impl in who if impl != "triton" or bench.finished(TESTS[label])]
    where = " ".join(filter(None, [step, name, str(group.dim), group.dtype, group.pass_, str(group.tokens)]))
    yield where, partial(_measure, bench, step, group, who)


def _measure(bench: Bench, step: str, group: Group, who: Sequence[Who]) -> list[Row]:
    """One row for each contender, timed in turn."""
    calls: dict[Who, Callable[[], Any]] = {}
    stopped: dict[Who, str] = {}
    where = {key: value for key, value in group.to_dict().items() if key != "threads"}
    for label, impl in who:
        same = {key: value for key, value in where.items() if key != "tokens"}
        fewer = [r for r in bench.rows(step, mixer=label, impl=impl, **same) if r["tokens"] < group.tokens]
        why = foreseen(fewer, group.tokens, 2 if label == "softmax" else 1) or _obstacle(bench, label, impl, group)
        if why is None:
            try:
                call = _call(label, impl, group, bench)
                call()
                calls[label, impl] = call
            except Exception as error:  # any failure becomes its result
                why = reason(error)
        if why:
            stopped[label, impl] = why
    runs = bench.clock(calls, bench.sizes.seconds)
    wall = bench.clock.waited(calls, bench.sizes.seconds)
    rows = []
    for one in who:
        row: Row = {"mixer": one[0], "impl": one[1], **where, "seconds": None, "stopped": stopped.get(one)}
        row |= {**timing(runs[one]), "wall": wall[one].median} if one in runs else {}
        rows.append(row)
    return _with_ratios(rows)


def _with_ratios(rows: list[Row]) -> list[Row]:
    """Add the ratios of attention's time to each row's: the best backend, back to back, and unfused."""
    timed = [row for row in rows if row["mixer"] == "softmax" and row["seconds"]]
    best, waited = (min(timed, key=lambda row: row[by], default=None) for by in ("seconds", "wall"))
    unfused = next((row for row in timed if row["impl"] == "math"), None)
    for row in rows:
        mine = row["seconds"]
        row["attention"] = best["impl"] if best else None
        row["ratio"] = best["seconds"] / mine if best and mine else None
        row["wall_ratio"] = waited["wall"] / row["wall"] if waited and mine else None
        row["unfused_ratio"] = unfused["seconds"] / mine if unfused and mine else None
    return rows


def _obstacle(bench: Bench, label: str, impl: str, group: Group) -> str | None:
    """Why this contender may not be timed; None if it may. Attention is PyTorch's own."""
    if label == "softmax":
        return None
    why = bench.failed_tests(TESTS[label]) if impl == "triton" else None
    return why or _wrong(label, impl, replace(group, tokens=bench.sizes.check_tokens), bench.sizes, bench.device)


@cache
def _wrong(label: str, impl: str, group: Group, sizes: Sizes, device: str) -> str | None:
    try:
        return check(prepare(config(label, impl, sizes), group.setting(device)))
    except Exception as error:  # any failure becomes its result
        return reason(error)


def _call(label: str, impl: str, group: Group, bench: Bench) -> Callable[[], Any]:
    case = prepare(config(label, impl, bench.sizes), group.setting(bench.device))
    if impl == "compiled":
        _compile(case, bench.dry)

    def call() -> None:
        with sdpa_kernel(BACKENDS[impl]) if label == "softmax" else nullcontext(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # backends that cannot run print long warnings
            case.call()
        case.clear()

    return call


def _compile(case: Case, dry: bool) -> None:
    """Compile the mixer in place. Raises ValueError if that changes its numbers."""
    expected = [part.detach().double().cpu() for part in case.outputs()]
    torch.compiler.reset()
    case.module.compile(fullgraph=True, dynamic=False, backend="eager" if dry else "inductor")
    if why := disagreement([part.detach() for part in case.outputs()], expected):
        raise ValueError(f"compiled, {why}")
