"""A sweep measures every mixer once, and stops what is wrong, slow or large."""

import pytest
import torch
from torch import nn

import polymix
from polymix.measure import Budget
from polymix.measure.shapes import near_square
from polymix.measure.sweep import alone, sweep


def test_heads_of_the_host_fill_what_is_open():
    assert polymix.SoftmaxConfig().for_heads(4).heads == 4
    assert polymix.SoftmaxConfig(heads=2).for_heads(4).heads == 2
    assert polymix.PadreConfig().for_heads(4).heads == 1, "padre's single head is the paper's, not an open choice"
    assert polymix.PomConfig().for_heads(4) == polymix.PomConfig()


def run_sweep(mixers, tokens, **options):
    make = options.pop("make", alone(16, 2, "cpu", torch.float32))
    rows = sweep(mixers, tokens, make, scope="alone", **{"budget": Budget(timing_seconds=0.01), **options})
    return [row for batch in rows for row in batch]


def test_sweep_measures_everything_once():
    mixers = {"softmax": polymix.SoftmaxConfig(), "padre-2": polymix.PadreConfig()}
    rows = run_sweep(mixers, [9, 16])
    assert [(row.mixer, row.tokens) for row in rows] == [(m, n) for n in (9, 16) for m in mixers]
    for row in rows:
        assert row.stopped is None
        assert row.low <= row.latency <= row.high
        assert len(row.runs) >= 3
        assert row.floor > 0
        assert row.peak_bytes >= 4 * row.tokens * 16, "the output alone takes that"
        assert row.flops == mixers[row.mixer].changed(**({"grid": near_square(row.tokens)} if "padre" in row.mixer else {})).build(16).cost(row.tokens).flops  # fmt: skip


def test_sweep_goes_on_where_it_was():
    mixers = {"softmax": polymix.SoftmaxConfig(), "pom": polymix.PomConfig()}
    done = {("softmax", 9): None, ("pom", 9): "took 11 s at 9 tokens (budget 10 s)"}
    rows = run_sweep(mixers, [9, 16], done=done)
    assert [(row.mixer, row.tokens, row.stopped) for row in rows] == [
        ("pom", 16, "took 11 s at 9 tokens (budget 10 s)"), ("softmax", 16, None),
    ]  # fmt: skip


class Slow(nn.Module):
    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def forward(self, x):
        self.clock.spend(0.002 * x.shape[1])
        return x


@pytest.fixture
def slow(clock):
    return lambda config, grid: (Slow(clock), torch.zeros(1, grid[0] * grid[1], 4), {})


def test_a_mixer_that_passes_its_time_is_stopped_and_says_so(slow):
    rows = run_sweep(
        {"pom": polymix.PomConfig()}, [8, 20, 30, 40], make=slow, budget=Budget(seconds=0.05, timing_seconds=0.01)
    )
    assert [row.latency is not None for row in rows] == [True, True, False, False]
    assert "took 0.06" in rows[2].stopped
    assert "budget 0.05 s" in rows[2].stopped
    assert rows[3].stopped == rows[2].stopped


def test_a_call_sure_to_pass_the_budget_is_not_made(slow):
    rows = run_sweep(
        {"pom": polymix.PomConfig()}, [8, 800], make=slow, budget=Budget(seconds=0.05, timing_seconds=0.01)
    )
    assert "would take up to" in rows[1].stopped


def test_a_mixer_that_passes_its_memory_is_stopped():
    rows = run_sweep({"softmax": polymix.SoftmaxConfig()}, [64], budget=Budget(bytes=1000, timing_seconds=0.01))
    assert "GiB at 64 tokens" in rows[0].stopped


def test_no_number_for_a_mixer_that_computes_wrong():
    class Wrong(nn.Module):
        def forward(self, x):
            return x if x.dtype == torch.float64 else x * 1.01

    rows = run_sweep({"pom": polymix.PomConfig()}, [4, 8], make=lambda config, grid: (Wrong(), torch.ones(1, 4, 4), {}))
    assert all("failed its check" in row.stopped and row.latency is None for row in rows)
