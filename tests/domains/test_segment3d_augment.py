"""Augmentations of point clouds: each keeps what it promises, and labels follow their points."""

import math
from pathlib import Path

import numpy
import pytest
import torch

from polymix.domains.segment3d import augment
from polymix.domains.segment3d.augment import Voxels, cropped, laid_over, mixed, recoloured, stretched, thinned, varied
from polymix.domains.segment3d.data import Cloud, Scans, Segment3dData, load
from polymix.domains.segment3d.layouts import Scan
from polymix.domains.segment3d.recipe import Segment3dRecipe
from polymix.domains.segment3d.task import Segment3dTask
from polymix.errors import OptionError
from polymix.train.registry import options_of

PLAIN = {"turn": False, "flip": False, "scale": 0.0}


def places(count=200):
    return torch.rand(count, 3, dtype=torch.float64) * torch.tensor([8.0, 6.0, 2.0])


def moved_by(x, recipe):
    """The places of points without features, changed."""
    return varied(x, recipe, Scan(Path("none.bin"), "semantickitti", None))[0]


def apart(x):
    return torch.cdist(x, x)


def test_nothing_changes_without_options_and_seeds_repeat():
    x = places()
    assert torch.equal(moved_by(x, Segment3dRecipe(**PLAIN)), x)
    recipe = Segment3dRecipe(jitter=0.01, tilt=0.05, elastic=True)
    torch.manual_seed(3)
    first = moved_by(x, recipe)
    torch.manual_seed(3)
    assert torch.equal(moved_by(x, recipe), first) and not torch.equal(moved_by(x, recipe), first)


def test_turning_and_tilting_keep_distances_and_tilt_is_bounded():
    x = places()
    for options in ({"turn": True}, {"tilt": math.pi / 64}, {"flip": True}):
        moved = moved_by(x, Segment3dRecipe(**{**PLAIN, **options}))
        torch.testing.assert_close(apart(moved), apart(x), atol=1e-6, rtol=1e-9)
    up = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 1.0]]).double()
    for _ in range(50):
        tip = moved_by(up, Segment3dRecipe(**PLAIN, tilt=0.1))[1]
        assert math.cos(0.1) ** 2 - 1e-9 <= float(tip[2]) < 1, "at most 0.1 about each of two axes"


def test_half_of_the_clouds_are_rotated_about_each_axis_where_asked():
    """As Pointcept does, each axis for itself, so that a quarter is not tilted; by default all are."""
    torch.manual_seed(0)
    tips = torch.eye(3, dtype=torch.float64)

    def still(**options):
        recipe = Segment3dRecipe(**{**PLAIN, **options})
        return sum(torch.equal(moved_by(tips, recipe), tips) for _ in range(400))

    assert 150 < still(turn=True, turned=0.5) < 250 and 60 < still(tilt=0.5, turned=0.5) < 140
    assert still(turn=True) == still(tilt=0.5) == 0 and still(turn=True, tilt=0.5, turned=0.0) == 400


def test_jitter_is_bounded_and_a_twentieth_of_the_clouds_is_not_stretched():
    torch.manual_seed(0)
    x = places(20_000)
    shift = (moved_by(x, Segment3dRecipe(**PLAIN, jitter=0.005)) - x).abs()
    assert 0.0175 < float(shift.max()) <= 0.02 + 1e-9, "Pointcept's clip"
    few = places(5)
    still = sum(torch.equal(moved_by(few, Segment3dRecipe(**PLAIN, elastic=True)), few) for _ in range(200))
    assert 2 <= still <= 22


def test_a_voxel_has_the_features_and_the_label_of_one_of_its_points():
    """The first by default; with random points each of them in turn, and the label of the same one."""
    points = numpy.array([[0.1, 0, 0, 5], [0.2, 0, 0, 6], [0.3, 0, 0, 7], [1.5, 0, 0, 8]], dtype=numpy.float32)
    classes = numpy.array([0, 1, 2, 3])
    assert Cloud(points, classes, 1.0).labels.tolist() == [0, 3]
    torch.manual_seed(0)
    clouds = [Cloud(points, classes, 1.0, "none", random_points=True) for _ in range(100)]
    assert {cloud.labels[0].item() for cloud in clouds} == {0, 1, 2}
    assert all(torch.equal(cloud.features[:, 0].long(), cloud.labels + 5) for cloud in clouds)
    assert all(torch.equal(cloud.labels[cloud.inverse[3:]], torch.tensor([3])) for cloud in clouds)


def test_places_are_features_as_the_recipe_says(room):
    """Pointcept's nuScenes gives x, y and z in metres, its ScanNet colours and normals alone: six, not nine."""
    points = numpy.array([[20.0, 0, 0, 0.5], [40.0, 0, 0, 0.7]], dtype=numpy.float32)
    expected = {"centred": [[-1, 0, 0, 0.5], [1, 0, 0, 0.7]], "metres": points.tolist(), "none": [[0.5], [0.7]]}
    for coordinates, features in expected.items():
        torch.testing.assert_close(Cloud(points, None, 1.0, coordinates).features, torch.tensor(features).float())
    for coordinates, inputs in (("centred", 9), ("metres", 9), ("none", 6)):
        data = load(Segment3dRecipe(data=str(room), coordinates=coordinates), room, print)
        assert data.features == inputs == data.train[0].features.shape[1] == data.test[0].features.shape[1]
        assert Segment3dTask(data.train.recipe).build(data).inputs == inputs
    for part in ("train", "val"):
        for name in ("color", "normal"):
            (room / part / "scene" / f"{name}.npy").unlink()
    bare = load(Segment3dRecipe(data=str(room), coordinates="none"), room, print)
    with pytest.raises(OptionError, match="places alone"):
        Segment3dTask(bare.train.recipe).build(bare)


def test_elastic_moves_neighbours_alike_and_distant_points_differently():
    torch.manual_seed(0)
    x = places(2000)
    shift = stretched(x, 0.8, 1.6) - x
    near = x + 0.01
    torch.manual_seed(0)
    places(2000)
    both = stretched(torch.cat((x, near)), 0.8, 1.6) - torch.cat((x, near))
    close = (both[:2000] - both[2000:]).norm(dim=1)
    assert 0.02 < float(shift.norm(dim=1).mean()) < 1.6 and float(close.max()) < 0.1
    assert float((shift[:1000] - shift[1000:]).norm(dim=1).mean()) > 5 * float(close.mean())


def test_a_fifth_of_the_points_is_left_out_a_fifth_of_the_time():
    torch.manual_seed(0)
    recipe = Segment3dRecipe(drop=True)
    clouds = [thinned(1000, recipe) for _ in range(500)]
    left = [part for part in clouds if part is not None]
    assert 60 < len(left) < 140
    assert all(len(part) == 800 and bool((part.diff() > 0).all()) for part in left)
    assert thinned(1000, Segment3dRecipe()) is None and len(thinned_one()) == 1


def thinned_one():
    """One point stays one point."""
    while (left := thinned(1, Segment3dRecipe(drop=True))) is None:
        pass
    return left


def test_clouds_laid_over_each_other_keep_labels_and_each_voxel_once():
    torch.manual_seed(0)
    parts = []
    for label, size in ((1, 9), (2, 5)):
        grid = torch.cartesian_prod(*[torch.arange(size)] * 3)
        parts.append(Voxels(torch.full((len(grid), 2), float(label)), grid, torch.full((len(grid),), label)))
    both = laid_over(*parts)
    assert len(both.grid.unique(dim=0)) == len(both.grid) == 9**3, "the small cube lies within the large one"
    assert (both.labels == 1).all() and (both.features == 1).all(), "the first cloud's voxels stay"
    other = laid_over(*parts[::-1])
    assert int((other.labels == 2).sum()) == 5**3 and len(other.grid) == 9**3
    middle = other.grid[other.labels == 2].double().mean(0)
    assert torch.equal(middle, torch.full((3,), 4.0).double()), "middles in one place"
    assert torch.equal(other.features[:, 0].long(), other.labels), "features follow"


def test_mixing_happens_as_often_as_asked_and_keeps_the_odd_one(tmp_path):
    torch.manual_seed(0)
    recipe = Segment3dRecipe(mix=0.8, scans=5, test_scans=1, voxel=1.0)
    data = load(recipe, tmp_path, lambda text: None)
    clouds = [data.train[place] for place in range(5)]
    counts = [len(data.collate(clouds)[2]) - 1 for _ in range(60)]
    assert set(counts) == {3, 5} and 36 <= counts.count(3) <= 58
    one = Segment3dData(
        data.name, data.classes, data.inputs, Scans(data.train.scans, Segment3dRecipe(voxel=1.0)), data.test
    )
    features, grid, offsets, labels, points = one.collate(clouds)
    assert (
        len(offsets) == 6 and len(features) == len(grid) == len(labels) and points == sum(len(c.points) for c in clouds)
    )
    parts = [Voxels(cloud.features, cloud.grid, cloud.labels) for cloud in clouds]
    assert mixed(parts, Segment3dRecipe()) is parts
    assert augment.mixed(parts[:1], Segment3dRecipe(mix=1.0))[0] is parts[0]


def test_windows_by_stage_and_options_out_of_range():
    recipe = Segment3dRecipe().changed(window="4096,4096,1024")
    assert recipe.windows() == [4096, 4096, 1024]
    assert Segment3dRecipe(window=(64, 0, 32)).windows() == [64, None, 32]
    assert Segment3dRecipe().changed(window="64").windows() == [64] * 3, "a word of the command line"
    assert Segment3dRecipe(orders="hilbert, z").orders == ("hilbert", "z")
    for word, named in (("window=64,32", "3 for 3 depths"), ("mix=1.5", "mix"), ("elastic=2", "elastic"),
                        ("tilt=-1", "tilt")):  # fmt: skip
        with pytest.raises(OptionError, match=named):
            Segment3dRecipe().changed(**options_of([word], {}))


@pytest.fixture
def room(tmp_path):
    """A scene with colours and normals, and the numbers of a point where the normals are."""
    for part in ("train", "val"):
        scene = tmp_path / part / "scene"
        scene.mkdir(parents=True)
        rng = numpy.random.default_rng(0)
        normals = rng.normal(size=(300, 3))
        arrays = {"coord": rng.uniform(0, 4, (300, 3)), "color": rng.integers(0, 255, (300, 3)).astype(numpy.uint8),
                  "normal": normals / numpy.linalg.norm(normals, axis=1, keepdims=True),
                  "segment": rng.integers(0, 3, 300)}  # fmt: skip
        for name, values in arrays.items():
            numpy.save(scene / f"{name}.npy", values.astype(numpy.float32) if name in ("coord", "normal") else values)
    return tmp_path


def test_normals_turn_with_the_places_and_stay_of_length_one(room):
    scan = Scan(room / "train/scene", "pointcept", None)
    points = torch.from_numpy(scan.points())
    assert scan.normals == slice(6, 9)
    points[:, :3] = points[:, 6:9]  # places that are directions
    moved, features = varied(points, Segment3dRecipe(scale=0.0, tilt=0.5), scan)
    torch.testing.assert_close(moved.float(), features[:, 3:6])
    assert not torch.allclose(features[:, 3:6], points[:, 6:9]) and torch.equal(features[:, :3], points[:, 3:6])


def test_colours_change_within_their_range_and_need_colours(room, tmp_path):
    torch.manual_seed(0)
    colours = torch.rand(200, 3) * 2 - 1
    samples = torch.stack([recoloured(colours) for _ in range(200)])
    assert samples.abs().max() <= 1 and 0.02 < float((samples - colours).abs().mean()) < 0.2
    assert len(load(Segment3dRecipe(data=str(room), colour=True), room, print).train[0].features) > 0
    for part in ("train", "val"):
        (room / part / "scene" / "color.npy").unlink()
    with pytest.raises(OptionError, match=r"colour.*no color\.npy"):
        load(Segment3dRecipe(data=str(room), colour=True), room, print)


def test_a_crop_is_the_ball_around_one_of_its_voxels():
    torch.manual_seed(0)
    grid = torch.cartesian_prod(*[torch.arange(9)] * 3)
    whole = Voxels(torch.arange(len(grid))[:, None].float(), grid, torch.arange(len(grid)))
    assert cropped(whole, 0) is whole and cropped(whole, 729) is whole
    part = cropped(whole, 100)
    assert len(part.grid) == 100 and torch.equal(grid[part.labels], part.grid) and (part.labels.diff() > 0).all()
    squares = ((grid[:, None] - grid[None]) ** 2).sum(-1)
    present = torch.zeros(len(grid), dtype=torch.bool)
    present[part.labels] = True
    assert any(squares[k][present].max() <= squares[k][~present].min() for k in part.labels.tolist())
