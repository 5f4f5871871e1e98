"""The one way in which everything is measured: prepare each contender, time those that are sound in turn."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from polymix.errors import PolymixError
from polymix.measure.timing import Call, Timing

K = TypeVar("K", bound=Hashable)
Timer = Callable[[Mapping[Hashable, Call]], Mapping[Hashable, Timing]]


class Stopped(Exception):
    """Why a contender is not measured, or not at greater lengths."""


@dataclass(frozen=True)
class Budget:
    """What one call may take before its mixer is stopped: seconds, and bytes held at once."""

    seconds: float = 10.0
    bytes: int = 4 << 30
    timing_seconds: float = 0.4  # for all rounds of one mixer at one number of tokens

    def check_before(self, tokens: int, last: tuple[int, float] | None) -> None:
        """Stop before a call that would take over four times the budget if its time grows quadratically.

        last: the number of tokens and the seconds of the longest call so far.
        """
        if last is not None and (expected := last[1] * (tokens / last[0]) ** 2) > 4 * self.seconds:
            raise Stopped(f"would take up to {expected:.2g} s at {tokens:,} tokens (budget {self.seconds:g} s)")

    def check_after(self, tokens: int, seconds: float = 0.0, peak: int = 0) -> None:
        """Stop after a call that took too long or held too much."""
        if seconds > self.seconds:
            raise Stopped(f"took {seconds:.2g} s at {tokens:,} tokens (budget {self.seconds:g} s)")
        if peak > self.bytes:
            limit = f"{self.bytes / 2**30:g} GiB"
            raise Stopped(f"held {peak / 2**30:.1f} GiB at {tokens:,} tokens (budget {limit})")


@dataclass(frozen=True)
class Contender:
    """What is timed under one name.

    Args:
        call: the call.
        floor: the floor that it is compared with, timed in the same turns.
        floor_name: contenders with the same floor share its name.
        figures: what is known of it besides its times.
    """

    call: Call
    floor: Call | None = None
    floor_name: Hashable = None
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Measurement:
    """The times of one contender, or why there are none."""

    timing: Timing | None = None
    floor: Timing | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)
    error: Exception | None = None

    @property
    def stopped(self) -> str | None:
        return None if self.error is None else str(self.error)


def measure(contenders: Mapping[K, Callable[[], Contender]], timer: Timer) -> dict[K, Measurement]:
    """Prepare every contender, then time those that are sound, with their floors, in turn.

    A contender that raises Stopped or a PolymixError has no times; its measurement keeps the error. One that `timer`
    leaves out has neither.

    Args:
        contenders: for each name a function that builds it, checks it, and holds it against a budget.
        timer: for instance `interleaved` with its seconds and device.
    """
    ready: dict[K, Contender] = {}
    measurements: dict[K, Measurement] = {}
    for name, build in contenders.items():
        try:
            ready[name] = build()
        except (Stopped, PolymixError) as error:
            measurements[name] = Measurement(error=error)
    calls: dict[Hashable, Call] = {("call", name): it.call for name, it in ready.items()}
    calls |= {("floor", it.floor_name): it.floor for it in ready.values() if it.floor is not None}
    timings = timer(calls)
    for name, it in ready.items():
        floor = timings.get(("floor", it.floor_name)) if it.floor is not None else None
        measurements[name] = Measurement(timings.get(("call", name)), floor, it.figures)
    return {name: measurements[name] for name in contenders}
