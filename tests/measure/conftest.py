"""A clock for the tests of what is timed."""

from types import SimpleNamespace

import pytest


class Clock:
    """A clock that only the calls that are timed move, so that a loaded machine changes nothing."""

    def __init__(self):
        self.now = 0.0

    def spend(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("polymix.measure.timing.time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock
