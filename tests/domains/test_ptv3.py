"""Voxels, curves, sparse convolutions, windows and PTv3, held to slow definitions."""

from itertools import pairwise, permutations, product
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polymix.domains.segment3d.along import AlongCurve
from polymix.domains.segment3d.convolution import Neighbours, SubmanifoldConv3d
from polymix.domains.segment3d.curves import _skilling, hilbert, serialize, z_order
from polymix.domains.segment3d.grid import pool, voxelize
from polymix.domains.segment3d.ptv3 import PTv3
from polymix.domains.segment3d.recipe import ORDERS, Segment3dRecipe
from polymix.domains.segment3d.task import Segment3dTask
from polymix.errors import OptionError, ShapeError
from polymix.mixers import (
    LinearFloorConfig,
    PadreConfig,
    PolyNlConfig,
    PolySaConfig,
    PomConfig,
    QtConfig,
    SoftmaxConfig,
)
from polymix.mixers.spec import parse_mixer

SMALL = {"inputs": 3, "classes": 4, "depths": (1, 1), "channels": (8, 16), "heads": (2, 2), "decoder_depths": (1,),
         "decoder_channels": (8,), "decoder_heads": (2,), "window": 8}  # fmt: skip
MIXERS = [SoftmaxConfig(), PomConfig(), PadreConfig(), LinearFloorConfig(), QtConfig(), PolyNlConfig(),
          parse_mixer("linear")[1]]  # fmt: skip


def cube(side):
    return torch.cartesian_prod(*[torch.arange(side)] * 3)


def clouds(*sizes):
    """Random voxels of some clouds: the packed grid and the offsets."""
    torch.manual_seed(0)
    grids = [voxelize(torch.rand(n, 3) * 6, 1.0).grid for n in sizes]
    return torch.cat(grids), torch.tensor([0, *map(len, grids)]).cumsum(0)


@given(st.lists(st.tuples(*[st.integers(0, 65_535)] * 3), min_size=1, max_size=20))
def test_z_order_takes_the_bits_in_turn(places):
    def slow(x, y, z):
        return int("".join(a + b + c for a, b, c in zip(f"{x:016b}", f"{y:016b}", f"{z:016b}", strict=True)), 2)

    assert z_order(torch.tensor(places)).tolist() == [slow(*place) for place in places]


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_hilberts_curve_visits_every_voxel_and_goes_from_face_to_face(depth):
    grid = cube(1 << depth)
    codes = hilbert(grid, depth)
    assert sorted(codes.tolist()) == list(range(8**depth))
    path = grid[codes.argsort()]
    assert ((path[1:] - path[:-1]).abs().sum(1) == 1).all(), "voxels that follow each other share a face"


def test_hilberts_curve_is_eight_smaller_ones_turned_and_mirrored():
    """Its recursive definition: in each octant, in the order of the octants along the curve of depth 1, the curve of one
    depth less, with axes exchanged and reversed."""
    symmetries = [(axes, signs) for axes in permutations(range(3)) for signs in product((False, True), repeat=3)]
    for depth in (2, 3, 4):
        half = 1 << depth - 1
        path, smaller = (cube(1 << d)[hilbert(cube(1 << d), d).argsort()] for d in (depth, depth - 1))
        mirrored = {
            tuple((half - 1 - smaller[:, axis] if back else smaller[:, axis]) .tolist()[k]
                  for k in range(len(smaller)) for axis, back in zip(axes, signs, strict=True))
            for axes, signs in symmetries
        }  # fmt: skip
        octants = cube(2)[hilbert(cube(2), 1).argsort()]
        for octant, part in zip(octants, path.split(half**3), strict=True):
            assert ((part // half) == octant).all(), "octants follow the curve of depth 1"
            assert tuple((part % half).flatten().tolist()) in mirrored


@pytest.mark.parametrize("depth", range(1, 17))
def test_hilberts_curve_is_skillings_at_every_depth(depth):
    """The table that follows four levels at once agrees with the algorithm that goes bit by bit."""
    torch.manual_seed(depth)
    grid = torch.randint(0, 1 << depth, (500, 3))
    assert torch.equal(hilbert(grid, depth), _skilling(grid, depth))


def test_hilberts_curve_is_whole_at_depth_16():
    """Among the neighbours of a voxel are the one before it and the one after it."""
    torch.manual_seed(0)
    grid = torch.randint(1, 65_535, (300, 3))
    steps = torch.cat((torch.eye(3), -torch.eye(3))).long()
    codes, near = hilbert(grid), hilbert((grid[:, None] + steps).flatten(0, 1)).view(-1, 6)
    for step in (-1, 1):
        assert (near == codes[:, None] + step).sum(1).eq(1).all()
    assert int(hilbert(torch.tensor([[65_535, 0, 0]]))) == 8**16 - 1


@pytest.mark.parametrize("curve", [z_order, hilbert])
def test_the_code_of_a_coarser_voxel_lacks_three_bits(curve):
    """Pooling relies on it: the eight voxels of a coarser one follow each other."""
    torch.manual_seed(0)
    grid = torch.randint(0, 65_536, (500, 3))
    assert torch.equal(curve(grid, 16) >> 3, curve(grid >> 1, 15))


def test_clouds_stay_apart_and_x_and_y_are_exchanged():
    grid = cube(4)
    cloud = torch.arange(64) % 2
    for order in ORDERS:
        codes = serialize(grid, cloud, order)
        assert codes[cloud == 0].max() < codes[cloud == 1].min() and len(codes.unique()) == 64
    for curve in ("z", "hilbert"):
        exchanged = serialize(grid[:, [1, 0, 2]], cloud, curve)
        assert torch.equal(serialize(grid, cloud, f"{curve}-trans"), exchanged)
    most = torch.full((64,), (1 << 15) - 1)
    assert (serialize(grid, most, "z", depth=16) > 0).all(), "15 bits of clouds above 48 of the curve"
    with pytest.raises(ShapeError, match="32,769 clouds"):
        serialize(grid, most + 1, "z")
    with pytest.raises(ShapeError, match="larger depth"):
        serialize(grid, cloud, "z", depth=1)
    with pytest.raises(OptionError, match="order"):
        serialize(grid, cloud, "peano")


def test_voxels_and_their_points():
    points = torch.tensor([[0.1, 0.1, 0.1], [1.2, 0.0, 0.0], [0.4, 0.3, 0.2], [-0.5, 0.0, 0.0]])
    voxels = voxelize(points, 0.5)
    assert voxels.inverse.tolist() == [1, 2, 1, 0] and voxels.first.tolist() == [3, 0, 1]
    assert voxels.grid.tolist() == [[0, 0, 0], [1, 0, 0], [3, 0, 0]]
    assert len(voxelize(points[:1], 0.5).grid) == 1
    for bad, said in ((points[:0], "empty"), (points / 0, "finite"), (points * 1e6, "larger voxels")):
        with pytest.raises(ShapeError, match=said):
            voxelize(bad, 0.5)


def test_pooling_joins_voxels_of_two():
    grid, offsets = clouds(40, 60)
    cloud = torch.arange(2).repeat_interleave(offsets.diff())
    codes = torch.stack([serialize(grid, cloud, order) for order in ORDERS])
    coarse, places, inverse = pool(codes, grid)
    assert torch.equal(places[inverse], grid >> 1) and (coarse[0].diff() > 0).all()
    assert len(torch.cat((places, (coarse[0] >> 45)[:, None]), 1).unique(dim=0)) == len(places)


@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_a_sparse_convolution_is_the_dense_one_at_the_voxels(kernel):
    """Forward and backward, to rounding, and two clouds do not see each other."""
    grid, offsets = clouds(50, 30)
    cloud = torch.arange(2).repeat_interleave(offsets.diff())
    sparse = SubmanifoldConv3d(3, 4, kernel).double()
    dense = torch.nn.Conv3d(3, 4, kernel, padding=kernel // 2, dtype=torch.float64)
    with torch.no_grad():
        dense.weight.copy_(sparse.weight.unflatten(0, (kernel,) * 3).permute(4, 3, 0, 1, 2))
        dense.bias.copy_(sparse.bias)
    x = torch.randn(len(grid), 3, dtype=torch.float64, requires_grad=True)
    volume = torch.zeros(2, 8, 8, 8, 3, dtype=torch.float64).index_put((cloud, *grid.unbind(1)), x)
    expected = dense(volume.permute(0, 4, 1, 2, 3)).permute(0, 2, 3, 4, 1)[(cloud, *grid.unbind(1))]
    output = sparse(x, Neighbours.of(grid, cloud, kernel))
    torch.testing.assert_close(output, expected, atol=1e-12, rtol=1e-12)
    weight = torch.randn_like(output)
    mine = torch.autograd.grad((output * weight).sum(), (x, sparse.weight, sparse.bias))
    theirs = torch.autograd.grad((expected * weight).sum(), (x, dense.weight, dense.bias))
    mine = (mine[0], mine[1].unflatten(0, (kernel,) * 3).permute(4, 3, 0, 1, 2), mine[2])
    for left, right in zip(mine, theirs, strict=True):
        torch.testing.assert_close(left, right, atol=1e-12, rtol=1e-12)


def test_a_stage_finds_its_neighbours_once(monkeypatch):
    """Two blocks a stage and the decoder share the pairs of their stage; the stem has its own."""
    calls, run = [], Neighbours.of
    monkeypatch.setattr(Neighbours, "of", staticmethod(lambda *args: calls.append(args[2]) or run(*args)))
    grid, offsets = clouds(40, 30)
    model = PTv3(PomConfig(), **{**SMALL, "depths": (2, 2), "decoder_depths": (2,)}).eval()
    model(torch.randn(len(grid), 3), grid, offsets)
    assert sorted(calls) == [3, 3, 5]


def test_gradients_of_a_sparse_convolution():
    grid, _ = clouds(12)
    sparse = SubmanifoldConv3d(2, 2).double()
    near = Neighbours.of(grid, torch.zeros(len(grid), dtype=torch.int64), 3)
    x = torch.randn(len(grid), 2, dtype=torch.float64, requires_grad=True)
    parts = [parameter.detach().requires_grad_() for parameter in (sparse.weight, sparse.bias)]
    assert torch.autograd.gradcheck(
        lambda x, w, b: torch.func.functional_call(sparse, {"weight": w, "bias": b}, (x, near)), (x, *parts)
    )
    with pytest.raises(ShapeError, match="each voxel once"):
        Neighbours.of(grid[[0, 0]], torch.zeros(2, dtype=torch.int64), 3)
    with pytest.raises(ShapeError, match="kernel"):
        SubmanifoldConv3d(2, 2, 5).double()(x, near)


@pytest.mark.parametrize("window", [1, 4, 7, None])
@pytest.mark.parametrize("mixer", MIXERS, ids=lambda mixer: mixer.name)
def test_windows_along_a_curve(mixer, window):
    """Against one window at a time: the last one is filled up with the points before it, short clouds are one window."""
    lengths = [9, 3, 8, 1]
    along = AlongCurve(8, mixer.for_heads(2), window).double()
    x = torch.randn(sum(lengths), 8, dtype=torch.float64)
    order = torch.cat([start + torch.randperm(n) for start, n in zip((0, 9, 12, 20), lengths, strict=True)])
    expected = torch.empty_like(x)
    start = 0
    for n in lengths:
        mine, K = order[start : start + n], min(window or n, n)
        for first in range(0, n, K):
            low = min(first, n - K)
            options = {"grid": (K,)} if along.gridded else {}
            y = along.mixer(x[mine[low : low + K]][None], **options)[0]
            expected[mine[first : first + K]] = y[first - low :]
        start += n
    torch.testing.assert_close(along(x, order, lengths), expected)


@pytest.mark.parametrize("mixer", MIXERS, ids=lambda mixer: mixer.name)
@pytest.mark.parametrize("options", [{}, {"window": None}, {"window": (None, 4)}, {"cpe": False}], ids=str)
def test_a_cloud_does_not_depend_on_its_batch(mixer, options):
    torch.manual_seed(0)
    model = PTv3(mixer, **{**SMALL, **options}).eval()
    grid, offsets = clouds(30, 50, 1)
    x = torch.randn(len(grid), 3)
    together = model(x, grid, offsets)
    for start, end in pairwise(offsets):
        alone = model(x[start:end], grid[start:end], torch.tensor([0, end - start]))
        torch.testing.assert_close(together[start:end], alone, atol=2e-5, rtol=2e-5)


def test_training_draws_the_curves_and_evaluation_does_not():
    grid, offsets = clouds(60)
    model = PTv3(PomConfig(), **{**SMALL, "drop_path": 0.0})
    x = torch.randn(len(grid), 3)
    torch.manual_seed(0)
    outputs = [model(x, grid, offsets) for _ in range(6)]
    assert not all(torch.equal(outputs[0], other) for other in outputs)
    model.eval()
    assert torch.equal(model(x, grid, offsets), model(x, grid, offsets))
    one = PTv3(PomConfig(), **SMALL)(x[:1], grid[:1], torch.tensor([0, 1]))
    assert one.isfinite().all(), "a single voxel has no variance"


def test_the_published_size():
    """46.2 M parameters, and mixers by block: an alternating hybrid, and PoM everywhere."""
    with torch.device("meta"):
        size = sum(value.numel() for value in PTv3().parameters())
        hybrid = PTv3([PomConfig() if place % 2 else SoftmaxConfig() for place in range(22)])
    assert round(size / 1e6, 1) == 46.2
    mixers = [module.mixer.name for module in hybrid.modules() if isinstance(module, AlongCurve)]
    assert len(mixers) == 22 and mixers[:4] == ["softmax", "pom", "softmax", "pom"]


def parameters(mixer, **options):
    with torch.device("meta"):
        return sum(value.numel() for value in PTv3(mixer, **options).parameters())


def millions(count):
    return round(count / 1e6, 1)


@pytest.mark.slow
def test_no_usual_pom_has_the_printed_parameters():
    """PoM's paper prints 47.9 M, and 46.8 M for the hybrid, without the widths behind them."""
    with torch.device("meta"):
        blocks = [part for part in PTv3().modules() if isinstance(part, AlongCurve)]
    sides = [(part.mixer.dim, part.mixer.heads) for part in blocks]

    def mixer(dim, heads, degree, expand, bias, groups, gates):
        inner = int(expand * dim)
        gates = {"channels": inner, "heads": heads, "one": 1}[gates]
        return dim * inner // groups + dim * gates + inner * dim + inner * degree + bias * (inner + gates + dim)

    others = parameters(SoftmaxConfig()) - sum(4 * dim * dim + 4 * dim for dim, _ in sides)
    counts = {case: others + sum(mixer(*side, *case) for side in sides) for case in product(
        range(1, 9), (0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4), (False, True), (1, 2, 4, 8, 16), ("channels", "heads", "one"))}  # fmt: skip
    for degree, expand, bias, groups in ((2, 2, True, 1), (3, 1.5, False, 4)):
        config = PomConfig(degree=degree, expand=expand, bias=bias, groups=groups)
        assert counts[degree, expand, bias, groups, "channels"] == parameters(config)
    assert 47.9 not in map(millions, counts.values())
    for options, ratio in (({"expand": 2.5}, 3), ({"expand": 2}, 3.75), ({"expand": 2.75, "selection_heads": 1}, 4)):
        assert millions(parameters(PomConfig(**options), mlp_ratio=ratio)) == 47.9
    attention, hybrid = parameters(SoftmaxConfig()), parameters([PomConfig(), SoftmaxConfig()] * 11)
    assert 2 * (hybrid - attention) == parameters(PomConfig()) - attention, "half of each stage's blocks"
    assert millions((attention + 47.85e6) / 2) == millions((attention + 47.95e6) / 2 - 1e4) == 47.0, "printed: 46.8"


@pytest.mark.parametrize("mixer", [PomConfig(), PadreConfig(), PolySaConfig()])
def test_matched_blocks_have_the_parameters_of_attention(mixer):
    """As PoM's paper keeps them close; it prints 47.9 M, and as it is PoM makes 48.5 M."""
    attention, matched = parameters(SoftmaxConfig()), parameters(mixer, match_parameters=True)
    assert matched == pytest.approx(attention, rel=2e-4) and millions(parameters(PomConfig())) == 48.5
    recipe = Segment3dRecipe.tiny().changed(match_parameters=True, mixer="pom")
    model = Segment3dTask(recipe).build(SimpleNamespace(features=4, classes=range(3)))
    assert model.encoder[0][0].mlp[0].out_features < 4 * 8


@pytest.mark.parametrize(("options", "said"), [
    ({"depths": (1,)}, "channels"), ({"orders": ("z", "spiral")}, "orders"), ({"orders": ()}, "orders"),
    ({"window": (8,)}, "window"), ({"window": 0}, "window"), ({"mixer": [PomConfig()]}, "mixer"), ({"cpe": 2}, "cpe"),
    ({"drop_path": 1.5}, "drop_path"),
])  # fmt: skip
def test_options_that_do_not_fit(options, said):
    with pytest.raises(OptionError, match=said):
        PTv3(**{**SMALL, **options})


def test_inputs_that_do_not_fit():
    model, (grid, offsets) = PTv3(PomConfig(), **SMALL), clouds(20)
    x = torch.randn(len(grid), 3)
    for args, said in (
        ((x[:, :2], grid, offsets), "features"), ((x, grid.float(), offsets), "grid"), ((x, grid[:3], offsets), "grid"),
        ((x, grid, torch.tensor([0, 5])), "offsets"), ((x, grid, torch.tensor([0, 5, 5, len(x)])), "offsets"),
        ((x[:0], grid[:0], torch.tensor([0, 0])), "features"),
    ):  # fmt: skip
        with pytest.raises(ShapeError, match=said):
            model(*args)
