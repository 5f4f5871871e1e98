"""Times are taken in turn, within a budget, and what a call allocates is counted."""

import pytest
import torch

from polymix.measure import interleaved, peak_memory, timing
from polymix.measure.timing import Timing, interleaved_within
from tests.workflows.recommend.helpers import near


def test_timing_quantiles():
    timing = Timing(tuple(range(1, 12)))
    assert (timing.low, timing.median, timing.high) == (2, 6, 10)
    assert Timing((3.0, 1.0, 2.0)).milliseconds() == Timing((3000.0, 1000.0, 2000.0))


def test_calls_are_timed_in_turn(clock):
    order = []

    def call(name):
        order.append(name)
        clock.spend({"a": 0.02, "b": 0.03}[name])

    timings = interleaved({name: lambda name=name: call(name) for name in "ab"}, seconds=0.12)
    assert "".join(order) == "aaabbb" + "ab" * 4 + "aa", "three calls to warm up, then in turn while there is time"
    assert {name: (timing.median, len(timing.runs)) for name, timing in timings.items()} == {
        "a": (pytest.approx(0.02), 6), "b": (pytest.approx(0.03), 4),
    }  # fmt: skip


def test_quick_calls_are_repeated_and_slow_ones_warmed_up_once(clock):
    order = []

    def call(name, seconds):
        order.append(name)
        clock.spend(seconds)

    timings = interleaved({"quick": lambda: call("q", 1e-3), "slow": lambda: call("s", 0.75)}, seconds=0.016)
    assert "".join(order).startswith("qqqs") and order.count("s") == 1 + 3
    rounds, left = divmod(order.count("q") - 3, len(timings["quick"].runs))
    assert left == 0 and rounds in (4, 5), "each run lasts about 5 ms"  # 5e-3 / 1e-3, as floats round it


def test_times_are_taken_within_the_budget(monkeypatch):
    taken = {"slow": 3.0, "fast": 0.001}
    monkeypatch.setattr(timing, "once", lambda call, device, clock: taken[call()])
    monkeypatch.setattr(timing, "interleaved", lambda calls, **_: {name: near(taken[name]) for name in calls})
    times = interleaved_within({"slow": lambda: "slow", "fast": lambda: "fast"}, 2.0, "cpu")
    assert (len(times["slow"].runs), len(times["fast"].runs)) == (1, 5), "what would take too long has one run"

    def exhausted():
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    assert "slow" not in interleaved_within({"slow": exhausted, "fast": lambda: "fast"}, 2.0, "cpu")


def test_peak_memory_counts_allocations():
    x = torch.zeros(1000)  # 4,000 bytes, held before

    def call():
        a = x + 1  # 4,000
        b = torch.cat((a, a))  # 8,000 beside it
        del a
        return b[:10] + x[:10]

    assert 12_000 <= peak_memory(call) <= 12_500
    assert peak_memory(lambda: x.view(10, 100)) == 0


def test_peak_memory_is_silent(capfd):
    peak_memory(lambda: torch.zeros(10) + 1)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
