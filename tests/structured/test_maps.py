"""Every structured map equals its own dense matrix, forward and backward, on both sides, and so does its transpose."""

import copy
import itertools

import pytest
import torch

from polymix import errors
from polymix.structured import Site, create_map
from tests.helpers import close, jitter, slow_but, tokens
from tests.structured.cases import CAUSAL, DIM, F64, SPECS, TOKEN_ONLY, TOL, N, act, agree, of, plus, site


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("side", "spec"), [
    *itertools.product(("token", "channel"), SPECS), *(("token", spec) for spec in TOKEN_ONLY),
])  # fmt: skip
def test_a_map_is_its_dense_matrix(side, spec, groups):
    """Forward, gradients of the input and of every parameter, biased; and the same of the transpose, unbiased."""
    layer = jitter(create_map(spec, site(side, groups), bias=True, **F64))
    x = tokens(2, N, DIM)
    agree(layer, layer, lambda x: of(side, layer.dense(N), x, layer.bias), x)
    back = layer.transpose()
    close(back.dense(N), layer.dense(N).transpose(-1, -2), 1e-15)
    close(back(x), of(side, back.dense(N), x), TOL)
    assert back.transpose() is layer or spec.endswith("^T")


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("spec", list(CAUSAL))
def test_causal_maps(spec, groups):
    """No token reads a later one; a map that says it is recurrent goes on from its state as if there were no cut."""
    layer = jitter(create_map(spec, site("token", groups, causal=True), bias=True, **F64))
    matrix = layer.dense(N)
    assert not matrix.triu(1).any(), "a token reads a later one"
    agree(layer, layer, lambda x: of("token", layer.dense(N), x, layer.bias), tokens(2, N, DIM))
    assert layer.recurrent == CAUSAL[spec]
    if not layer.recurrent:
        return
    x, out = tokens(2, N, DIM), []
    memory = layer.start(2, x)
    shapes = [part.shape for part in memory]
    for start, stop in ((0, 1), (1, 4), (4, N)):
        y, memory = layer.scan(x[:, start:stop], memory, None)
        out.append(plus(y, layer.bias))
        assert [part.shape for part in memory] == shapes, "the state grows"
    close(torch.cat(out, 1), layer(x), TOL)


@pytest.mark.parametrize("spec", [spec for spec in SPECS if "@" not in spec])
@pytest.mark.parametrize("n", [1, 7])
def test_shorter_sequences_meet_the_leading_part(spec, n):
    layer = jitter(create_map(spec, site(), **F64))
    x = tokens(2, n, DIM)
    close(layer(x), act(layer.dense(n), x), TOL)
    if layer.fixed:
        whole = layer.dense(N)
        close(layer.dense(n), whole[..., :n, :n], 1e-15)
        with pytest.raises(errors.ShapeError, match="at most 12"):
            layer(tokens(2, N + 1, DIM))


@pytest.mark.parametrize("spec", ["dense", "low_rank:rank=3", "rank_one", "sparse:density=0.3", "mean",
                                  "dense+mean", "diagonal@dense", "low_rank:rank=2^T", "block_diagonal:blocks=2"])  # fmt: skip
@pytest.mark.parametrize("side", ["token", "channel"])
def test_maps_between_two_lengths(side, spec):
    where = Site(side, DIM, 24, 8) if side == "channel" else Site(side, DIM, 10, 6)
    layer = jitter(create_map(spec, where, bias=True, **F64))
    x = tokens(2, 10, DIM)
    matrix = layer.dense(10)
    assert matrix.shape == ((24, 8) if side == "channel" else (6, 10))
    agree(layer, layer, lambda x: of(side, layer.dense(10), x, layer.bias), x)


@pytest.mark.parametrize("spec", ["toeplitz", "circulant"])
def test_filters_of_no_told_length_are_implicit_and_take_any(spec):
    layer = jitter(create_map(spec, Site("token", DIM), **F64))
    for n in (1, 5, 40):
        x = tokens(2, n, DIM)
        close(layer(x), act(layer.dense(n), x), TOL)
    assert create_map(spec, Site("token", DIM, N, N)).curve is None


def test_bands_wider_than_the_map():
    layer = jitter(create_map("banded:lower=5:upper=2", Site("token", 4, 3, 3), **F64))
    x = tokens(2, 3, 4)
    close(layer(x), act(layer.dense(3), x), TOL)


@pytest.mark.parametrize("spec", SPECS)
def test_padding_reads_as_zero(spec):
    layer = jitter(create_map(spec, site(), **F64))
    mask = torch.ones(2, N, dtype=torch.bool)
    mask[0, 9:] = mask[1, 4] = False
    x = tokens(2, N, DIM)
    noisy = x.masked_fill(~mask[..., None], float("nan"))
    assert torch.equal(layer(noisy, mask=mask), layer(x.masked_fill(~mask[..., None], 0.0), mask=mask))
    if "mean" not in spec and "@" not in spec:
        close(layer(x, mask=mask), layer(x.masked_fill(~mask[..., None], 0.0)), TOL)


def test_the_mean_counts_real_tokens_alone():
    layer = create_map("mean", site(), **F64)
    mask = torch.ones(2, N, dtype=torch.bool)
    mask[0, 3:], mask[1] = False, False
    y = layer(x := tokens(2, N, DIM), mask=mask)
    close(y[0, 5], x[0, :3].mean(0), TOL)
    assert not y[1].any()


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("side", ["token", "channel"])
def test_second_derivatives(side, spec):
    layer = jitter(
        create_map(
            spec,
            site(side, n=6, dim=12).__class__(side, 12, 6 if side == "token" else 12, 6 if side == "token" else 12),
            **F64,
        )
    )
    x = tokens(1, 6, 12).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: layer(x).sin(), (x,), fast_mode=True)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("side", ["token", "channel"])
def test_types_and_copies(side, spec):
    """bf16 near float32, deep copies and state dicts, the meta device."""
    torch.manual_seed(0)
    layer = create_map(spec, site(side), bias=True)
    x = tokens(2, N, DIM, dtype=torch.float32)
    y = layer(x)
    assert torch.equal(copy.deepcopy(layer)(x), y)
    torch.manual_seed(1)
    fresh = create_map(spec, site(side), bias=True)
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh(x), y)
    low = copy.deepcopy(layer).to(torch.bfloat16)(x.to(torch.bfloat16))
    assert low.dtype == torch.bfloat16
    close(low.float(), y, 0.05)
    assert all(p.is_meta for p in create_map(spec, site(side), bias=True, device="meta").parameters())


# A graph of each kind of map is compiled in every run, those of their combinations in slow ones.
COMPILED = {
    "dense",
    "block_diagonal:blocks=2",
    "low_rank:rank=3",
    "banded:lower=2",
    "depthwise:kernel=3",
    "circulant",
    "toeplitz",
    "monarch",
    "mean",
}


@pytest.mark.parametrize("spec", slow_but(COMPILED, SPECS))
@pytest.mark.parametrize("side", ["token", "channel"])
def test_one_compiled_graph(side, spec):
    torch.manual_seed(0)
    layer = create_map(spec, site(side), bias=True)
    x = tokens(2, N, DIM, dtype=torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    close(compiled(x), layer(x), 1e-5)
