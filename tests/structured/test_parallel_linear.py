"""Channel maps equal their dense matrices, alone and several over the same channels."""

import itertools

import pytest
import torch

from polymix.structured import BlockDiagonal, Dense, Identity, ParallelLinear
from polymix.structured.dense import linear
from tests.helpers import jitter, tokens
from tests.structured.cases import F64, agree, plus, site


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
    dense = jitter(linear(6, 4, 2, **F64)).dense()
    assert dense.shape == (6, 4)
    assert not dense[:3, 2:].any()
    assert not dense[3:, :2].any()


def test_identity_is_nothing():
    layer, x = Identity(site()), tokens(2, 5, 6)
    assert layer(x) is x
    assert torch.equal(layer.dense(5), torch.eye(5))
    assert layer.bias is None
    assert not list(layer.parameters())


KINDS = [kinds for count in (1, 2, 3) for kinds in itertools.product(("dense", "identity", "monarch"), repeat=count)]


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_parallel_linear(kinds, heads, bias):
    """Each map apart equals its own matrix, whatever stands beside it in the shared product."""
    maps = jitter(ParallelLinear(kinds, 12, heads, bias, **F64))
    assert len(maps.cost_ops(7)) == ("dense" in kinds) + 2 * kinds.count("monarch")
    for i, kind in enumerate(kinds):
        matrix, b = maps.dense(i)
        if kind == "identity":
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


def test_parallel_linear_shares_one_product():
    maps = ParallelLinear(("dense", "identity", "dense"), 12, 1, True)
    assert [tuple(p.shape) for p in maps.parameters()] == [(24, 12), (24,)]
    assert not list(ParallelLinear(("identity",), 12, 1, True).parameters())


@pytest.mark.parametrize("heads", [1, 3])
def test_parallel_linear_scales_one_map_alone(heads):
    kinds = ("identity", "dense", "dense")
    maps = ParallelLinear(kinds, 12, heads, True, **F64)
    before = [maps.dense(i)[0] for i in (1, 2)]
    before = [matrix.detach().clone() for matrix in before]
    maps.scale_(2, 0.25)
    maps.scale_(0, 0.25)  # an identity has nothing to scale
    assert torch.equal(maps.dense(1)[0], before[0])
    assert torch.equal(maps.dense(2)[0], 0.25 * before[1])
