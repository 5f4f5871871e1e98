"""nuScenes-lidarseg: the same tables as for boxes, labels by category, the published splits, predictions by token."""

import json
import shutil

import numpy
import pytest

from polymix.cli import main
from polymix.domains.detect3d.synthetic import synthetic
from polymix.domains.segment3d import lidarseg
from polymix.domains.segment3d.data import check, load
from polymix.domains.segment3d.layouts import VOID
from polymix.domains.segment3d.recipe import Segment3dRecipe
from polymix.errors import DataError
from polymix.train.data.problems import Problems
from polymix.train.data.scans.nuscenes_tables import Tables, published_split


@pytest.fixture(scope="module")
def drives(tmp_path_factory):
    return synthetic(tmp_path_factory.mktemp("drives"), 0, 2, 1, 1)


@pytest.fixture
def copy(drives, tmp_path):
    return shutil.copytree(drives, tmp_path / "set")


def change(root, table, edit):
    path = root / "v1.0-synthetic" / f"{table}.json"
    rows = json.loads(path.read_text())
    edit(rows)
    path.write_text(json.dumps(rows))


def test_the_default_drives_have_labels_of_points(drives, tmp_path):
    data = load(Segment3dRecipe(data=str(drives)), tmp_path, print)
    assert (len(data.train), len(data.test), data.inputs, data.classes) == (4, 2, 4, lidarseg.CLASSES)
    points, classes = data.test.read(0)
    there = {lidarseg.CLASSES[k] for k in numpy.unique(classes)}
    assert there >= {"car", "driveable surface", "sidewalk", "manmade"} and 0 < points[:, 3].mean() < 1
    ground = points[classes == lidarseg.CLASSES.index("driveable surface"), 2]
    assert abs(numpy.median(ground) + 1.8) < 0.1, "below the sensor"
    assert not check(drives) and not check(drives, "nuscenes")


def test_the_devkit_finds_what_it_asks_for(drives):
    """What it checks when it opens tables; that it opens them was seen by hand (tests/golden/nuscenes_tables.py)."""
    tables = {path.stem: json.loads(path.read_text()) for path in (drives / "v1.0-synthetic").glob("*.json")}
    logs = {row["token"] for row in tables["log"]}
    assert {token for row in tables["map"] for token in row["log_tokens"]} == logs
    assert {row["log_token"] for row in tables["scene"]} == logs
    assert all((drives / row["filename"]).read_bytes().startswith(b"\x89PNG") for row in tables["map"])
    assert {row["visibility_token"] for row in tables["sample_annotation"]} <= {
        r["token"] for r in tables["visibility"]
    }
    assert [row["index"] for row in tables["category"]] == list(range(32))
    assert len(list((drives / "lidarseg/v1.0-synthetic").iterdir())) == len(tables["lidarseg"]) == len(tables["sample"])


def test_categories_that_do_not_count_and_numbers_that_nobody_knows(copy, tmp_path):
    first = min((copy / "lidarseg/v1.0-synthetic").iterdir())
    labels = numpy.fromfile(first, dtype=numpy.uint8)
    labels[0] = 31  # vehicle.ego
    labels.tofile(first)
    data = load(Segment3dRecipe(data=str(copy)), tmp_path, print)
    assert data.train.read(0)[1][0] == VOID
    labels[0] = 77
    labels.tofile(first)
    assert any("point 0: label 77" in line and first.name in line for line in check(copy))


def test_mistakes_are_named(copy):
    first = min((copy / "lidarseg/v1.0-synthetic").iterdir())
    first.write_bytes(first.read_bytes()[:-2])
    assert "labels for" in check(copy)[0] and first.name in check(copy)[0]
    first.unlink()
    assert "has no labels" in check(copy)[0]
    change(copy, "category", lambda rows: rows[3].pop("index"))
    assert "category.json" in check(copy)[0] and "index None" in check(copy)[0]
    (copy / "v1.0-synthetic/lidarseg.json").unlink()
    assert "lidarseg.json" in check(copy)[0]


def test_the_published_splits_need_no_list(copy, tmp_path):
    scenes = {f"scene-{number:04d}" for number in range(1, 1111)}
    splits = published_split("v1.0-trainval", scenes)
    assert len(splits["val"]) == 150 and {"scene-0003", "scene-1073"} <= set(splits["val"])
    assert (
        published_split("v1.0-mini", scenes)["val"] == ["scene-0103", "scene-0916"]
        and published_split("v1.0-x", scenes) is None
    )
    (copy / "v1.0-synthetic/splits.json").unlink()
    with pytest.raises(DataError, match=r"splits\.json"):
        load(Segment3dRecipe(data=str(copy)), tmp_path, print)
    change(copy, "scene", lambda rows: [row.update(name=name) for row, name in
                                        zip(rows, ("scene-0061", "scene-0103", "scene-0553"), strict=True)])  # fmt: skip
    (copy / "v1.0-synthetic").rename(copy / "v1.0-mini")
    problems = Problems()
    train, test = Tables(copy / "v1.0-mini", lidarseg.TABLES).split(problems)
    assert (len(train), len(test)) == (4, 2) and not problems


@pytest.mark.slow
def test_predictions_have_the_names_and_numbers_of_nuscenes(drives, tmp_path, capsys):
    """In pieces too: the run's `piece` is smaller than its scans."""
    options = ["--preset", "tiny", "--set", "control=False", "--set", "piece=4000", "--set", "steps=1"]
    scans = (drives / "samples/LIDAR_TOP").glob("scene-0002-*")
    for command in (["train", "segment3d", *options, "--data", drives, "--out", tmp_path / "run"],
                    ["predict", tmp_path / "run", *scans, "--out", tmp_path / "seen"]):  # fmt: skip
        with pytest.raises(SystemExit) as stop:
            main([*map(str, command), "--threads", "1"])
        assert not stop.value.code, capsys.readouterr().err
    for key in (0, 1):
        token = f"scene-0002-{key}-0"
        labels = numpy.fromfile(tmp_path / f"seen/{token}_lidarseg.bin", dtype=numpy.uint8)
        assert len(labels) == len((drives / f"lidarseg/v1.0-synthetic/{token}_lidarseg.bin").read_bytes())
        assert set(labels.tolist()) <= set(range(1, 17))
