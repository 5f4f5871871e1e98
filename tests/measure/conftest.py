"""A clock for the tests of what is timed."""

from types import SimpleNamespace

import pytest


class Clock:
    """A clock that only the calls that are timed move, so that a loaded machine changes nothing."""

    def __init__(self):
        self.now = self.busy = 0.0

    def spend(self, seconds, busy=0.0):
        """Let so many seconds pass, in so many of which the processor computes."""
        self.now += seconds
        self.busy += busy


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    read = SimpleNamespace(perf_counter=lambda: clock.now, process_time=lambda: clock.busy)
    monkeypatch.setattr("polymix.measure.clock.time", read)
    return clock
