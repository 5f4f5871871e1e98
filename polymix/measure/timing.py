"""Time and memory of a call: warm-up, medians with quantiles, interleaved rounds (drift then affects all alike)."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from polymix.measure.clock import Clock, Stopwatch, synchronize

Call = Callable[[], Any]
K = TypeVar("K", bound=Hashable)
MIN_CALLS = 8  # warm-up and rounds of an interleaved call, at the least


@dataclass(frozen=True)
class Timing:
    """Seconds of one call, one figure per round, and the clock that they were read from."""

    runs: tuple[float, ...]
    clock: Clock = "wall"

    def milliseconds(self) -> Timing:
        """The same in milliseconds."""
        return Timing(tuple(1e3 * run for run in self.runs), self.clock)

    @property
    def median(self) -> float:
        return statistics.median(self.runs)

    @property
    def least(self) -> float:
        """The fastest run."""
        return min(self.runs)

    @property
    def low(self) -> float:
        """10 % quantile (the fastest of few runs)."""
        return sorted(self.runs)[int(0.1 * (len(self.runs) - 1))]

    @property
    def high(self) -> float:
        """90 % quantile."""
        return sorted(self.runs)[-1 - int(0.1 * (len(self.runs) - 1))]


def once(call: Call, device: str = "cpu", repeats: int = 1, clock: Clock = "wall") -> float:
    """Seconds per call, averaged over `repeats` calls. Raises OptionError: processor time of a GPU."""
    watch = Stopwatch(clock, device)
    for _ in range(repeats):
        call()
    return watch.seconds() / repeats


def repeated(
    call: Call, *, seconds: float = 0.2, least: int = 1, most: int = 10, warm_up: int = 0, device: str = "cpu",
    clock: Clock = "wall",
) -> Timing:  # fmt: skip
    """Time a call again and again: `least` times, then until the runs take `seconds` together, at most `most` times.

    Args:
        warm_up: calls before, which are not timed.
        device, clock: as of `Stopwatch`.
    Returns:
        the runs, with `median`, `low`, `high` and `least`.
    """
    for _ in range(warm_up):
        call()
    runs: list[float] = []
    while len(runs) < least or (sum(runs) < seconds and len(runs) < most):
        runs.append(once(call, device, clock=clock))
    return Timing(tuple(runs), clock)


def in_turn(
    calls: Mapping[K, Call], rounds: int | Mapping[K, int], *, repeats: Mapping[K, int] | None = None,
    warm_up: int = 0, device: str = "cpu", clock: Clock = "wall",
) -> dict[K, Timing]:  # fmt: skip
    """Time all calls in turn, A B C, A B C, …: what else the machine does then affects all alike.

    Args:
        rounds: of all calls, or of each.
        repeats: how often a round makes a call; its run is their mean. None: once.
        warm_up: rounds before, which are not timed.
    """
    rounds = dict.fromkeys(calls, rounds) if isinstance(rounds, int) else rounds
    for _ in range(warm_up):
        for call in calls.values():
            call()
    runs: dict[K, list[float]] = {name: [] for name in calls}
    for turn in range(max(rounds.values(), default=0)):
        for name, call in calls.items():
            if turn < rounds[name]:
                runs[name].append(once(call, device, repeats[name] if repeats else 1, clock))
    return {name: Timing(tuple(values), clock) for name, values in runs.items()}


def interleaved(
    calls: Mapping[K, Call], *, seconds: float, device: str = "cpu", clock: Clock = "wall"
) -> dict[K, Timing]:
    """Time all calls in turn for about `seconds` per call, in 3 to 25 rounds.

    A round repeats a fast call for at least 5 ms and counts as one run. Calls are warmed up first: three times, or
    once if one takes 0.5 s or more.
    """
    repeats: dict[K, int] = {}
    rounds: dict[K, int] = {}
    for name, call in calls.items():
        estimate = max(once(call, device, clock=clock), 1e-7)
        if estimate < 0.5:
            estimate = max(repeated(call, least=2, most=2, device=device, clock=clock).least, 1e-7)
        repeats[name] = max(1, int(5e-3 / estimate))
        rounds[name] = min(25, max(3, int(seconds / (estimate * repeats[name]))))
    return in_turn(calls, rounds, repeats=repeats, device=device, clock=clock)


def interleaved_within(calls: Mapping[K, Call], seconds: float, device: str, clock: Clock = "wall") -> dict[K, Timing]:
    """Time all calls in turn in about `seconds` altogether.

    Calls that are too slow for that have a single run. A call that runs out of memory is left out.
    """
    first = {name: run for name, call in calls.items() if (run := _first_run(call, seconds, device, clock)) is not None}
    left, fast = seconds, {}
    for name in sorted(first, key=first.__getitem__):
        left -= MIN_CALLS * first[name]
        if left >= 0:
            fast[name] = calls[name]
    timings = interleaved(fast, seconds=seconds / max(len(fast), 1), device=device, clock=clock)
    return {name: timings[name] if name in timings else Timing((run,)) for name, run in first.items()}


def _first_run(call: Call, seconds: float, device: str, clock: Clock) -> float | None:
    """Seconds of a call, the better of two if there is time for more; None where it runs out of memory."""
    try:
        run = once(call, device, clock=clock)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        return None
    return run if run * MIN_CALLS > seconds else min(run, once(call, device, clock=clock))


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out; PyTorch's CPU allocator raises a plain RuntimeError."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "memory" in str(error).lower())


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Hide file descriptor 2, to which the profiler's library writes lines of its own."""
    sys.stderr.flush()
    original, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(original, 2)
        os.close(original)
        os.close(nowhere)


def peak_memory(call: Call, device: str = "cpu") -> int:
    """The most bytes that a call holds at once, beyond those held before it.

    On a CPU from the allocations that PyTorch's profiler records; on CUDA from the caching allocator.
    """
    if device.startswith("cuda"):
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with _without_stderr(), torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call()
    kineto = profile.profiler.kineto_results if profile.profiler else None
    assert kineto is not None
    events = sorted((e.start_ns(), e.nbytes()) for e in kineto.events() if e.name() == "[memory]")
    held = peak = 0
    for _, size in events:
        held += size
        peak = max(peak, held)
    return peak
