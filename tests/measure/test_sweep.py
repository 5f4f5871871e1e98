"""What is measured is what happens: times, allocations, floors, budgets."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import polymix
from polymix._io import check_device
from polymix.measure import Budget, floor, interleaved, manifest, peak_memory, sweep
from polymix.measure.shapes import near_square
from polymix.measure.sweep import alone
from polymix.measure.timing import Timing
from tests.mixers.cases import CASES


def test_timing_quantiles():
    timing = Timing(tuple(range(1, 12)))
    assert (timing.low, timing.median, timing.high) == (2, 6, 10)
    assert Timing((3.0, 1.0, 2.0)).milliseconds() == Timing((3000.0, 1000.0, 2000.0))


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


@pytest.mark.parametrize("case", [*CASES, "padre-paper"])
def test_floor_does_the_products_of_the_cost(case):
    """The bare calls do the multiply-adds that cost(n) counts, and no more."""
    name, options = CASES.get(case, ("padre", {"degree": 3, "grid": (3, 4)}))
    cost = polymix.create_mixer(name, 12, **options).cost(12)
    run = floor(cost)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        run()
    expected = cost.counted_flops  # transforms and elementwise work are run too, but not in the counter
    if any(op.kind == "depthwise" and op.kernel[0] % 2 == 0 for op in cost.ops):
        # an even kernel gives one row more at the edge than the causal convolution needs
        assert counter.get_total_flops() >= expected
    else:
        assert counter.get_total_flops() == expected


def test_near_square():
    assert [near_square(n) for n in (1, 12, 16, 17, 16384)] == [(1, 1), (3, 4), (4, 4), (1, 17), (128, 128)]


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


def test_manifest_names_the_machine():
    machine = manifest("cpu", 2)
    assert machine["torch"] == torch.__version__
    assert machine["threads"] == 2
    assert machine["cpu"]
    assert machine["gpu"] is None


@pytest.mark.parametrize("device", ["meta", "cuda:97", "gpu"])
def test_devices_that_cannot_be_used(device):
    with pytest.raises(polymix.errors.OptionError, match="--device"):
        check_device(device, "--device")
