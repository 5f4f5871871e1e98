"""All times come from one clock, wall or processor, and say which."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from polymix.errors import OptionError
from polymix.measure import Stopwatch, check_clock, in_turn, repeated
from polymix.measure.timing import Timing

ROOT = Path(__file__).parents[2]
CLOCKS = re.compile(r"perf_counter|process_time|thread_time|\bmonotonic(_ns)?\(|\btimeit\b|\btime\.time\b")


def test_nothing_outside_measure_reads_a_clock():
    readers = {
        str(path.relative_to(ROOT))
        for folder in ("polymix", "benchmarks", "examples", "docs")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".md", ".j2", ".ipynb") and CLOCKS.search(path.read_text("utf-8"))
    }
    assert readers == {"polymix/measure/clock.py"}


def test_a_stopwatch_counts_from_its_start_and_its_laps_leave_no_gap(clock):
    watch = Stopwatch()
    clock.spend(2.0, busy=0.5)
    assert watch.seconds() == 2.0
    clock.spend(1.0)
    assert (watch.restart(), watch.seconds()) == (3.0, 0.0)
    clock.spend(0.25)
    assert (watch.seconds(), watch.seconds()) == (0.25, 0.25), "reading it does not stop it"


def test_processor_time_leaves_out_what_others_compute(clock):
    watch = Stopwatch("processor")
    clock.spend(2.0, busy=0.5)
    assert watch.seconds() == 0.5
    timing = repeated(lambda: clock.spend(1.0, busy=0.25), most=2, clock="processor")
    assert timing == Timing((0.25,), "processor"), "the budget of 0.2 s counts by the same clock"


def test_a_call_is_repeated_within_a_budget(clock):
    def runs(call, **options):
        return len(repeated(lambda: clock.spend(call), **options).runs)

    assert runs(0.06) == 4, "until 0.2 s are over"
    assert runs(0.01) == 10, "ten times at most"
    assert (runs(1.0), runs(1.0, least=3)) == (1, 3)
    spent = clock.now
    assert runs(1.0, warm_up=2) == 1 and clock.now - spent == 3.0, "what warms up is no run"
    assert repeated(lambda: clock.spend(0.06)).clock == "wall"


def test_calls_in_turn_have_their_rounds_and_repeats(clock):
    order = []

    def call(name, seconds):
        order.append(name)
        clock.spend(seconds, busy=seconds / 2)

    calls = {"a": lambda: call("a", 1.0), "b": lambda: call("b", 0.5)}
    assert in_turn(calls, 2, warm_up=1) == {"a": Timing((1.0, 1.0)), "b": Timing((0.5, 0.5))}
    assert "".join(order) == "ababab"
    order.clear()
    timings = in_turn(calls, {"a": 1, "b": 2}, repeats={"a": 1, "b": 3}, clock="processor")
    assert "".join(order) == "abbbbbb"
    assert timings == {"a": Timing((0.5,), "processor"), "b": Timing((0.25, 0.25), "processor")}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"clock": "cpu"}, "'wall', 'processor'"),
        ({"clock": "processor", "device": "cuda"}, "one thread on a CPU"),
        ({"clock": "processor", "threads": 2}, "one thread on a CPU"),
    ],
)
def test_a_clock_that_would_mislead_is_refused(options, reason):
    with pytest.raises(OptionError, match=reason):
        check_clock(**options)
    if "threads" not in options:
        with pytest.raises(OptionError, match=reason):
            Stopwatch(**options)


def test_a_stopwatch_needs_no_pytorch():
    code = "import sys; from polymix.measure import Stopwatch; Stopwatch().seconds(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.slow
def test_timing_loads_no_domain_and_no_mixer():
    code = "import sys; from polymix.measure import *; print(*(m for m in sys.modules if m[:8] == 'polymix.'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    rooms = {name.split(".")[1] for name in done.stdout.split()}
    assert rooms <= {"errors", "measure", "numbers", "limits", "threads"}
