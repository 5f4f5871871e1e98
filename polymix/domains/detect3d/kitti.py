"""KITTI's detection set: velodyne/*.bin, label_2/*.txt and calib/*.txt, and predictions in the format of its labels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch

from polymix.domains.detect3d.frames import INPUTS, Frame, Ignored, Objects
from polymix.domains.detect3d.poses import numbers
from polymix.domains.detect3d.rotated import corners
from polymix.domains.detect3d.score import Sample
from polymix.errors import DataError
from polymix.files import write_whole
from polymix.train.data.problems import Problems
from polymix.train.data.scans.files import read_points
from polymix.train.data.splits import held_out
from polymix.train.data.texts import read_text

GROUPS = (("car",), ("pedestrian",), ("cyclist",))  # of the head
CLASSES = tuple(name for group in GROUPS for name in group)
NAMES = {"Car": "car", "Pedestrian": "pedestrian", "Cyclist": "cyclist"}
# The benchmark counts a prediction there neither as right nor as wrong.
SIMILAR_CLASSES = {"Van": "car", "Person_sitting": "pedestrian"}
DONT_CARE = "DontCare"
MATCH_DISTANCE = 2.0  # metres between centres within which a prediction is of a box
IGNORED_SHARE = 0.5  # share of a prediction's area in the picture that lies in a region without labels
MIN_DEPTH = 0.1  # metres before the camera
IMAGE = (1242, 375)  # pixels of KITTI's pictures, to which boxes are cut


class Calibration(NamedTuple):
    """From the LiDAR to the rectified camera, turn @ x + place, and its projection (3, 4) to pixels."""

    turn: Any
    place: Any
    projection: Any


def list_frames(root: Path, sweeps: int, problems: Problems) -> tuple[list[Frame], list[Frame]]:
    """Training and test scans, by ImageSets/train.txt and val.txt; without them every fifth scan is for tests."""
    folder = root / "training"
    files = {path.stem: path for path in sorted((folder / "velodyne").glob("*.bin"))}
    parts = held_out(list(files))
    lists = [root / "ImageSets" / f"{part}.txt" for part in ("train", "val")]
    if all(path.is_file() for path in lists):
        train, test = (" ".join(_lines(path, "names of scans")).split() for path in lists)
        parts = train, test
    frames: list[list[Frame]] = [[], []]
    for place, names in enumerate(parts):
        if not names:
            problems.add(root, "", f"it has no {('training', 'test')[place]} scans")
        for name in names:
            if name not in files:
                problems.add(lists[place], name, "training/velodyne does not have it")
                continue
            with problems.noting():
                frames[place].append(frame_at(files[name], labelled=True))
    return frames[0], frames[1]


def frame_at(path: Path, labelled: bool = False) -> Frame:
    """The scan of a velodyne/*.bin file, with the calibration beside it, and its labels where they are asked for."""
    calibration = read_calibration(path.parents[1] / "calib" / f"{path.stem}.txt")
    labels = path.parents[1] / "label_2" / f"{path.stem}.txt"
    objects = read_labels(labels, calibration, path) if labelled else None
    return Frame(path, path.stem, partial(_points, path), objects, None, calibration)


def _points(path: Path) -> Any:
    raw = read_points(path, 4)
    return numpy.concatenate((raw, numpy.zeros((len(raw), INPUTS - 4), numpy.float32)), 1)


def read_calibration(path: Path) -> Calibration:
    """The matrices P2, R0_rect and Tr_velo_to_cam of a file. Raises DataError where one is missing."""
    rows = {}
    for line in _lines(path, "KITTI's calibration"):
        name, _, values = line.partition(":")
        rows[name.strip()] = values.split()
    matrices = {}
    for name, shape in (("P2", (3, 4)), ("R0_rect", (3, 3)), ("Tr_velo_to_cam", (3, 4))):
        if name not in rows:
            raise DataError("data", f"{path} without {name}", "P2, R0_rect and Tr_velo_to_cam", "Restore it.")
        matrices[name] = numbers(rows[name], shape[0] * shape[1], f"{path}: {name}").reshape(shape)
    rectify, mount = matrices["R0_rect"], matrices["Tr_velo_to_cam"]
    turn = rectify @ mount[:, :3]
    if not numpy.allclose(turn @ turn.T, numpy.eye(3), atol=1e-2):
        raise DataError("data", f"{path}: R0_rect · Tr_velo_to_cam, which is no rotation", "a rotation", "Correct it.")
    return Calibration(turn, rectify @ mount[:, 3], matrices["P2"])


def read_labels(path: Path, calibration: Calibration, points: Path) -> Objects:
    """The boxes of a label file in the LiDAR's frame; classes other than the three are left out.

    Vans, sitting persons and regions that are marked DontCare are `Ignored` by the score. Where a model is trained they
    are background. Source: OpenPCDet, whose KittiDataset drops the regions, and whose DatasetTemplate.prepare_data
    keeps the boxes of the model's classes alone before CenterHead draws its heatmaps; it has no region without a loss.
    """
    boxes, labels, alike, names, regions = [], [], [], [], []
    for number, line in enumerate(_lines(path, "KITTI's labels"), 1):
        words = line.split()
        if not words or words[0] not in {*NAMES, *SIMILAR_CLASSES, DONT_CARE}:
            continue
        where = f"{path}, line {number}"
        if len(words) not in (15, 16):
            raise DataError("data", f"{where} with {len(words)} words", "15, or 16 with a score", "Correct it.")
        if words[0] == DONT_CARE:
            regions.append(numbers(words[4:8], 4, where))
            continue
        high, wide, long, x, y, z, turn = numbers(words[8:15], 7, where)
        if min(high, wide, long) <= 0:
            raise DataError("data", f"{where}: sides {[long, wide, high]}", "sides above 0", "Correct it.")
        centre = (numpy.array([x, y - high / 2, z]) - calibration.place) @ calibration.turn  # the bottom's middle
        box = [*centre, long, wide, high, _turned(-turn - math.pi / 2), math.nan, math.nan]
        if words[0] in SIMILAR_CLASSES:
            alike.append(box)
            names.append(SIMILAR_CLASSES[words[0]])
            continue
        boxes.append(box)
        labels.append(CLASSES.index(NAMES[words[0]]))
    array = numpy.array(boxes, dtype=numpy.float32).reshape(-1, 9)
    inside = count_inside(_points(points)[:, :3], array) if len(array) else numpy.zeros(0, dtype=numpy.int64)
    ignored = Ignored(numpy.array(alike, dtype=numpy.float32).reshape(-1, 9), numpy.array(names, dtype=str),
                      numpy.array(regions).reshape(-1, 4))  # fmt: skip
    return Objects(array, numpy.array(labels, dtype=numpy.int64), [""] * len(labels), inside, ignored)


def counted(predicted: Sample, true: Sample, ignored: Ignored, calibration: Calibration) -> Any:
    """Which predictions (n,) count: not those of ignored boxes, nor those of no box in a region without labels."""
    counts = numpy.ones(len(predicted.boxes), dtype=bool)
    for place, (box, name) in enumerate(zip(predicted.boxes, predicted.names, strict=True)):
        to_true, to_ignored = (
            numpy.hypot(*(part.boxes[part.names == name, :2] - box[:2]).T).min(initial=math.inf)
            for part in (true, ignored)
        )
        if to_ignored < min(MATCH_DISTANCE, to_true):
            counts[place] = False
        elif (
            to_true >= MATCH_DISTANCE and len(ignored.regions) and (edges := _in_picture(box, calibration)) is not None
        ):
            low, high = (numpy.clip(edge, 0, numpy.array(IMAGE) - 1) for edge in edges)
            shared = numpy.minimum(high, ignored.regions[:, 2:]) - numpy.maximum(low, ignored.regions[:, :2])
            counts[place] = (shared.clip(0).prod(1) < IGNORED_SHARE * max((high - low).prod(), 1e-9)).all()
    return counts


def _in_picture(box: Any, calibration: Calibration) -> tuple[Any, Any] | None:
    """The smallest and largest pixels (x, y) of a box's corners; None where it is not before the camera."""
    eight = corners(torch.as_tensor(box)[None])[0].numpy() @ calibration.turn.T + calibration.place
    if eight[:, 2].min() <= MIN_DEPTH:
        return None
    pixels = eight @ calibration.projection[:, :3].T + calibration.projection[:, 3]
    pixels = pixels[:, :2] / pixels[:, 2:]
    return pixels.min(0), pixels.max(0)


def count_inside(points: Any, boxes: Any) -> Any:
    """How many points (n, 3) lie in each box (m, 7 or more), int64 (m,)."""
    counts = []
    for x, y, z, long, wide, high, yaw in boxes[:, :7]:
        gap = points - numpy.array([x, y, z], dtype=points.dtype)
        along = numpy.cos(yaw) * gap[:, 0] + numpy.sin(yaw) * gap[:, 1]
        across = numpy.cos(yaw) * gap[:, 1] - numpy.sin(yaw) * gap[:, 0]
        inside = (numpy.abs(along) <= long / 2) & (numpy.abs(across) <= wide / 2) & (numpy.abs(gap[:, 2]) <= high / 2)
        counts.append(int(inside.sum()))
    return numpy.array(counts, dtype=numpy.int64)


def write_labels(path: Path, frame: Frame, objects: Mapping[str, Any], classes: Sequence[str]) -> None:
    """Predictions as lines of KITTI's labels with scores. Boxes that the camera does not see are left out."""
    calibration: Calibration = frame.calibration
    words = {name: word for word, name in NAMES.items()}
    lines = []
    rows = zip(objects["boxes"].double(), objects["scores"].tolist(), objects["labels"].tolist(), strict=True)
    for box, score, label in rows:
        edges = _in_picture(box, calibration)
        if edges is None:
            continue
        low, high = (numpy.clip(edge, 0, numpy.array(IMAGE) - 1) for edge in edges)
        if (high <= low).any():
            continue
        centre = calibration.turn @ box[:3].numpy() + calibration.place
        turn = _turned(-float(box[6]) - math.pi / 2)
        numbers_ = [_turned(turn - math.atan2(centre[0], centre[2])), *low, *high, box[5], box[4], box[3], centre[0],
                    centre[1] + float(box[5]) / 2, centre[2], turn]  # fmt: skip
        name = words.get(classes[label], classes[label])
        lines.append(" ".join([name, "-1", "-1", *(f"{float(value):.4f}" for value in numbers_), f"{score:.4f}"]))
    write_whole(path, "".join(f"{line}\n" for line in lines))


def _turned(angle: float) -> float:
    """The angle between -π and π."""
    return (angle + math.pi) % (2 * math.pi) - math.pi


def _lines(path: Path, what: str) -> list[str]:
    try:
        return read_text(path).splitlines()
    except DataError as error:
        raise DataError("data", error.got, what, "Restore it.") from error
