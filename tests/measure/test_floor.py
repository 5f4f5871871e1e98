"""The floor does the products that a cost counts, and no more."""

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import polymix
from polymix.measure import floor
from polymix.measure.floor import bytes_moved
from tests.mixers.cases import CASES


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
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        floor(cost, batch=3)()
    assert counter.get_total_flops() == 3 * cost.counted_flops
    assert bytes_moved(cost, 1) == cost.bytes
    assert bytes_moved(cost, 3) < 3 * cost.bytes, "weights move once"
