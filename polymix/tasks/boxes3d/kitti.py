"""KITTI's detection set: velodyne/*.bin, label_2/*.txt and calib/*.txt, and predictions in the format of its labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy

from polymix._io import write_whole
from polymix.errors import DataError
from polymix.models.points.rotated import corners
from polymix.tasks.boxes3d.frames import INPUTS, Frame, Objects, read_points
from polymix.tasks.boxes3d.poses import numbers

CLASSES = ("car", "pedestrian", "cyclist")
NAMES = {"Car": "car", "Pedestrian": "pedestrian", "Cyclist": "cyclist"}
IMAGE = (1242, 375)  # pixels of KITTI's pictures, to which boxes are cut
TEST = 5  # without ImageSets, each fifth scan is for tests


class Calibration(NamedTuple):
    """From the LiDAR to the rectified camera, turn @ x + place, and its projection (3, 4) to pixels."""

    turn: Any
    place: Any
    projection: Any


def find(root: Path, sweeps: int, problem: Callable[[str], None]) -> tuple[list[Frame], list[Frame]]:
    """Training and test scans, by ImageSets/train.txt and val.txt; without them each fifth scan is for tests."""
    folder = root / "training"
    files = {path.stem: path for path in sorted((folder / "velodyne").glob("*.bin"))}
    parts: list[list[str]] = [[name for place, name in enumerate(files) if (place % TEST == TEST - 1) == test]
                              for test in (False, True)]  # fmt: skip
    lists = [root / "ImageSets" / f"{part}.txt" for part in ("train", "val")]
    if all(path.is_file() for path in lists):
        parts = [path.read_text("utf-8").split() for path in lists]
    found: list[list[Frame]] = [[], []]
    for place, names in enumerate(parts):
        if not names:
            problem(f"{root} has no {('training', 'test')[place]} scans")
        for name in names:
            if name not in files:
                problem(f"{lists[place]} names {name}, which training/velodyne does not have")
                continue
            try:
                found[place].append(frame_at(files[name], labelled=True))
            except DataError as error:
                problem(str(error.got))
    return found[0], found[1]


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
    found = {}
    for name, shape in (("P2", (3, 4)), ("R0_rect", (3, 3)), ("Tr_velo_to_cam", (3, 4))):
        if name not in rows:
            raise DataError("data", f"{path} without {name}", "P2, R0_rect and Tr_velo_to_cam", "Restore it.")
        found[name] = numbers(rows[name], shape[0] * shape[1], f"{path}: {name}").reshape(shape)
    rectify, mount = found["R0_rect"], found["Tr_velo_to_cam"]
    turn = rectify @ mount[:, :3]
    if not numpy.allclose(turn @ turn.T, numpy.eye(3), atol=1e-2):
        raise DataError("data", f"{path}: R0_rect · Tr_velo_to_cam, which is no rotation", "a rotation", "Correct it.")
    return Calibration(turn, rectify @ mount[:, 3], found["P2"])


def read_labels(path: Path, calibration: Calibration, points: Path) -> Objects:
    """The boxes of a label file in the LiDAR's frame; classes other than the three are left out."""
    boxes, labels = [], []
    for number, line in enumerate(_lines(path, "KITTI's labels"), 1):
        words = line.split()
        if not words or words[0] not in NAMES:
            continue
        where = f"{path}, line {number}"
        if len(words) not in (15, 16):
            raise DataError("data", f"{where} with {len(words)} words", "15, or 16 with a score", "Correct it.")
        high, wide, long, x, y, z, turn = numbers(words[8:15], 7, where)
        if min(high, wide, long) <= 0:
            raise DataError("data", f"{where}: sides {[long, wide, high]}", "sides above 0", "Correct it.")
        centre = (numpy.array([x, y - high / 2, z]) - calibration.place) @ calibration.turn  # the bottom's middle
        boxes.append([*centre, long, wide, high, _turned(-turn - math.pi / 2), math.nan, math.nan])
        labels.append(CLASSES.index(NAMES[words[0]]))
    array = numpy.array(boxes, dtype=numpy.float32).reshape(-1, 9)
    inside = count_inside(_points(points)[:, :3], array) if len(array) else numpy.zeros(0, dtype=numpy.int64)
    return Objects(array, numpy.array(labels, dtype=numpy.int64), [""] * len(labels), inside)


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


def write_labels(path: Path, frame: Frame, found: Mapping[str, Any], classes: Sequence[str]) -> None:
    """Predictions as lines of KITTI's labels with scores. Boxes that the camera does not see are left out."""
    calibration: Calibration = frame.calibration
    shown = {name: word for word, name in NAMES.items()}
    lines = []
    rows = zip(found["boxes"].double(), found["scores"].tolist(), found["labels"].tolist(), strict=True)
    for box, score, label in rows:
        eight = corners(box[None])[0].numpy() @ calibration.turn.T + calibration.place
        if eight[:, 2].min() <= 0.1:
            continue
        pixels = eight @ calibration.projection[:, :3].T + calibration.projection[:, 3]
        pixels = pixels[:, :2] / pixels[:, 2:]
        low, high = (numpy.clip(edge, 0, numpy.array(IMAGE) - 1) for edge in (pixels.min(0), pixels.max(0)))
        if (high <= low).any():
            continue
        centre = calibration.turn @ box[:3].numpy() + calibration.place
        turn = _turned(-float(box[6]) - math.pi / 2)
        numbers_ = [_turned(turn - math.atan2(centre[0], centre[2])), *low, *high, box[5], box[4], box[3], centre[0],
                    centre[1] + float(box[5]) / 2, centre[2], turn]  # fmt: skip
        name = shown.get(classes[label], classes[label])
        lines.append(" ".join([name, "-1", "-1", *(f"{float(value):.4f}" for value in numbers_), f"{score:.4f}"]))
    write_whole(path, "".join(f"{line}\n" for line in lines))


def _turned(angle: float) -> float:
    """The angle between -π and π."""
    return (angle + math.pi) % (2 * math.pi) - math.pi


def _lines(path: Path, what: str) -> list[str]:
    try:
        return path.read_text("utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise DataError("data", f"{path}: {reason}", what, "Restore it.") from error
