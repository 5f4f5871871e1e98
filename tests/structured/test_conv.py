"""The depthwise token maps equal their dense matrices, on grids, with prefix tokens and padding."""

import math

import pytest
import torch

from polymix.structured import Site, token_map
from tests.helpers import close, tokens
from tests.structured.cases import TOL, act, agree, conv, plus

GRIDS = [
    ((1,), (11,)), ((2,), (3,)), ((13,), (11,)), ((63,), (1,)), ((100,), (11,)), ((5, 7), (11, 11)), ((3, 9), (3, 5)),
    ((1, 63), (11, 11)), ((1, 1), (3, 3)), ((2, 3, 4), (3, 3, 3)), ((1, 5, 2), (11, 3, 5)),
]  # fmt: skip


@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize(("grid", "kernel"), GRIDS, ids=str)
@pytest.mark.parametrize("prefix", [0, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_depthwise(grid, kernel, prefix, bias, dilation):
    layer = conv(5, kernel, prefix=prefix, bias=bias, dilation=dilation)
    n = prefix + math.prod(grid)
    assert layer.dense(n, grid).shape == (5, n, n)
    agree(layer, lambda x: layer(x, grid), lambda x: plus(act(layer.dense(n, grid), x), layer.bias), tokens(2, n, 5))
    if not prefix:
        close(layer.transpose()(x := tokens(2, n, 5), grid), act(layer.dense(n, grid).transpose(1, 2), x), TOL)


@pytest.mark.parametrize("n", [1, 2, 63, 100])
@pytest.mark.parametrize("kernel", [1, 2, 4, 11])
@pytest.mark.parametrize("dilation", [1, 3])
def test_causal(n, kernel, dilation):
    layer = conv(5, (kernel,), causal=True, bias=True, dilation=dilation)
    assert not layer.dense(n).triu(1).any(), "a token reads a later one"
    agree(layer, layer, lambda x: plus(act(layer.dense(n), x), layer.bias), tokens(2, n, 5))


def test_the_dense_matrix_by_hand():
    """One channel, kernel (a b c): row n has a at n - 1, b at n, c at n + 1; a causal row ends at n."""
    open_, causal = conv(1, (3,)), conv(1, (3,), causal=True)
    apart = conv(1, (3,), dilation=2)
    with torch.no_grad():
        for layer in (open_, causal, apart):
            layer.weight[:] = torch.tensor([1.0, 2.0, 3.0])
    assert apart.dense(4)[0].tolist() == [[2, 0, 3, 0], [0, 2, 0, 3], [1, 0, 2, 0], [0, 1, 0, 2]]
    assert open_.dense(4)[0].tolist() == [[2, 3, 0, 0], [1, 2, 3, 0], [0, 1, 2, 3], [0, 0, 1, 2]]
    assert causal.dense(4)[0].tolist() == [[3, 0, 0, 0], [2, 3, 0, 0], [1, 2, 3, 0], [0, 1, 2, 3]]


@pytest.mark.parametrize("prefix", [0, 2])
def test_padding_on_a_grid_leaves_the_mean(prefix):
    layer, grid, n = conv(5, (3, 3), prefix=prefix, bias=True), (3, 4), prefix + 12
    mask = torch.rand(2, prefix + 12, generator=torch.Generator().manual_seed(0)) > 0.4

    def expected(x):
        x = x.masked_fill(~mask[..., None], 0.0)
        dense = layer.dense(n, grid)
        y = act(dense, x)
        count = mask[:, prefix:].sum(1).double()[:, None, None]
        first = dense[:, :prefix, :prefix], dense[:, :prefix, prefix:]
        y = torch.cat((act(first[0], x[:, :prefix]) + act(first[1], x[:, prefix:]) * 12 / count, y[:, prefix:]), 1)
        return plus(y, layer.bias)

    agree(layer, lambda x: layer(x, grid, mask), expected, tokens(2, n, 5))


def test_a_row_of_padding_alone_is_finite():
    y = conv(5, (3,), prefix=1)(tokens(2, 7, 5), (6,), torch.zeros(2, 7, dtype=torch.bool))
    assert not y.any()


@pytest.mark.parametrize(("dtype", "size"), [(torch.float16, 16384), (torch.bfloat16, 16384)])
def test_the_mean_of_many_tokens_does_not_overflow(dtype, size):
    """Its sum, kept in float32 at least, may pass what the mean's own type can hold."""
    layer = token_map("depthwise", Site("token", 2, kernel=(3,)), prefix=1, dtype=dtype)
    y = layer(torch.full((1, 1 + size, 2), 8.0, dtype=dtype), (size,))
    assert (y[:, 0] == 16).all()  # itself and the mean, each with weight one
