"""The floor does the products that a cost counts, and no more."""

import math
from importlib import import_module

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import polymix
from polymix.measure.floor import _ROWS, _ways, bytes_moved, floor
from polymix.measure.timing import Timing
from polymix.ops.native import library
from polymix.structured.cost import Op
from tests.contracts.mixer_cases import CASES


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


@pytest.mark.parametrize(("name", "options"), [
    ("softmax", {}), ("padre", {"grid": (3, 4)}), ("qt", {"heads": 2}), ("padre", {"grid": (3, 4), "channel": "block_diagonal:blocks=3"}),
])  # fmt: skip
def test_the_floor_of_a_batch_does_a_batch_s_products(name, options):
    cost = polymix.create_mixer(name, 12, **options).cost(12)
    run = floor(cost, batch=3)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        run()
    assert counter.get_total_flops() == 3 * cost.counted_flops
    assert bytes_moved(cost, 1) == cost.bytes
    assert bytes_moved(cost, 3) < 3 * cost.bytes, "weights move once"


MODULE = import_module("polymix.measure.floor")  # polymix.measure.floor is the function
OPS = [
    Op("linear", (_ROWS * 2 + 3, 8, 12, 1)), Op("linear", (20, 8, 12, 4)), Op("matmul", (3, 5, 6, 7)),
    Op("depthwise", (32, 32), (5, 7), 32), Op("depthwise", (2048,), (9,), 64), Op("elementwise", (100,)),
]  # fmt: skip


@pytest.mark.parametrize("op", OPS, ids=lambda op: f"{op.kind}-{op.shape}")
def test_every_way_to_run_an_op_does_its_whole_work(op):
    """Otherwise the floor would be the time of less than the mixer's products."""
    torch.manual_seed(0)
    first, *others = _ways(op, 2, {"device": "cpu", "dtype": torch.float32})
    assert others or (op.kind == "depthwise" and library.why_not()), "one way alone is no choice"
    expected = first()
    for way in others:
        with FlopCounterMode(display=False) as counter:
            products = way()
        if isinstance(products, list):  # in blocks, which share their memory: count the work, compare the last
            assert counter.get_total_flops() == 2 * 2 * op.multiply_adds
            products, expected_part = products[-1], expected[-len(products[-1]) :]
        else:
            expected_part = (
                expected if products.shape == expected.shape else expected.movedim(1, -1).reshape(products.shape)
            )
        assert torch.allclose(products, expected_part, atol=1e-4), "another result"


def slower_with(threads):
    """A clock by which so many threads take ten times as long."""
    return lambda call, device, repeats=1: (call(), 10.0 if torch.get_num_threads() == threads else 1.0)[1] / 100


@pytest.mark.parametrize(("slow", "used"), [(2, 1), (1, 2)])
def test_the_floor_uses_one_thread_where_two_are_slower(monkeypatch, slow, used):
    """With two threads on busy cores it took three times as long as the mixer itself."""
    seen = []
    monkeypatch.setattr(MODULE, "once", slower_with(slow))
    monkeypatch.setattr(MODULE, "_ways", lambda op, batch, kw: [lambda: seen.append(torch.get_num_threads())])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        run = floor(polymix.create_mixer("pom", 8).cost(4))
        seen.clear()
        run()
        assert set(seen) == {used} and torch.get_num_threads() == 2, "what was set before is set again"
    finally:
        torch.set_num_threads(before)


def test_the_fastest_way_is_the_floor_s(monkeypatch):
    ran = []
    ways = {"fast": 0.001, "slow": 0.2}
    monkeypatch.setattr(MODULE, "once", lambda call, device, repeats=1: ways[call()])
    monkeypatch.setattr(
        MODULE,
        "_ways",
        lambda op, batch, kw: [lambda: ran.append("slow") or "slow", lambda: ran.append("fast") or "fast"],
    )
    run = floor(polymix.create_mixer("pom", 8).cost(4))
    ran.clear()
    run()
    assert set(ran) == {"fast"}


def test_show_s_floor_is_at_most_the_mixer_s_time(monkeypatch):
    """The mixer runs the same products, so its own time bounds them."""
    from polymix.workflows.show import show

    times = {"floor": (0.150,), "mixer": (0.0246,)}
    monkeypatch.setattr(
        "polymix.workflows.show.interleaved", lambda calls, seconds: {name: Timing(times[name]) for name in calls}
    )
    rows = {label.partition(",")[0]: value for label, value, _ in show("padre", ["n=64"]).rows}
    assert rows["floor"] == rows["one call"] == "24.6 ms"
    times["floor"] = (0.0201,)
    rows = {label.partition(",")[0]: value for label, value, _ in show("padre", ["n=64"]).rows}
    assert (rows["floor"], rows["one call"]) == ("20.1 ms", "24.6 ms")
    rows = {label.partition(",")[0]: value for label, value, _ in show("padre", ["n=64", "pattern=ab"]).rows}
    assert "one call" not in rows, "a mixer that needs a context is not called without one"
    assert math.isclose(float(rows["floor"].split()[0]), 20.1)
