"""Init keeps variance; costs are counted."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from polymix.structured import Cost, Op, Site, create_map
from polymix.structured.cost import cost_of, linear_op
from polymix.structured.dense import linear
from tests.helpers import tokens
from tests.structured.cases import DIM, SPECS, N, conv, site

# Init


@pytest.mark.parametrize("spec", [spec for spec in SPECS if "mean" not in spec])
@pytest.mark.parametrize("side", ["token", "channel"])
def test_init_keeps_variance(side, spec):
    """Unit variance in, near unit variance out (a causal filter fills up along the sequence; an identity added to a
    map is scaled by neither)."""
    torch.manual_seed(0)
    n = 144
    layer = create_map(spec.replace(":blocks=6", ":blocks=12"), site(side, n=n, dim=144))
    y = layer(tokens(8, n, 144, dtype=torch.float32))
    y = y[:, -8:] if side == "token" and spec.startswith("toeplitz") and not spec.endswith("^T") else y
    y = y[:, :8] if spec == "toeplitz^T" and side == "token" else y
    if side == "channel" and "toeplitz" in spec:
        y = y[..., :8] if spec.endswith("^T") else y[..., -8:]
    alone = side == "channel" and any(kind in spec for kind in ("depthwise", "circulant", "toeplitz"))
    if alone or any(part in spec for part in ("@", "+", "low_rank", "rank_one", "implicit")):  # one draw decides
        assert 0.2 < y.var().item() < 4
    else:
        assert 0.6 < y.var().item() < 1.5


@pytest.mark.parametrize("spec", ["dense", "low_rank:rank=64", "block_diagonal:blocks=4", "sparse", "banded", "depthwise",
                                  "diagonal"])  # fmt: skip
def test_causal_init_keeps_variance_from_the_first_token_on(spec):
    """Row i of a causal map reads i + 1 entries: its weights start as large as that asks."""
    torch.manual_seed(0)
    y = create_map(spec, Site("token", 256, 144, 144, causal=True))(tokens(16, 144, 256, dtype=torch.float32))
    for first, last in ((0, 4), (20, 40), (100, 144)):
        least = (
            0.05 if spec in ("banded", "depthwise") and first == 0 else 0.4
        )  # before the first token there are zeros
        assert least < y[:, first:last].var().item() < 2.5


@pytest.mark.parametrize(("inside", "outside", "blocks"), [
    (60, 60, 1), (64, 256, 1), (256, 64, 1), (96, 96, 4), (256, 128, 8),
])  # fmt: skip
def test_channel_init_keeps_variance(inside, outside, blocks):
    layer = linear(inside, outside, blocks)
    assert layer(tokens(4, 256, inside, seed=1, dtype=torch.float32)).var().item() == pytest.approx(1, rel=0.15)
    assert not layer.bias.any()


@pytest.mark.parametrize(("grid", "kernel", "causal"), [
    ((512,), (11,), False), ((512,), (4,), True), ((24, 24), (11, 11), False), ((24, 24), (3, 5), False),
    ((8, 8, 8), (3, 3, 3), False),
])  # fmt: skip
def test_token_init_keeps_variance(grid, kernel, causal):
    """Away from the edge, where zeros come in."""
    layer = create_map("depthwise", Site("token", 192, kernel=kernel, causal=causal), bias=True)
    y = layer(tokens(2, math.prod(grid), 192, seed=1, dtype=torch.float32), grid).unflatten(1, grid)
    for axis, k in enumerate(kernel):
        y = y.narrow(1 + axis, k - 1, grid[axis] - 2 * (k - 1))
    assert y.var().item() == pytest.approx(1, rel=0.15)
    assert not layer.bias.any()


# Cost


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("side", ["token", "channel"])
def test_costs(side, spec):
    """The formula is PyTorch's own count, the transforms and elementwise work aside, and counts every parameter."""
    layer = create_map(spec, site(side))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(torch.randn(1, N, DIM))
    cost = layer.cost(N)
    assert cost.counted_flops == counter.get_total_flops()
    assert cost.parameters == sum(p.numel() for p in layer.parameters())
    assert cost.multiply_adds or spec == "identity"


@pytest.mark.parametrize(
    "spec", [spec for spec in SPECS if spec not in ("dense", "block_diagonal:blocks=2", "sparse:density=0.3:seed=4")]
)
def test_growth_with_the_number_of_tokens(spec):
    """Counted operations grow linearly, or as N log N (transforms), or N √N (Monarch with its default blocks)."""
    spec = spec.replace(":blocks=6", "")
    costs = [create_map(spec, site(n=n), device="meta").cost(n).multiply_adds for n in (256, 1024, 4096)]
    most = 8.1 if "monarch" in spec else 5.01 if "circulant" in spec or "toeplitz" in spec else 4.001
    assert costs[2] <= most * costs[1] <= most**2 * costs[0]


def test_ops_by_hand():
    product = Op("linear", (10, 6, 8, 2))
    assert product.multiply_adds == 10 * 2 * 3 * 4
    assert product.elements == 10 * 6 + 2 * 3 * 4 + 10 * 8
    conv = Op("depthwise", (3, 4), (3, 5), 7)
    assert conv.multiply_adds == 12 * 15 * 7
    assert conv.elements == 2 * 12 * 7 + 15 * 7
    matmul = Op("matmul", (2, 3, 4, 5))
    assert matmul.multiply_adds == 2 * 3 * 4 * 5
    assert matmul.elements == 2 * (12 + 20 + 15)
    attention = Op("attention", (2, 3, 4, 5))
    assert attention.multiply_adds == 2 * (3 * 5 * 4 + 3 * 4 * 5)
    assert attention.elements == 2 * (3 * 5 + 2 * 4 * 5 + 3 * 5)
    cost = Cost(99, (product, conv), itemsize=2)
    assert cost.multiply_adds == product.multiply_adds + conv.multiply_adds
    assert cost.flops == 2 * cost.multiply_adds
    assert cost.bytes == 2 * (product.elements + conv.elements)


@pytest.mark.parametrize("blocks", [1, 2])
def test_cost_of_a_layer(blocks):
    layer = linear(6, 8, blocks)
    assert linear_op(10, layer) == Op("linear", (10, 6, 8, blocks))
    cost = cost_of(layer, [linear_op(10, layer)], torch.bfloat16)
    assert cost.parameters == 6 * 8 // blocks + 8
    assert cost.itemsize == 2


@pytest.mark.parametrize(("grid", "kernel", "counted"), [
    ((12, 6), (11, 11), (11, 11)), ((4, 3), (11, 11), (7, 5)), ((1, 63), (11, 11), (1, 11)),
    ((2, 2, 9), (3, 5, 7), (3, 3, 7)), ((13,), (11,), (11,)),
])  # fmt: skip
def test_cost_of_a_convolution_leaves_out_taps_that_touch_nothing(grid, kernel, counted):
    layer = conv(5, kernel, prefix=2)
    n = 2 + math.prod(grid)
    assert layer.cost_ops(n, grid) == [Op("depthwise", grid, counted, 5)]
    reached = layer.dense(n, grid)[0, 2:, 2:].count_nonzero().item()
    assert reached <= math.prod(grid) * math.prod(counted), "the formula must bound what is there"
