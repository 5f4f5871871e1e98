"""Boxes in scans: nuScenes' and KITTI's files, sweeps joined through poses, the score, and what is said of mistakes."""

import json
import math
import sys
from pathlib import Path

import numpy
import pytest
import torch

from polymix.domains.detect3d import kitti, nuscenes
from polymix.domains.detect3d.data import check, for_evaluation, load
from polymix.domains.detect3d.poses import Pose, matrix_of, quaternion_of
from polymix.domains.detect3d.recipe import Detect3dRecipe
from polymix.domains.detect3d.score import Sample, detection_score, in_range
from polymix.domains.detect3d.synthetic import synthetic
from polymix.domains.detect3d.task import Detect3dTask
from polymix.errors import DataError, OptionError
from polymix.train.data.problems import Problems
from polymix.train.data.sampling import seed_all
from polymix.train.run import train
from polymix.train.saved import SavedRun

GOLDEN = Path(__file__).parents[1] / "golden" / "nuscenes_score.json"


@pytest.fixture(scope="module")
def drives(tmp_path_factory):
    return synthetic(tmp_path_factory.mktemp("drives"), 0, 1, 1, 10)


@pytest.fixture
def copy(drives, tmp_path):
    """The tables of the drives, to spoil, and their points by links."""
    root = tmp_path / "set"
    (root / "v1.0-synthetic").mkdir(parents=True)
    for path in (drives / "v1.0-synthetic").iterdir():
        (root / "v1.0-synthetic" / path.name).write_bytes(path.read_bytes())
    for kind in ("samples", "sweeps"):
        (root / kind / "LIDAR_TOP").mkdir(parents=True)
        for path in (drives / kind / "LIDAR_TOP").iterdir():
            (root / kind / "LIDAR_TOP" / path.name).symlink_to(path)
    return root


def change(root, table, edit):
    path = root / "v1.0-synthetic" / f"{table}.json"
    rows = json.loads(path.read_text())
    edited = edit(rows)
    path.write_text(json.dumps(rows if edited is None else edited))


def samples(part, known):
    read = []
    for sample in known:
        rows = sample[part]
        boxes = numpy.array([[math.nan if v is None else v for v in row["box"]] for row in rows])
        names, attributes = (numpy.array([row[key] for row in rows]) for key in ("name", "attribute"))
        read.append(Sample(boxes, names, attributes, numpy.array([row.get("score", 0.0) for row in rows])))
    return read


def test_the_score_is_that_of_nuscenes_devkit():
    content = json.loads(GOLDEN.read_text())
    known, expected = content["samples"], content["expected"]
    metrics, rows = detection_score(samples("truths", known), samples("found", known), list(expected["classes"]))
    assert metrics == pytest.approx(expected["metrics"], abs=1e-9)
    for row in rows:
        figures = expected["classes"][row["name"]]
        assert {key: row[key] for key in figures} == pytest.approx(figures, abs=1e-9), row["name"]
        assert set(row) == {*figures, "name", "AP"}


def one(**changes):
    row = {"box": [10.0, 0, 0, 4, 2, 1.5, 0.5, 1, 0], "name": "car", "attribute": "vehicle.moving", "score": 0.9}
    row |= changes
    return samples("boxes", [{"boxes": [row]}])


def test_a_perfect_prediction_scores_one_and_known_mistakes_cost_what_they_say():
    assert detection_score(one(), one(), ["car"])[0]["NDS"] == pytest.approx(1.0)
    moved = one(box=[10.3, 0.4, 0, 4, 2, 3.0, 0.5 + math.pi, 1, 2], attribute="vehicle.parked")
    metrics = detection_score(one(), moved, ["car"])[0]
    expected = {"mAP": 0.75, "ATE": 0.5, "ASE": 0.5, "AOE": math.pi, "AVE": 2.0, "AAE": 1.0, "NDS": 0.475}
    assert metrics == pytest.approx(expected), "0.5 m is not below 0.5 m"


def test_objects_beyond_the_range_and_without_points_do_not_count():
    (far,) = one(box=[30.0, 40.1, 0, 4, 2, 1, 0, 0, 0])
    assert len(in_range(far).boxes) == 0
    (near,) = one()
    assert len(in_range(near).boxes) == 1 and len(in_range(near, numpy.array([0])).boxes) == 0


def test_without_velocities_there_is_no_nds():
    still = one(box=[10.0, 0, 0, 4, 2, 1.5, 0.5, math.nan, math.nan], attribute="")
    assert list(detection_score(still, one(), ["car"])[0]) == ["mAP", "ATE", "ASE", "AOE"]


def test_poses_and_quaternions():
    assert numpy.allclose(matrix_of([0.5, 0.5, 0.5, 0.5], "it"), [[0, 0, 1], [1, 0, 0], [0, 1, 0]])
    pose = Pose.of(quaternion_of(0.3), [1, 2, 3], "it")
    points = numpy.random.default_rng(0).normal(size=(5, 3))
    assert numpy.allclose(pose.undo(pose.apply(points)), points)
    assert numpy.allclose(pose.apply(numpy.array([[1.0, 0, 0]])), [[1 + math.cos(0.3), 2 + math.sin(0.3), 3]])


@pytest.mark.slow
def test_ten_sweeps_lie_on_each_other_in_the_world(drives):
    """What stands still is at one place in every sweep: points on standing cars lie in their boxes."""
    problems = Problems()
    train_, _ = nuscenes.list_frames(drives, 10, problems)
    frame = train_[0]
    points = frame.points()
    assert not problems and sorted(set(points[:, 4].round(3).tolist())) == pytest.approx(numpy.arange(10) * 0.05)
    still = [k for k, name in enumerate(frame.objects.attributes) if name == "vehicle.parked"]
    boxes = frame.objects.boxes[still]
    boxes[:, 3:6] += 0.2  # noise of 2 cm on both sides
    newest = points[points[:, 4] == 0]
    once, all_ten = (kitti.count_inside(part[:, :3], boxes) for part in (newest, points))
    seen = frame.objects.points[still]
    assert seen.sum() > 50 and once.sum() >= 0.95 * seen.sum()
    assert all_ten.sum() == pytest.approx(10 * once.sum(), rel=0.15)


def test_boxes_are_in_the_vehicles_frame_with_their_velocity(drives):
    frame = nuscenes.list_frames(drives, 1, Problems())[0][0]
    boxes, moving = frame.objects.boxes, [name.endswith("moving") for name in frame.objects.attributes]
    assert (numpy.abs(boxes[:, 1]) < 12).all(), "the street runs along the vehicle's x"
    assert numpy.array_equal(numpy.abs(boxes[:, 7]) > 0.1, moving) and numpy.allclose(boxes[:, 8], 0, atol=1e-3)
    cars = [
        k for k, label in enumerate(frame.objects.labels) if moving[k] and nuscenes.CLASSES[label] in ("car", "truck")
    ]
    assert cars and (numpy.sign(numpy.cos(boxes[cars, 6])) == numpy.sign(boxes[cars, 7])).all()


def test_results_in_nuscenes_format_are_the_annotations_again(drives, tmp_path):
    frame = nuscenes.list_frames(drives, 1, Problems())[0][0]
    row = {"boxes": torch.from_numpy(frame.objects.boxes), "scores": torch.ones(len(frame.objects.boxes)),
           "labels": torch.from_numpy(frame.objects.labels)}  # fmt: skip
    nuscenes.write_results(tmp_path / "out.json", [(frame, row)], nuscenes.CLASSES)
    content = json.loads((tmp_path / "out.json").read_text())
    rows = json.loads((drives / "v1.0-synthetic" / "sample_annotation.json").read_text())
    expected = [row for row in rows if row["sample_token"] == frame.token]
    assert content["meta"]["use_lidar"] is True
    for mine, theirs, name in zip(content["results"][frame.token], expected, frame.objects.attributes, strict=True):
        assert mine["translation"] == pytest.approx(theirs["translation"], abs=1e-3)
        assert mine["size"] == pytest.approx(theirs["size"], abs=1e-4) and mine["attribute_name"] == name
        assert abs(numpy.dot(mine["rotation"], theirs["rotation"])) == pytest.approx(1, abs=1e-6)


CALIB = """P0: 0
P2: 700 0 600 40 0 700 180 0.2 0 0 1 0.003
R0_rect: 1 0 0 0 1 0 0 0 1
Tr_velo_to_cam: 0 -1 0 0.01 0 0 -1 -0.08 1 0 0 -0.27
"""
LABEL = "Car 0.00 0 1.85 387.63 181.54 423.81 203.12 1.67 1.87 3.69 -6.53 2.39 28.49 1.57\nDontCare -1 -1 -10 1 1 2 2 -1 -1 -1 -1000 -1000 -1000 -10\n"  # fmt: skip


@pytest.fixture
def kitti_set(tmp_path):
    root = tmp_path / "kitti"
    rng = numpy.random.default_rng(0)
    for kind in ("velodyne", "label_2", "calib"):
        (root / "training" / kind).mkdir(parents=True)
    for number in range(5):
        name = f"{number:06d}"
        points = rng.uniform([-25, -12, -1.5, 0], [25, 12, 1, 1], (500, 4))
        centre = numpy.array([28.76, 6.54, -1.64, 0])
        points[:40] = centre + rng.uniform(-0.5, 0.5, (40, 4)) * [1, 1, 1, 0]
        points.astype(numpy.float32).tofile(root / "training" / "velodyne" / f"{name}.bin")
        (root / "training" / "label_2" / f"{name}.txt").write_text(LABEL)
        (root / "training" / "calib" / f"{name}.txt").write_text(CALIB)
    return root


def test_kitti_labels_are_read_into_the_lidars_frame_and_written_back(kitti_set, tmp_path):
    assert check(kitti_set) == []
    train_, test = kitti.list_frames(kitti_set, 1, Problems())
    assert (len(train_), len(test)) == (4, 1)
    objects = train_[0].objects
    expected = [28.49 + 0.27, 6.53 + 0.01, -(2.39 - 1.67 / 2) - 0.08, 3.69, 1.87, 1.67, -1.57 - math.pi / 2]
    assert objects.boxes[0, :7] == pytest.approx(expected, abs=1e-4) and objects.points[0] == 40
    row = {"boxes": torch.from_numpy(objects.boxes), "scores": torch.tensor([0.5]), "labels": torch.tensor([0])}
    kitti.write_labels(tmp_path / "out.txt", train_[0], row, kitti.CLASSES)
    words, true = (tmp_path / "out.txt").read_text().split(), LABEL.splitlines()[0].split()
    assert words[0] == "Car" and [float(w) for w in words[8:]] == pytest.approx([*map(float, true[8:]), 0.5], abs=1e-3)
    assert float(words[3]) == pytest.approx(1.57 - math.atan2(-6.53, 28.49), abs=1e-3), "alpha"
    left, top, right, bottom = map(float, words[4:8])
    assert left < 600 - 700 * 6.53 / 28.49 + 3 < right and top < 180 + 700 * 1.55 / 28.49 < bottom


def test_vans_and_regions_without_labels_count_neither_for_nor_against(kitti_set):
    """As in KITTI's benchmark: a van found as a car is no mistake, and neither is what nobody labelled."""
    file = kitti_set / "training/label_2/000004.txt"
    van = LABEL.splitlines()[0].replace("Car", "Van").replace("-6.53", "4.00")
    far = "DontCare -1 -1 -10 500 150 700 250 -1 -1 -1 -1000 -1000 -1000 -10"
    file.write_text(f"{LABEL.splitlines()[0]}\n{van}\n{far}\n")
    frame = kitti.frame_at(kitti_set / "training/velodyne/000004.bin", labelled=True)
    objects = frame.objects
    assert len(objects.boxes) == len(objects.ignored.boxes) == len(objects.ignored.regions) == 1
    assert objects.ignored.names.tolist() == ["car"] and check(kitti_set) == []
    truth = Sample(objects.boxes.astype(float), numpy.array(["car"]), numpy.array([""]))
    ahead = objects.boxes[0].copy()
    ahead[:3] = [30, 0, -1]  # in the middle of the picture, where the region is
    beside = objects.boxes[0].copy()
    beside[:3] = [12, -9, -1]  # outside of it, and of nothing
    boxes = numpy.stack([objects.boxes[0], objects.ignored.boxes[0], ahead, beside, objects.ignored.boxes[0]]).astype(
        float
    )
    sample = Sample(boxes, numpy.array(["car"] * 4 + ["cyclist"]), numpy.array([""] * 5), numpy.ones(5))
    counts = kitti.counted(sample, truth, objects.ignored, frame.calibration)
    assert counts.tolist() == [True, False, False, True, True]


def test_vans_are_background_in_training(kitti_set, tmp_path):
    """As in OpenPCDet, which keeps the boxes of the model's classes alone: the heatmap is 0 where a van stands."""
    van = LABEL.splitlines()[0].replace("Car", "Van").replace("-6.53", "4.00")
    for file in (kitti_set / "training/label_2").iterdir():
        file.write_text(LABEL + van + "\n")
    recipe = Detect3dRecipe(data=str(kitti_set), turn=0.0, scale=0.0)
    data = load(recipe, tmp_path, print)
    _, boxes, labels = data.train[0]
    assert len(data.train.objects(0).ignored.boxes) == 1, "the van, for the score"
    assert boxes[:, 1].tolist() == pytest.approx([6.54], abs=1e-2) and labels.tolist() == [0], "the car alone"


def test_a_frame_without_objects_has_no_boxes(kitti_set):
    for text in ("", LABEL.splitlines()[1]):
        (kitti_set / "training/label_2/000004.txt").write_text(text)
        frame = kitti.frame_at(kitti_set / "training/velodyne/000004.bin", labelled=True)
        assert frame.objects.boxes.shape == (0, 9) and len(frame.objects.ignored.regions) == bool(text)


def test_a_turned_sample_keeps_its_points_in_its_boxes(drives, tmp_path):
    recipe = Detect3dRecipe(data=str(drives), sweeps=1, turn=180.0, flip=True, scale=0.1)
    data = load(recipe, tmp_path, print)
    before = data.train.objects(0)
    still = numpy.flatnonzero(before.points > 30)
    for seed in range(4):
        seed_all(seed)
        points, boxes, labels = data.train[0]
        assert len(boxes) == len(labels) == (before.points > 0).sum()
        places = [int((before.points[: k + 1] > 0).sum()) - 1 for k in still]
        larger = boxes[places].numpy()
        larger[:, 3:6] += 0.25
        assert (kitti.count_inside(points[:, :3].numpy(), larger) >= 0.9 * before.points[still]).all()


def test_moved_and_balanced_training_leaves_evaluation_as_it_is(drives, tmp_path):
    """Points and boxes move together; each scan is measured once, however often the training draws it."""
    recipe = Detect3dRecipe(data=str(drives), sweeps=1, turn=0.0, scale=0.0, move=0.5, balanced=True)
    data = load(recipe, tmp_path, print)
    torch.manual_seed(0)
    moves = []
    for _ in range(200):
        points, boxes, _ = data.train[0]
        moves.append(points[0, :3] - data.train.points(0)[0, :3])
        seen = torch.from_numpy(data.train.objects(0).points > 0)
        gap = boxes[:, :3] - torch.from_numpy(data.train.objects(0).boxes)[seen, :3] - moves[-1]
        assert gap.abs().max() < 1e-5
    assert torch.stack(moves).std(0).numpy() == pytest.approx([0.5] * 3, rel=0.15)
    assert torch.equal(data.test[0][0], data.test.points(0))
    plain = load(recipe.changed(balanced=False), tmp_path, print)
    whole = for_evaluation(recipe, data.summary(), True, None, print)
    assert len(whole.test) == len(plain.train) + len(plain.test)
    assert len({id(frame) for frame in whole.test.frames}) == len(whole.test)


def write(path, content):
    path.unlink()
    path.write_bytes(content)


def first(rows, **changes):
    rows[0] |= changes


SPOILED = {
    "an empty cloud": (lambda root: write(next(root.glob("samples/*/*.bin")), b""), "without points"),
    "a .bin of a wrong length": (
        lambda root: write(next(root.glob("samples/*/*.bin")), b"1234567"), "with 7 bytes"),
    "coordinates that are not numbers": (
        lambda root: write(next(root.glob("samples/*/*.bin")), numpy.full(5, math.nan, "f4").tobytes()), "point 0"),
    "a sweep that is gone": (lambda root: next(root.glob("samples/*/*.bin")).unlink(), "does not exist"),
    "a quaternion not of length one": (
        lambda root: change(root, "ego_pose", lambda rows: [{**r, "rotation": [2, 0, 0, 0]} for r in rows]),
        "quaternion of length 2"),
    "a mount with three numbers": (
        lambda root: change(root, "calibrated_sensor", lambda rows: first(rows, rotation=[1, 0, 0])), "rotation"),
    "boxes without points": (
        lambda root: change(root, "sample_annotation", lambda rows: [{**r, "num_lidar_pts": 0} for r in rows]),
        "no box with a point"),
    "boxes without a size": (
        lambda root: change(root, "sample_annotation", lambda rows: [{**r, "size": [0, 1, 1]} for r in rows]), "size"),
    "a category that is missing": (lambda root: change(root, "category", lambda rows: []), "category.json"),
    "a box before or after without a place": (
        lambda root: change(root, "sample_annotation", lambda rows: [{**r, "translation": {}} for r in rows]),
        "translation"),
    "another sensor": (
        lambda root: change(root, "sensor", lambda rows: first(rows, channel="CAM_FRONT")), "the tables have CAM_FRONT"),
    "a table that is missing": (lambda root: (root / "v1.0-synthetic" / "sample.json").unlink(), "sample.json"),
    "a table that is cut off": (lambda root: (root / "v1.0-synthetic" / "sample.json").write_text("[{"), "sample.json"),
    "a scene that is unknown": (
        lambda root: (root / "v1.0-synthetic" / "splits.json").write_text('{"train": ["x"], "val": ["scene-0001"]}'),
        "train: it names x"),
    "sweeps in a circle": (
        lambda root: change(root, "sample_data", lambda rows: [{**r, "prev": r["token"]} for r in rows]), "not earlier"),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILED)
def test_a_mistake_in_the_tables_is_one_readable_line(name, copy):
    spoil, said = SPOILED[name]
    spoil(copy)
    problems = check(copy, sweeps=2)
    assert problems and any(said in line for line in problems), problems
    assert all("\n" not in line and "Traceback" not in line and len(line) < 500 for line in problems)
    assert all(str(copy) in line for line in problems), "a table is named without its path"


def test_a_scan_larger_than_memory_is_one_readable_line(copy, kitti_set, monkeypatch):
    assert not check(copy) and not check(kitti_set)
    monkeypatch.setattr("polymix.train.data.scans.files.memory_of", lambda: 10)
    for root in (copy, kitti_set):
        lines = check(root)
        assert lines and all("larger than memory" in line and "\n" not in line for line in lines)


def test_sensors_in_another_order_change_nothing(copy):
    before = nuscenes.list_frames(copy, 3, Problems())[0][0].points()
    change(copy, "sensor", lambda rows: [{"token": "cam", "channel": "CAM_FRONT", "modality": "camera"}, *rows])
    mount = {"token": "other", "sensor_token": "cam", "translation": [0, 0, 0], "rotation": [1, 0, 0, 0]}
    change(copy, "calibrated_sensor", lambda rows: [mount, *rows])
    change(copy, "sample_data", lambda rows: [
        *({**r, "token": f"cam-{r['token']}", "calibrated_sensor_token": "other"} for r in rows if r["is_key_frame"]),
        *reversed(rows)])  # fmt: skip
    assert numpy.array_equal(nuscenes.list_frames(copy, 3, Problems())[0][0].points(), before)


KITTI_SPOILED = {
    "a calibration that is missing": (lambda part: (part / "calib" / "000001.txt").unlink(), "000001.txt"),
    "a calibration without Tr_velo_to_cam": (
        lambda part: (part / "calib" / "000001.txt").write_text("P2: " + "1 " * 12),
        "without R0_rect",
    ),
    "a line that is cut off": (
        lambda part: (part / "label_2" / "000001.txt").write_text("Car 0 0 1 2 3"),
        "line 1 with 6 words",
    ),
    "a box of no height": (
        lambda part: (part / "label_2" / "000001.txt").write_text(LABEL.replace(" 1.67 ", " 0 ")),
        "sides",
    ),
    "points of a wrong length": (lambda part: (part / "velodyne" / "000001.bin").write_bytes(b"12345"), "5 bytes"),
}


@pytest.mark.parametrize("name", KITTI_SPOILED)
def test_a_mistake_in_kittis_files_is_one_readable_line(name, kitti_set):
    spoil, said = KITTI_SPOILED[name]
    spoil(kitti_set / "training")
    (problem,) = check(kitti_set)
    assert said in problem and "000001" in problem


def test_a_folder_of_neither_kind_is_told(tmp_path):
    with pytest.raises(DataError, match=r"without v1"):
        load(Detect3dRecipe(data=str(tmp_path)), tmp_path, print)
    with pytest.raises(OptionError, match="layout"):
        load(Detect3dRecipe(data=str(tmp_path), layout="waymo"), tmp_path, print)
    with pytest.raises(OptionError, match="divides the space"):
        Detect3dRecipe(voxel=(0.3, 0.3, 8.0))


@pytest.mark.slow
def test_kitti_trains_without_velocities_and_predicts_its_labels(kitti_set, tmp_path):
    recipe = Detect3dRecipe.tiny().changed(data=kitti_set, least="0.0", space="0,-12.8,-3,51.2,12.8,1")
    train(recipe, tmp_path / "run")
    row = json.loads((tmp_path / "run" / "results.json").read_text())["rows"][0]
    assert list(row["metrics"]) == ["mAP", "ATE", "ASE", "AOE"]
    (found,) = SavedRun.of(tmp_path / "run").predict(
        [kitti_set / "training" / "velodyne" / "000004.bin"], tmp_path / "seen")  # fmt: skip
    lines = (tmp_path / "seen" / found["boxes"]).read_text().splitlines()
    assert lines and all(len(line.split()) == 16 and line.startswith("Car ") for line in lines)
    (every,) = SavedRun.of(tmp_path / "run").changed(["threshold=0"]).predict(
        [kitti_set / "training" / "velodyne" / "000004.bin"], tmp_path / "every")  # fmt: skip
    assert every["objects"]["car"] >= len(lines) > found["objects"]["car"], "the threshold is the user's"


@pytest.mark.slow
def test_nuscenes_predictions_are_in_one_results_file(drives, tmp_path):
    train(Detect3dRecipe.tiny().changed(data=drives, least=0.0), tmp_path / "run")
    files = sorted(drives.glob("samples/*/*.bin"))[:2]
    SavedRun.of(tmp_path / "run").predict(files, tmp_path / "seen")
    content = json.loads((tmp_path / "seen" / "results_nusc.json").read_text())
    assert len(content["results"]) == 2 and all(0 < len(rows) <= 500 for rows in content["results"].values())
    with pytest.raises(DataError, match="no keyframe"):
        SavedRun.of(tmp_path / "run").predict([next(drives.glob("sweeps/*/*.bin"))], tmp_path / "no")


def test_another_seed_has_other_drives(tmp_path):
    """Drives of one seed were once written anew for another, in one folder."""
    first = [Detect3dTask(Detect3dRecipe.tiny().changed(seed=seed)).load(tmp_path).test.points(0) for seed in (0, 1, 0)]
    assert torch.equal(first[0], first[2]) and not torch.equal(first[0][:100], first[1][:100])


@pytest.mark.slow
@pytest.mark.draws
def test_without_plotly_a_run_is_whole_and_says_once_what_is_missing(drives, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    lines = []
    train(Detect3dRecipe.tiny().changed(data=drives, steps=1), tmp_path / "run", say=lines.append)
    assert (tmp_path / "run/predictions.png").is_file() and (tmp_path / "run/report.html").is_file()
    assert not (tmp_path / "run/scan.html").exists()
    files = sorted(drives.glob("samples/*/*.bin"))[:2]
    rows = SavedRun.of(tmp_path / "run").predict(files, tmp_path / "seen", say=lines.append)
    assert [row["page"] for row in rows] == [None, None]
    said = [line for line in lines if "plotly is not installed" in line]
    assert len(said) == 2 and "scan.html: plotly" in said[0] and "Install it with: pip install plotly" in said[0]


def test_the_published_preset_names_what_it_takes_from_dsvt():
    paper = Detect3dRecipe.paper()
    assert (paper.mixer, paper.betas, paper.clip, paper.final) == ("padre:degree=2", (0.9, 0.99), 35.0, 1e-5)
    assert (paper.voxel, paper.set_size, paper.window) == ((0.3, 0.3, 8.0), 90, (30, 30))
    assert Detect3dTask(paper).published() is None, "PADRe's figures are of TransFusion's head"
