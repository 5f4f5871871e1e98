"""Every structured map equals its own dense matrix, forward and backward; init keeps variance; costs are counted."""

import itertools
import math

import pytest
import torch

from polymix.structured import BlockDiagonal, Cost, Dense, DepthwiseConv, Fanout, Identity, Op
from polymix.structured.channel import channel_map, linear
from polymix.structured.cost import cost_of, linear_op
from tests.helpers import close, jitter, tokens

TOL = 1e-12
F64 = {"dtype": torch.float64}


def plus(y, bias):
    return y if bias is None else y + bias


def mix(matrix, x):
    return torch.einsum("dmn,bnd->bmd", matrix, x)


def agree(module, apply, expected, *inputs):
    """The two functions of `inputs` and of the module's parameters have the same values and the same gradients."""
    inputs = [tensor.clone().requires_grad_() for tensor in inputs]
    leaves = [*inputs, *module.parameters()]
    y, z = apply(*inputs), expected(*inputs)
    assert y.shape == z.shape
    close(y, z, TOL)
    cotangent = tokens(*y.shape, seed=9)
    ours, theirs = (torch.autograd.grad(out, leaves, cotangent, allow_unused=True) for out in (y, z))
    for mine, dense in zip(ours, theirs, strict=True):
        assert (mine is None) == (dense is None), "one of the two ignores a parameter"
        if mine is not None:
            close(mine, dense, TOL)


# Channel maps


@pytest.mark.parametrize(("inside", "outside", "blocks"), [
    (1, 1, 1), (60, 60, 1), (6, 10, 1), (6, 10, 2), (60, 60, 60), (60, 15, 5),
])  # fmt: skip
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("n", [1, 63])
def test_dense_and_block_diagonal(inside, outside, blocks, bias, n):
    layer = jitter(linear(inside, outside, blocks, bias, **F64))
    assert isinstance(layer, Dense if blocks == 1 else BlockDiagonal)
    agree(layer, layer, lambda x: plus(x @ layer.dense(), layer.bias), tokens(2, n, inside))


def test_block_diagonal_is_zero_off_its_blocks():
    dense = jitter(BlockDiagonal(6, 4, 2, **F64)).dense()
    assert dense.shape == (6, 4)
    assert not dense[:3, 2:].any()
    assert not dense[3:, :2].any()


def test_identity_is_nothing():
    layer, x = Identity(), tokens(2, 5, 6)
    assert layer(x) is x
    assert layer.dense() is None
    assert layer.bias is None
    assert not list(layer.parameters())


@pytest.mark.parametrize(("kind", "heads", "expected"), [
    ("identity", 2, Identity), ("dense", 1, Dense), ("dense", 2, BlockDiagonal),
])  # fmt: skip
def test_channel_maps_by_name(kind, heads, expected):
    assert type(channel_map(kind, 6, heads, True)) is expected


KINDS = [kinds for count in (1, 2, 3) for kinds in itertools.product(("dense", "identity"), repeat=count)]


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_fanout(kinds, heads, bias):
    """Each map apart equals its own matrix, whatever stands beside it in the shared product."""
    maps = jitter(Fanout(kinds, 12, heads, bias, **F64))
    for i, kind in enumerate(kinds):
        matrix, b = maps.dense(i)
        if kind == "identity":
            assert matrix is None
            assert b is None
            assert torch.equal(maps(x := tokens(2, 7, 12))[i], x)
        else:
            assert (b is None) == (not bias)
            size = 12 // heads
            blocks = torch.block_diag(*[torch.ones(size, size)] * heads).bool()
            assert not matrix[~blocks].any(), "a head reads another head's channels"

            def dense(x, i=i):
                weight, bias = maps.dense(i)
                return plus(x @ weight, bias)

            agree(maps, lambda x, i=i: maps(x)[i], dense, tokens(2, 7, 12))


def test_fanout_shares_one_product():
    maps = Fanout(("dense", "identity", "dense"), 12, 1, True)
    assert [tuple(p.shape) for p in maps.parameters()] == [(24, 12), (24,)]
    assert not list(Fanout(("identity",), 12, 1, True).parameters())


@pytest.mark.parametrize("heads", [1, 3])
def test_fanout_scales_one_map_alone(heads):
    kinds = ("identity", "dense", "dense")
    maps = Fanout(kinds, 12, heads, True, **F64)
    before = [maps.dense(i)[0] for i in (1, 2)]
    before = [matrix.detach().clone() for matrix in before]
    maps.scale_(2, 0.25)
    maps.scale_(0, 0.25)  # an identity has nothing to scale
    assert torch.equal(maps.dense(1)[0], before[0])
    assert torch.equal(maps.dense(2)[0], 0.25 * before[1])


# Token maps

GRIDS = [
    ((1,), (11,)), ((2,), (3,)), ((13,), (11,)), ((63,), (1,)), ((100,), (11,)), ((5, 7), (11, 11)), ((3, 9), (3, 5)),
    ((1, 63), (11, 11)), ((1, 1), (3, 3)), ((2, 3, 4), (3, 3, 3)), ((1, 5, 2), (11, 3, 5)),
]  # fmt: skip


@pytest.mark.parametrize(("grid", "kernel"), GRIDS, ids=str)
@pytest.mark.parametrize("prefix", [0, 1, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_depthwise(grid, kernel, prefix, bias):
    conv = jitter(DepthwiseConv(5, kernel, num_prefix_tokens=prefix, bias=bias, **F64))
    n = prefix + math.prod(grid)
    assert conv.dense(grid).shape == (5, n, n)
    agree(conv, lambda x: conv(x, grid), lambda x: plus(mix(conv.dense(grid), x), conv.bias), tokens(2, n, 5))


@pytest.mark.parametrize("n", [1, 2, 63, 100])
@pytest.mark.parametrize("kernel", [1, 2, 4, 11])
def test_causal(n, kernel):
    conv = jitter(DepthwiseConv(5, (kernel,), causal=True, **F64))
    assert not conv.dense((n,)).triu(1).any(), "a token reads a later one"
    agree(conv, lambda x: conv(x, (n,)), lambda x: plus(mix(conv.dense((n,)), x), conv.bias), tokens(2, n, 5))


@pytest.mark.parametrize("kernel", [1, 4])
@pytest.mark.parametrize("cut", [1, 3, 8])
def test_causal_continues_from_its_past(kernel, cut):
    """After the last k - 1 inputs, the next chunk is what it is in the whole sequence; gradients flow into the past."""
    conv = jitter(DepthwiseConv(5, (kernel,), causal=True, **F64))
    n = 9

    def pieces(x):
        before = torch.nn.functional.pad(x[:, :cut], (0, 0, conv.reach, 0))
        return conv(x[:, cut:], (n - cut,), past=before[:, before.shape[1] - conv.reach :])

    agree(conv, pieces, lambda x: plus(mix(conv.dense((n,)), x), conv.bias)[:, cut:], tokens(2, n, 5))


def test_the_dense_matrix_by_hand():
    """One channel, kernel (a b c): row n has a at n - 1, b at n, c at n + 1; a causal row ends at n."""
    conv = DepthwiseConv(1, (3,), **F64)
    causal = DepthwiseConv(1, (3,), causal=True, **F64)
    with torch.no_grad():
        conv.weight[:] = causal.weight[:] = torch.tensor([1.0, 2.0, 3.0])
    assert conv.dense((4,))[0].tolist() == [[2, 3, 0, 0], [1, 2, 3, 0], [0, 1, 2, 3], [0, 0, 1, 2]]
    assert causal.dense((4,))[0].tolist() == [[3, 0, 0, 0], [2, 3, 0, 0], [1, 2, 3, 0], [0, 1, 2, 3]]


@pytest.mark.parametrize("prefix", [0, 2])
def test_padding_reads_as_zero_and_leaves_the_mean(prefix):
    conv, grid = jitter(DepthwiseConv(5, (3, 3), num_prefix_tokens=prefix, **F64)), (3, 4)
    mask = torch.rand(2, prefix + 12, generator=torch.Generator().manual_seed(0)) > 0.4

    def expected(x):
        x = x.masked_fill(~mask[..., None], 0.0)
        y = mix(conv.dense(grid), x)
        count = mask[:, prefix:].sum(1).double()[:, None, None]
        first = conv.dense(grid)[:, :prefix, :prefix], conv.dense(grid)[:, :prefix, prefix:]
        y = torch.cat((mix(first[0], x[:, :prefix]) + mix(first[1], x[:, prefix:]) * 12 / count, y[:, prefix:]), 1)
        return plus(y, conv.bias)

    agree(conv, lambda x: conv(x, grid, mask), expected, tokens(2, prefix + 12, 5))


def test_a_row_of_padding_alone_is_finite():
    conv = DepthwiseConv(5, (3,), num_prefix_tokens=1, **F64)
    y = conv(tokens(2, 7, 5), (6,), torch.zeros(2, 7, dtype=torch.bool))
    assert not y.any()


@pytest.mark.parametrize(("dtype", "size"), [(torch.float16, 16384), (torch.bfloat16, 16384)])
def test_the_mean_of_many_tokens_does_not_overflow(dtype, size):
    """Its sum, kept in float32 at least, may pass what the mean's own type can hold."""
    conv = DepthwiseConv(2, (3,), num_prefix_tokens=1, dtype=dtype)
    y = conv(torch.full((1, 1 + size, 2), 8.0, dtype=dtype), (size,))
    assert (y[:, 0] == 16).all()  # itself and the mean, each with weight one


# Init


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
    conv = DepthwiseConv(192, kernel, causal=causal)
    y = conv(tokens(2, math.prod(grid), 192, seed=1, dtype=torch.float32), grid).unflatten(1, grid)
    for axis, k in enumerate(kernel):
        y = y.narrow(1 + axis, k - 1, grid[axis] - 2 * (k - 1))
    assert y.var().item() == pytest.approx(1, rel=0.15)
    assert not conv.bias.any()


# Cost


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
    conv = DepthwiseConv(5, kernel, num_prefix_tokens=2)
    assert conv.op(grid) == Op("depthwise", grid, counted, 5)
    reached = conv.dense(grid)[0, 2:, 2:].count_nonzero().item()
    assert reached <= math.prod(grid) * math.prod(counted), "the formula must bound what is there"
