"""One group of rows: every mixer × implementation at one size, with their floors, timed in turn."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from polymix.errors import PolymixError
from polymix.measure.case import Cell, prepare
from polymix.measure.floor import bytes_moved, floor
from polymix.measure.memory import Apart, Memory
from polymix.measure.roofline import Ceiling
from polymix.measure.sweep import Budget, Stopped
from polymix.measure.timing import Timing, interleaved
from polymix.mixers import MixerConfig
from polymix.workflows.bench.settings import Group, Settings, with_impl

Row = dict[str, Any]
Who = tuple[str, str]  # a mixer's label and an implementation
PRODUCTS = {"training": 3}  # how often a pass does the forward's products: a gradient for each of a product's two sides
MEASURED: Row = dict.fromkeys((
    "seconds", "low", "high", "floor", "floor_ratio", "attention_ratio", "flops", "bytes", "flop_share", "byte_share",
    "peak_bytes", "resident_bytes", "output_bytes", "state_bytes",
))  # fmt: skip


@dataclass(frozen=True)
class _Ready:
    cell: Cell
    memory: Memory
    floor: Callable[[], None] | None
    flops: int | None
    bytes: int | None


def measure_group(
    settings: Settings, mixers: Mapping[str, MixerConfig], group: Group, roof: Ceiling, apart: Apart, fewer: list[Row]
) -> list[Row]:
    """The rows of one group; `fewer` are those of the same at fewer tokens, which say what to leave out, and why."""
    ready: dict[Who, _Ready] = {}
    stopped: dict[Who, str] = {}
    everyone = [(label, impl) for label in mixers for impl in settings.impls]
    for who in everyone:
        try:
            ready[who] = _ready(who, mixers[who[0]], settings, group, apart, fewer)
        except (Stopped, PolymixError) as why:
            stopped[who] = str(why)
    calls: dict[Hashable, Callable[[], Any]] = {who: it.cell.call for who, it in ready.items()}
    calls |= {who[0]: it.floor for who, it in ready.items() if it.floor is not None}
    timings = interleaved(calls, seconds=settings.seconds, device=settings.device)
    attention = [timings[who].median for who in ready if mixers[who[0]].name == "softmax"]
    rows = []
    for who in everyone:
        row = {
            "mixer": who[0],
            "impl": who[1],
            **group.to_dict(),
            **MEASURED,
            "runs": [],
            "floor_runs": [],
            "stopped": stopped.get(who),
        }
        if who in ready:
            row |= _figures(ready[who], group, roof, timings[who], timings.get(who[0]))
            row["attention_ratio"] = min(attention) / row["seconds"] if attention else None
        rows.append(row)
    return rows


def _ready(
    who: Who, config: MixerConfig, settings: Settings, group: Group, apart: Apart, fewer: Sequence[Row]
) -> _Ready:
    """The cell, once another process has found that it runs, computes right and keeps to the budget."""
    budget = Budget(seconds=settings.max_seconds, bytes=int(settings.max_gib * 2**30))
    before = max(
        (row for row in fewer if (row["mixer"], row["impl"]) == who), key=lambda row: row["tokens"], default=None
    )
    if before is not None and before["stopped"]:
        raise Stopped(before["stopped"])
    budget.foresee(group.tokens, (before["tokens"], before["seconds"]) if before else None)
    config = with_impl(config, who[1])
    memory = apart.measure(config, group, settings.device, check=group.tokens == min(settings.tokens))
    budget.hold(group.tokens, memory.seconds, memory.peak_bytes)
    if memory.failed:
        raise Stopped(memory.failed)
    cell = prepare(config, group, settings.device)
    if group.pass_ == "step":
        return _Ready(cell, memory, None, None, None)
    dtype = getattr(torch, group.dtype)
    cost, times = cell.mixer.cost(group.tokens, dtype=dtype), PRODUCTS.get(group.pass_, 1)
    bare = floor(cost, batch=group.batch, device=settings.device, dtype=dtype)
    return _Ready(cell, memory, bare, times * group.batch * cost.flops, times * bytes_moved(cost, group.batch))


def _figures(it: _Ready, group: Group, roof: Ceiling, timing: Timing, bare: Timing | None) -> Row:
    seconds = timing.median
    return {
        "seconds": seconds,
        "low": timing.low,
        "high": timing.high,
        "runs": list(timing.runs),
        "floor": bare.median if bare else None,
        "floor_runs": list(bare.runs) if bare else [],
        "floor_ratio": seconds / (PRODUCTS.get(group.pass_, 1) * bare.median) if bare else None,
        "flops": it.flops,
        "bytes": it.bytes,
        "flop_share": it.flops / seconds / roof.flops_per_second if it.flops else None,
        "byte_share": it.bytes / seconds / roof.bytes_per_second if it.bytes else None,
        "peak_bytes": it.memory.peak_bytes,
        "resident_bytes": it.memory.resident_bytes,
        "output_bytes": it.memory.output_bytes,
        "state_bytes": it.memory.state_bytes,
    }
