"""Every structured map equals its own dense matrix, forward and backward, on both sides, and so does its transpose;
init keeps variance; costs are counted."""

import copy
import itertools
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from polymix import errors
from polymix.structured import (
    BlockDiagonal,
    Cost,
    Dense,
    Fanout,
    Identity,
    Op,
    Prefixed,
    Site,
    create_map,
    list_maps,
    token_map,
)  # fmt: skip
from polymix.structured.cost import cost_of, linear_op
from polymix.structured.dense import linear
from tests.helpers import close, jitter, tokens

TOL = 1e-12
F64 = {"dtype": torch.float64}
DIM, N = 24, 12
SPECS = [
    "identity", "dense", "diagonal", "block_diagonal:blocks=2", "low_rank:rank=3", "rank_one", "banded:lower=2",
    "sparse:density=0.3:seed=4", "depthwise:kernel=3", "depthwise:kernel=3:dilation=2", "circulant",
    "circulant:filter=implicit", "circulant:length=5", "toeplitz", "toeplitz:filter=implicit", "toeplitz:length=5",
    "monarch", "monarch:blocks=6", "mean", "diagonal+low_rank:rank=2", "banded:lower=1@monarch",
    "toeplitz+mean@depthwise:kernel=3", "low_rank:rank=2^T", "toeplitz^T", "circulant^T+identity",
]  # fmt: skip
TOKEN_ONLY = ["banded:lower=2:upper=1", "circulant:shared=true", "toeplitz:shared=true"]
CAUSAL = {
    "identity": True,
    "dense": False,
    "diagonal": False,
    "block_diagonal:blocks=2": False,
    "low_rank:rank=3": False,
    "rank_one": False,
    "banded:lower=2": False,
    "sparse:density=0.3": False,
    "depthwise:kernel=4": True,
    "depthwise:kernel=3:dilation=2": True,
    "toeplitz": True,
    "toeplitz:length=5": True,
    "toeplitz:length=1": True,
    "toeplitz:filter=implicit": False,
    "toeplitz:shared=true": True,
    "mean": True,
    "mean+depthwise:kernel=2": True,
    "mean@toeplitz:length=3": True,
    "diagonal+mean": False,
}  # spec: whether it can go on from a state of fixed size


def site(side="token", groups=1, causal=False, n=N, dim=DIM):
    size = n if side == "token" else dim // groups
    return Site(side, dim, size, size, groups, causal)


def act(matrix, x):
    return torch.einsum("mn,bnd->bmd" if matrix.ndim == 2 else "dmn,bnd->bmd", matrix, x)


def of(side, matrix, x, bias=None):
    return plus(act(matrix, x) if side == "token" else x @ matrix, bias)


def plus(y, bias):
    return y if bias is None else y + bias


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


# Every structure


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


@pytest.mark.parametrize("spec", ["circulant", "monarch", "toeplitz^T", "diagonal+circulant", "mean@monarch"])
def test_maps_without_a_causal_form_say_so(spec):
    with pytest.raises(errors.OptionError, match="causal"):
        create_map(spec, site(causal=True))


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


@pytest.mark.parametrize("spec", ["identity", "depthwise", "monarch", "circulant", "toeplitz", "banded", "diagonal"])
def test_maps_of_one_length_say_so(spec):
    with pytest.raises(errors.OptionError, match="one length"):
        create_map(spec, Site("token", DIM, 10, 6))


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


def test_bands_wider_than_the_map():
    layer = jitter(create_map("banded:lower=5:upper=2", Site("token", 4, 3, 3), **F64))
    x = tokens(2, 3, 4)
    close(layer(x), act(layer.dense(3), x), TOL)


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
def test_types_copies_and_compile(side, spec):
    """bf16 near float32, deep copies and state dicts, the meta device, and one compiled graph."""
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
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    close(compiled(x), y, 1e-5)


def test_names():
    assert {"identity", "dense", "diagonal", "block_diagonal", "low_rank", "banded", "sparse", "depthwise", "circulant",
            "toeplitz", "monarch", "mean", "rank_one"} == set(list_maps())  # fmt: skip
    assert type(create_map("block-diagonal:blocks=2", site())) is BlockDiagonal
    assert type(create_map("Low-Rank", site())).kind == "low_rank"
    assert type(create_map("rank-1", site())).kind == "rank_one"
    assert type(create_map("mean_pooling", site())).kind == "mean"


@pytest.mark.parametrize(("spec", "kind", "word"), [
    ("monarc", errors.UnknownNameError, "monarch"), ("monarch:block=2", errors.OptionError, "blocks=…"),
    ("monarch:blocks=5", errors.OptionError, "divisor"), ("low_rank:rank=0", errors.OptionError, "rank"),
    ("depthwise:kernel=4", errors.OptionError, "odd"), ("toeplitz^2", errors.OptionError, "^T"),
    ("", errors.OptionError, "name of a structure"), ("dense+", errors.OptionError, "name of a structure"),
    ("mean:length=3", errors.OptionError, "no options"), ("circulant:filter=learned", errors.OptionError, "implicit"),
    ("sparse:density=2", errors.OptionError, "density"), ("depthwise:kernel=3x3", errors.OptionError, "kernel"),
])  # fmt: skip
def test_errors_name_what_is_allowed(spec, kind, word):
    with pytest.raises(kind, match=word.replace("^", r"\^")):
        create_map(spec, site())


@pytest.mark.parametrize("spec", ["toeplitz", "circulant"])
def test_filters_of_no_told_length_are_implicit_and_take_any(spec):
    layer = jitter(create_map(spec, Site("token", DIM), **F64))
    for n in (1, 5, 40):
        x = tokens(2, n, DIM)
        close(layer(x), act(layer.dense(n), x), TOL)
    assert create_map(spec, Site("token", DIM, N, N)).curve is None


@pytest.mark.parametrize("spec", ["dense", "monarch", "diagonal", "low_rank", "toeplitz:filter=explicit"])
def test_weights_that_belong_to_positions_need_a_length(spec):
    with pytest.raises(errors.OptionError, match=r"grid|length"):
        create_map(spec, Site("token", DIM))


def test_sparse_pattern_is_the_seed_s_and_in_the_state_dict():
    a, b, c = (create_map(f"sparse:seed={seed}", site()) for seed in (1, 1, 2))
    assert torch.equal(a.rows, b.rows)
    assert not (a.rows.shape == c.rows.shape and torch.equal(a.rows, c.rows) and torch.equal(a.columns, c.columns))
    assert {"rows", "columns"} <= a.state_dict().keys()


@pytest.mark.parametrize(
    "spec", ["depthwise:kernel=3", "toeplitz", "low_rank:rank=2", "mean", "identity", "circulant+mean"]
)
def test_prefix_tokens(spec):
    """Outside a map over positions; tokens among tokens for the others."""
    layer = jitter(token_map(spec, site(), prefix=2, bias=True, **F64))
    assert isinstance(layer, Prefixed) == any(kind in spec for kind in ("depthwise", "toeplitz", "circulant"))
    x = tokens(2, N + 2, DIM)
    close(layer(x), of("token", layer.dense(N + 2), x, layer.bias), TOL)


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
def test_fanout(kinds, heads, bias):
    """Each map apart equals its own matrix, whatever stands beside it in the shared product."""
    maps = jitter(Fanout(kinds, 12, heads, bias, **F64))
    assert len(maps.ops(7)) == ("dense" in kinds) + 2 * kinds.count("monarch")
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


def conv(dim, kernel, causal=False, prefix=0, bias=False, **options):
    spec = "depthwise" + "".join(f":{key}={value}" for key, value in options.items())
    where = Site("token", dim, causal=causal, kernel=kernel)
    return jitter(token_map(spec, where, prefix=prefix, bias=bias, **F64))


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
    layer = create_map("depthwise", Site("token", 192, kernel=kernel, causal=causal), bias=True)
    y = layer(tokens(2, math.prod(grid), 192, seed=1, dtype=torch.float32), grid).unflatten(1, grid)
    for axis, k in enumerate(kernel):
        y = y.narrow(1 + axis, k - 1, grid[axis] - 2 * (k - 1))
    assert y.var().item() == pytest.approx(1, rel=0.15)
    assert not layer.bias.any()


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
    layer = conv(5, kernel, prefix=2)
    n = 2 + math.prod(grid)
    assert layer.ops(n, grid) == [Op("depthwise", grid, counted, 5)]
    reached = layer.dense(n, grid)[0, 2:, 2:].count_nonzero().item()
    assert reached <= math.prod(grid) * math.prod(counted), "the formula must bound what is there"
