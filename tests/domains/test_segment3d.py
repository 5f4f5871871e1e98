"""Scans: readers on files in the real layouts, what is wrong in them, PTv3 trained and used by the commands."""

import json
import sys
from pathlib import Path

import numpy
import pytest
import torch

from polymix.cli import main
from polymix.domains.detect3d.recipe import Detect3dRecipe
from polymix.domains.detect3d.task import Detect3dTask
from polymix.domains.segment3d import metrics
from polymix.domains.segment3d.data import Cloud, check, load
from polymix.domains.segment3d.layouts import FROM_KITTI, KITTI, TO_KITTI, VOID, Scan
from polymix.domains.segment3d.losses import lovasz_softmax
from polymix.domains.segment3d.recipe import Segment3dRecipe
from polymix.domains.segment3d.synthetic import synthetic
from polymix.domains.segment3d.task import BLOCKS, Segment3dTask
from polymix.errors import DataError, OptionError
from polymix.files import output_names
from polymix.train.data.scans.lidar import BRIGHT, DARK, SURFACES, street
from polymix.train.optimizers import rated_groups
from polymix.train.recipe import Recipe
from polymix.train.run import train
from polymix.train.saved import SavedRun

TINY = Segment3dRecipe.tiny()


@pytest.fixture(scope="module")
def kitti(tmp_path_factory):
    return synthetic(tmp_path_factory.mktemp("kitti"), 0, 2, 1)


def command(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main([*map(str, arguments), "--threads", "1"])
    return stop.value.code or 0, *capsys.readouterr()


def copied(kitti, folder):
    for path in kitti.rglob("*.*"):
        if path.is_file() and path.suffix in (".bin", ".label"):
            target = folder / path.relative_to(kitti)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return folder


def pointcept(folder):
    for part in ("train", "val"):
        scene = folder / part / "scene0000_00"
        scene.mkdir(parents=True)
        rng = numpy.random.default_rng(0)
        numpy.save(scene / "coord.npy", rng.uniform(0, 4, (200, 3)).astype(numpy.float32))
        numpy.save(scene / "color.npy", rng.integers(0, 255, (200, 3)).astype(numpy.uint8))
        numpy.save(scene / "segment20.npy", rng.integers(-1, 3, (200, 1)))
    return folder


def test_the_maps_of_classes_agree():
    """A prediction that is written back has the number from which its class was read."""
    assert [FROM_KITTI[raw] for raw in TO_KITTI] == list(range(19)) and len(KITTI) == 19
    assert all(FROM_KITTI[raw] >= 0 for raw, _ in SURFACES.values())


def test_synthetic_scans_are_read_as_they_were_written(kitti):
    data = load(Segment3dRecipe(data=str(kitti)), kitti, print)
    assert (len(data.train), len(data.test), data.inputs, data.classes) == (2, 1, 4, KITTI)
    cloud = data.test[0]
    assert {KITTI[k] for k in numpy.unique(cloud.classes)} >= {"road", "building", "car", "sidewalk"}
    raw = numpy.fromfile(kitti / "sequences/08/labels/000000.label", dtype=numpy.uint32)
    assert (raw >> 16).max() > 10, "instances"
    assert numpy.array_equal([FROM_KITTI[k] for k in (raw & 0xFFFF).tolist()], cloud.classes)
    assert 8_000 < len(cloud.points) < 16_000 and numpy.abs(cloud.points[:, :3]).max() < 45


@pytest.mark.parametrize("question", ["houses", "same"])
def test_a_car_is_told_from_a_truck_by_the_houses_alone(question):
    """What a car reflects is as frequent among trucks; the houses decide, and are too far for convolutions."""
    counts = {}
    for place in range(100):
        solids = street(numpy.random.default_rng([0, 0, place]), question)
        (houses,) = {solid.shine for solid in solids if solid.surface == "building"}
        front = min(abs(house.centre[1]) - house.half[1] for house in solids if house.surface == "building")
        for solid in solids:
            if solid.surface in ("car", "truck"):
                assert (solid.shine == houses) == (solid.surface == "car")
                counts[solid.surface, solid.shine] = counts.get((solid.surface, solid.shine), 0) + 1
                assert abs(solid.centre[1]) + solid.half[1] + 3 < front
    assert len(counts) == (2 if question == "houses" else 4) and min(counts.values()) > 0.7 * max(counts.values())


def test_points_are_as_bright_as_the_solids_that_they_lie_on(tmp_path):
    folder = synthetic(tmp_path, 0, 1, 1, "same")
    cloud = load(Segment3dRecipe(data=str(folder)), folder, print).test[0]
    bright = {KITTI[k]: cloud.points[cloud.classes == k, 3].mean() for k in numpy.unique(cloud.classes)}
    assert min(abs(bright["building"] - share) for share in (DARK, BRIGHT)) < 0.02
    assert abs(bright["car"] - bright["building"]) < 0.02 and abs(bright["truck"] - bright["building"]) > 0.38


def test_a_street_that_asks_nothing_has_cars_alone():
    assert not any(solid.surface == "truck" or solid.shine for solid in street(numpy.random.default_rng(0), "what"))


def test_each_point_has_the_label_of_its_voxel_and_training_varies(kitti):
    data = load(Segment3dRecipe(data=str(kitti)), kitti, print)
    cloud = data.test[0]
    assert len(cloud.inverse) == len(cloud.points) and int(cloud.inverse.max()) + 1 == len(cloud.grid)
    assert (cloud.labels[cloud.inverse].numpy() == cloud.classes).mean() > 0.8
    one, two = data.train[0], data.train[0]
    assert one.grid.shape != two.grid.shape or not torch.equal(one.grid, two.grid)
    again = data.test[0]
    assert torch.equal(again.grid, cloud.grid)


def test_pointcepts_folders(tmp_path):
    data = load(Segment3dRecipe(data=str(pointcept(tmp_path))), tmp_path, print)
    assert (data.inputs, len(data.classes)) == (6, 3)
    assert set(numpy.unique(data.test[0].classes)) == {0, 1, 2, VOID}
    assert data.train[0].features.shape[1] == 6


def cut(folder):
    path = folder / "sequences/00/velodyne/000001.bin"
    path.write_bytes(path.read_bytes()[:-4])


def not_finite(folder):
    points = numpy.fromfile(folder / "sequences/00/velodyne/000001.bin", dtype=numpy.float32)
    points[4] = numpy.nan
    points.tofile(folder / "sequences/00/velodyne/000001.bin")


def fewer_labels(folder):
    numpy.zeros(3, numpy.uint32).tofile(folder / "sequences/00/labels/000001.label")


def unknown_label(folder):
    labels = numpy.fromfile(folder / "sequences/00/labels/000001.label", dtype=numpy.uint32)
    labels[7] = 77
    labels.tofile(folder / "sequences/00/labels/000001.label")


def no_labels(folder):
    (folder / "sequences/00/labels/000001.label").unlink()


def empty(folder):
    (folder / "sequences/00/velodyne/000001.bin").write_bytes(b"")


def longer_labels(folder):
    path = folder / "sequences/00/labels/000001.label"
    path.write_bytes(path.read_bytes() + b"abc")


def stray_labels(folder):
    (folder / "sequences/00/velodyne/000001.bin").unlink()


def far(folder):
    path = folder / "sequences/00/velodyne/000001.bin"
    points = numpy.fromfile(path, dtype=numpy.float32)
    points[4] = 1e6
    points.tofile(path)


def no_test(folder):
    (folder / "sequences/08").rename(folder / "sequences/11")


@pytest.mark.parametrize(("spoil", "said"), [
    (cut, "bytes"), (not_finite, "point 1"), (fewer_labels, "velodyne/000001.bin"), (unknown_label, "point 7: label 77"),
    (no_labels, "no labels"), (longer_labels, "bytes"), (stray_labels, "no scan"), (far, "65,536 voxels"), (empty, "without points"), (no_test, "sequence 08"),
])  # fmt: skip
def test_a_mistake_is_named_before_training(kitti, tmp_path, spoil, said):
    spoil(copied(kitti, tmp_path))
    with pytest.raises(DataError, match=said) as raised:
        load(Segment3dRecipe(data=str(tmp_path)), tmp_path, print)
    assert "000001" in str(raised.value) or spoil is no_test
    assert any(said in line for line in check(tmp_path))


@pytest.mark.parametrize("layout", ["semantickitti", "pointcept"])
def test_a_scan_larger_than_memory_is_refused_before_it_is_read(kitti, tmp_path, monkeypatch, layout):
    if layout == "semantickitti":
        scan = Scan(copied(kitti, tmp_path) / "sequences/00/velodyne/000001.bin", layout, None)
    else:
        numpy.save(tmp_path / "coord.npy", numpy.zeros((100, 3), numpy.float32))
        scan = Scan(tmp_path, layout, None)
    scan.points()
    for reader in ("numpy.fromfile", "numpy.load"):
        monkeypatch.setattr(reader, lambda *args, **kwargs: pytest.fail("read in spite of its size"))
    monkeypatch.setattr("polymix.train.data.scans.files.memory_of", lambda: 1000)
    with pytest.raises(DataError, match=r"larger than memory\. Cut it into smaller") as raised:
        scan.points()
    assert "\n" not in str(raised.value)


def test_points_too_far_apart_are_refused():
    far = numpy.array([[0, 0, 0, 0], [70_000, 0, 0, 0]], dtype=numpy.float32)
    with pytest.raises(Exception, match="at most 65,536"):
        Cloud(far, None, 1.0)


def test_a_folder_of_no_layout(tmp_path):
    for layout in (None, "pointcept"):
        with pytest.raises(DataError, match="sequences/NN"):
            load(Segment3dRecipe(data=str(tmp_path), layout=layout), tmp_path, print)
    with pytest.raises(OptionError, match="layout"):
        load(Segment3dRecipe(data=str(tmp_path), layout="las"), tmp_path, print)


@pytest.mark.parametrize("options", [
    {"channels": (8,)}, {"voxel": 0}, {"orders": ("peano",)}, {"orders": ()}, {"whole": 4}, {"decoder_depths": (1,)},
    {"drop_path": 1.0}, {"block_rate": 0}, {"cpe": 1}, {"window": (8, 8)},
])  # fmt: skip
def test_options_out_of_range(options):
    with pytest.raises(OptionError, match=next(iter(options))):
        Segment3dRecipe(**options)


def test_lovasz_softmax_is_the_jaccard_loss_where_predictions_are_certain():
    """It extends 1 - IoU: for shares of 0 and 1 both are equal, and a better guess lowers it."""
    labels, found = torch.tensor([0, 0, 1, 1, 2]), torch.tensor([0, 1, 1, 1, 0])
    certain = torch.nn.functional.one_hot(found, 3).double()
    expected = torch.tensor([1 - 1 / 3, 1 - 2 / 3, 1.0]).double().mean()
    torch.testing.assert_close(lovasz_softmax(certain, labels), expected)
    shares = torch.rand(5, 3, dtype=torch.float64).softmax(1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: lovasz_softmax(x, labels), shares)


def test_the_published_settings():
    paper = Segment3dRecipe().preset("paper")
    assert (paper.voxel, paper.learning_rate, paper.block_rate, paper.weight_decay) == (0.05, 2e-3, 0.1, 0.005)
    assert (paper.depths, paper.decoder_depths, paper.window, paper.cpe) == ((2, 2, 2, 6, 2), (2, 2, 2, 2), 1024, True)
    assert (paper.epochs, paper.batch_size, paper.drop_path, paper.one_cycle) == (50.0, 12, 0.3, True)
    assert (paper.mix, paper.final, paper.clip) == (0.8, 1e-3, None), "a tenth, and a hundredth of that at the end"
    rooms = Segment3dRecipe().preset("rooms")
    assert (rooms.voxel, rooms.learning_rate, rooms.weight_decay, rooms.epochs) == (0.02, 6e-3, 0.05, 800.0)
    assert (rooms.crop, rooms.mix, rooms.colour, rooms.elastic, rooms.drop) == (102_400, 0.8, True, True, True)
    assert Segment3dRecipe(whole=2).windows() == [None, None, 128] and Segment3dRecipe(window=0).windows() == [None] * 3


@pytest.mark.parametrize(("kind", "recipe"), [(Segment3dTask, Segment3dRecipe), (Detect3dTask, Detect3dRecipe)])
def test_one_cycle_is_the_published_one(kind, recipe):
    """A tenth, up along a cosine, and down to `final`; the first beta falls to 0.85 at the highest rate."""
    options = {"steps": 100, "warmup": 0.3, "final": 1e-4, "learning_rate": 1e-2}
    task = kind(recipe(**options, one_cycle=True))
    optimizer = task.optimizer(torch.nn.Linear(2, 2))
    schedule = task.schedule(optimizer)
    rates, betas = [], []
    for _ in range(100):
        rates.append(optimizer.param_groups[0]["lr"])
        betas.append(optimizer.param_groups[0]["betas"][0])
        optimizer.step()
        schedule.step()
    assert rates[0] == pytest.approx(1e-3) and rates[-1] == pytest.approx(1e-6)
    assert max(rates) == pytest.approx(1e-2) and rates.index(max(rates)) == 29
    assert betas[0] == pytest.approx(0.95) and betas[29] == pytest.approx(0.85)


def test_outputs_of_files_of_one_name():
    """Numbered, all of them where a numbered one would be another's name."""
    paths = [Path(name) for name in ("a/x.bin", "b/x.bin", "c/y.bin")]
    assert output_names(paths) == ["000-x", "001-x", "y"]
    assert output_names([*paths[:2], Path("000-x.bin")]) == ["000-x", "001-x", "002-000-x"]


def test_scans_are_as_wide_as_the_voxels_allow(kitti, tmp_path):
    """`--check` and training agree: 0.01 m is fine for these scans, and 0.001 m is too small once they are turned."""
    assert not check(kitti, voxel=0.01) and len(check(kitti, voxel=0.001)) == 3
    with pytest.raises(DataError, match="more than 65,536 voxels"):
        load(Segment3dRecipe(data=str(kitti), voxel=0.001), tmp_path, print)
    assert Segment3dRecipe(voxel=0.2, scale=0.25).smallest_voxel == 0.16


def test_the_blocks_learn_at_a_rate_of_their_own():
    model = torch.nn.ModuleDict({"encoder": torch.nn.Linear(2, 2), "head": torch.nn.Linear(2, 2)})
    groups = rated_groups(model, Recipe(weight_decay=0.1, learning_rate=1e-2), BLOCKS, 0.5)
    rates = {id(value): (group["lr"], group["weight_decay"]) for group in groups for value in group["params"]}
    expected = {"encoder.weight": (5e-3, 0.1), "encoder.bias": (5e-3, 0.0), "head.weight": (1e-2, 0.1),
                "head.bias": (1e-2, 0.0)}  # fmt: skip
    assert {name: rates[id(value)] for name, value in model.named_parameters()} == expected


def test_another_seed_has_other_scans(tmp_path):
    """Scans of seed 0 were once taken for those of seed 1 and back."""
    first = [Segment3dTask(TINY.changed(seed=seed)).load(tmp_path).test.read(0)[0] for seed in (0, 1, 0)]
    assert numpy.array_equal(first[0], first[2]) and not numpy.array_equal(first[0][:100], first[1][:100])


def test_the_paper_s_figures_stand_beside_semantic_kitti_in_its_ptv3_alone(kitti, monkeypatch):
    paper = Segment3dRecipe.paper().changed(data=kitti)
    assert Segment3dTask(paper).published() is None, "other data in its layout"
    monkeypatch.setattr(metrics, "TEST_SCANS", 1)
    assert Segment3dTask(paper).published()["miou"] == 0.666
    for other in (
        {"data": None},
        {"cpe": False},
        {"mixer": "qt"},
        {"plan": "1:1"},
        {"depths": (2, 2, 2, 2, 2)},
        {"window": 4096},
    ):
        assert Segment3dTask(paper.changed(**other)).published() is None


def test_scannet_has_figures_of_its_own(tmp_path, monkeypatch):
    """They were once those of SemanticKITTI."""
    room = tmp_path / "val/scene0011_00"
    room.mkdir(parents=True)
    (room / "segment20.npy").touch()
    rooms = Segment3dRecipe().preset("rooms").changed(data=tmp_path)
    assert Segment3dTask(rooms).published() is None, "other rooms"
    monkeypatch.setattr(metrics, "TEST_ROOMS", 1)
    assert Segment3dTask(rooms).published()["miou"] == 0.759
    assert Segment3dTask(rooms.changed(mixer="softmax")).published()["miou"] == 0.767


@pytest.mark.slow
@pytest.mark.draws
def test_without_plotly_a_run_is_whole_and_says_once_what_is_missing(kitti, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    lines = []
    train(TINY.changed(data=kitti, steps=1), tmp_path / "run", say=lines.append)
    assert (tmp_path / "run/predictions.png").is_file() and (tmp_path / "run/report.html").is_file()
    assert not (tmp_path / "run/scan.html").exists()
    scans = sorted(kitti.rglob("*.bin"))[:2]
    rows = SavedRun.of(tmp_path / "run").predict(scans, tmp_path / "seen", say=lines.append)
    assert [row["page"] for row in rows] == [None, None]
    said = [line for line in lines if "plotly is not installed" in line]
    assert len(said) == 2 and "scan.html: plotly" in said[0] and "Install it with: pip install plotly" in said[0]
    assert all("\n" not in line for line in said)


def test_the_best_weights_on_the_held_out_scans_are_kept(kitti, tmp_path):
    """As Pointcept keeps them: the benchmarks' test scans are their validation part."""
    best = TINY.changed(data=kitti, steps=2, evaluate_every=1, keep="best", coordinates="metres", random_points=True)
    train(best, tmp_path / "run")
    (row,) = json.loads((tmp_path / "run/results.json").read_text())["rows"]
    assert row["metrics"]["validation_miou"] <= row["metrics"]["miou"] + 1e-9


@pytest.mark.slow
def test_the_commands_train_evaluate_and_write_predictions(kitti, tmp_path, capsys):
    words = ("--preset", "tiny", "--data", kitti, "--set", "control=False")
    status, _, error = command(capsys, "train", "segment3d", *words, "--plan", "1:1", "--out", tmp_path / "out")
    assert status == 0, error
    (row,) = json.loads((tmp_path / "out/results.json").read_text())["rows"]
    assert row["task"] == "segment3d" and set(row["metrics"]) == {"miou", "accuracy"} and row["unit"] == "points"
    assert (tmp_path / "out/predictions.png").is_file()
    status, said, error = command(capsys, "evaluate", tmp_path / "out", "--data", kitti)
    assert status == 0 and "iou road" in said, error
    scan = kitti / "sequences/08/velodyne/000000.bin"
    status, _, error = command(capsys, "predict", tmp_path / "out", scan, "--out", tmp_path / "seen")
    assert status == 0, error
    written = numpy.fromfile(tmp_path / "seen/000000.label", dtype=numpy.uint32)
    assert len(written) == len(Scan(scan, "semantickitti", None).points()) and set(written.tolist()) <= set(TO_KITTI)
    twin = kitti / "sequences/00/velodyne/000000.bin"
    status, _, error = command(capsys, "predict", tmp_path / "out", scan, twin, "--out", tmp_path / "both")
    assert status == 0, error
    for name, source in (("000-000000", scan), ("001-000000", twin)):
        assert (tmp_path / f"both/{name}.label").stat().st_size == source.stat().st_size // 4, "one label a point"
        assert (tmp_path / f"both/{name}.png").is_file()
    status, said, _ = command(capsys, "train", "segment3d", "--data", kitti, "--check")
    assert status == 0


@pytest.mark.slow
def test_compare_trains_the_floor_too(tmp_path, capsys):
    words = ("--mixers", "softmax,padre", "--seeds", "1", "--preset", "tiny", "--set", "scans=2")
    status, _, error = command(capsys, "compare", "--task", "segment3d", *words, "--out", tmp_path / "out")
    assert status == 0, error
    mixers = {row["mixer"] for row in json.loads((tmp_path / "out/results.json").read_text())["rows"]}
    assert mixers == {"softmax", "padre", "linear_floor"}
