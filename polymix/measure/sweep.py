"""Mixers over a sweep of token counts: latency, peak memory, and the time of the floor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import nn

from polymix.measure.case import case_of, check
from polymix.measure.clock import Clock
from polymix.measure.floor import floor
from polymix.measure.harness import Budget, Contender, Measurement, Stopped, measure
from polymix.measure.shapes import near_square
from polymix.measure.timing import interleaved, once, out_of_memory, peak_memory
from polymix.mixers import MixerConfig, TokenMixer
from polymix.results import Count

# (config, grid) -> a module, an input for it, and options of the call
Maker = Callable[[MixerConfig, tuple[int, int]], tuple[nn.Module, torch.Tensor, dict[str, Any]]]


@dataclass(frozen=True)
class Row:
    """One mixer at one token count: latencies in milliseconds, memory in bytes. `stopped` says why there are none."""

    mixer: str
    scope: Annotated[Literal["alone", "host"], "the mixer by itself, or the whole host"]
    tokens: Count
    latency: Annotated[float | None, "median, ms"] = None
    low: Annotated[float | None, "10 % quantile, ms"] = None
    high: Annotated[float | None, "90 % quantile, ms"] = None
    runs: Annotated[tuple[float, ...], "every single measurement, ms"] = ()
    peak_bytes: Annotated[int | None, "most bytes held at once by one call, beyond model and input"] = None
    floor: Annotated[float | None, "its own products and convolutions run bare, median, ms; alone only"] = None
    flops: Annotated[int | None, "of the mixer, or of all mixers in the host"] = None
    clock: Annotated[Clock, "of all times in the row"] = "wall"
    stopped: Annotated[str | None, "why there is no measurement here"] = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def alone(dim: int, heads: int, device: str, dtype: torch.dtype) -> Maker:
    """Makes the mixer by itself, batch 1."""

    def make(config: MixerConfig, grid: tuple[int, int]) -> tuple[nn.Module, torch.Tensor, dict[str, Any]]:
        mixer = config.for_heads(heads).for_grid(grid).build(dim, device=device, dtype=dtype)
        return mixer, torch.randn(1, grid[0] * grid[1], dim, device=device, dtype=dtype), config.call_options(grid)

    return make


@torch.inference_mode()
def sweep(
    mixers: Mapping[str, MixerConfig],
    tokens: Sequence[int],
    make: Maker,
    *,
    scope: Literal["alone", "host"],
    budget: Budget,
    device: str = "cpu",
    done: Mapping[tuple[str, int], str | None] | None = None,
) -> Iterator[list[Row]]:
    """Measure every mixer at every token count, the counts in order, the mixers of one count in turn.

    A mixer is stopped, and its rows say why, if its numbers are wrong, if it exceeds the budget, or if it would at
    the next count with quadratic growth.

    Args:
        done: what an earlier run finished: (mixer, tokens) -> why it stopped, or None.
    Yields:
        the new rows of one token count.
    """
    done = done or {}
    stopped: dict[str, str] = {}
    last: dict[str, tuple[int, float]] = {}
    for n in sorted(tokens):
        contenders: dict[str, Callable[[], Contender]] = {}
        for name, config in mixers.items():
            if (name, n) in done:
                if reason := done[name, n]:
                    stopped[name] = reason
            elif name in stopped:
                contenders[name] = partial(_stop, stopped[name])
            else:
                first = n == min(tokens)
                contenders[name] = partial(_prepare, name, config, n, make, budget, device, last.get(name), first)
        measurements = measure(contenders, partial(interleaved, seconds=budget.timing_seconds, device=device))
        for name, its in measurements.items():
            if its.stopped is not None:
                stopped[name] = its.stopped
            else:
                last[name] = n, its.figures["seconds"]
        rows = [_row(name, scope, n, its) for name, its in measurements.items()]
        rows.sort(key=lambda row: row.stopped is None)  # those that stopped come first
        if rows:
            yield rows


def _stop(reason: str) -> Contender:
    raise Stopped(reason)


def _prepare(
    name: str, config: MixerConfig, n: int, make: Maker, budget: Budget, device: str,
    last: tuple[int, float] | None, check_numbers: bool,
) -> Contender:  # fmt: skip
    """Build the module, check its numbers, and hold one call against the budget."""
    budget.check_before(n, last)
    try:
        module, x, options = make(config, near_square(n))
        case = case_of(module.eval(), (x,), options)
        if check_numbers and (reason := check(case)):
            raise Stopped(reason)
        seconds = once(case.call, device)
        budget.check_after(n, seconds)
        peak = peak_memory(case.call, device)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        raise Stopped(f"ran out of memory at {n:,} tokens") from error
    budget.check_after(n, peak=peak)
    figures: dict[str, Any] = {"seconds": seconds, "peak_bytes": peak}
    if isinstance(module, TokenMixer):
        cost = module.cost(n, dtype=x.dtype)
        bare = floor(cost, device=device, dtype=x.dtype)
        return Contender(case.call, bare, name, {**figures, "flops": cost.flops})
    inner = sum(part.cost(n).flops for part in module.modules() if isinstance(part, TokenMixer))
    return Contender(case.call, figures={**figures, "flops": inner})


def _row(name: str, scope: Literal["alone", "host"], n: int, its: Measurement) -> Row:
    if its.timing is None:
        return Row(name, scope, n, stopped=its.stopped)
    timing = its.timing.milliseconds()
    return Row(
        name,
        scope,
        n,
        latency=timing.median,
        low=timing.low,
        high=timing.high,
        runs=timing.runs,
        peak_bytes=its.figures["peak_bytes"],
        floor=its.floor.milliseconds().median if its.floor else None,
        flops=its.figures["flops"],
    )
