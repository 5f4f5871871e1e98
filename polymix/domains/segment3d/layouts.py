"""Scans as they lie on disk: files of SemanticKITTI and nuScenes-lidarseg, and Pointcept's folders of arrays."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from polymix.domains.segment3d import lidarseg
from polymix.errors import DataError, check_choice
from polymix.train.data.arrays import read_array
from polymix.train.data.problems import Problems
from polymix.train.data.scans.files import (
    check_places,
    check_remission,
    check_size,
    near,
    read_numbers,
    read_points,
    sound,
)
from polymix.train.data.scans.nuscenes_tables import BRIGHTEST, version_of

LAYOUTS = ("semantickitti", "nuscenes", "pointcept")
VOID = 255  # the label of points that do not count
KITTI = (
    "car", "bicycle", "motorcycle", "truck", "other vehicle", "person", "bicyclist", "motorcyclist", "road", "parking",
    "sidewalk", "other ground", "building", "fence", "vegetation", "trunk", "terrain", "pole", "traffic sign",
)  # fmt: skip
# SemanticKITTI's numbers to the 19 classes of its benchmark; -1 does not count. Moving things count as standing ones.
FROM_KITTI = {
    0: -1, 1: -1, 10: 0, 11: 1, 13: 4, 15: 2, 16: 4, 18: 3, 20: 4, 30: 5, 31: 6, 32: 7, 40: 8, 44: 9, 48: 10, 49: 11,
    50: 12, 51: 13, 52: -1, 60: 8, 70: 14, 71: 15, 72: 16, 80: 17, 81: 18, 99: -1, 252: 0, 253: 6, 254: 5, 255: 7,
    256: 4, 257: 4, 258: 3, 259: 4,
}  # fmt: skip
TO_KITTI = (10, 11, 15, 18, 20, 30, 31, 32, 40, 44, 48, 49, 50, 51, 70, 71, 72, 80, 81)
TRAINING, VALIDATION = (0, 1, 2, 3, 4, 5, 6, 7, 9, 10), (8,)  # sequences
_TABLE = numpy.full(1 << 16, -2, dtype=numpy.int64)
for _raw, _class in FROM_KITTI.items():
    _TABLE[_raw] = _class
_ARRAYS = ("color", "normal", "strength")  # the features of Pointcept's folders, each if it is there
_LABELS = ("segment", "segment20", "segment200")


@dataclass(frozen=True)
class Scan:
    """One scan: a file of points, or a folder of arrays.

    labels: its label file; None: it has none. numbers: the class of each number of a nuScenes label.
    """

    path: Path
    layout: str
    labels: Path | None
    numbers: tuple[int, ...] = ()

    def points(self) -> Any:
        """float32 (n, 3 + features): coordinates in metres first. Raises DataError for a file that is no sound scan."""
        if self.layout == "pointcept":
            return sound(self.path, _read_arrays(self.path))
        if self.layout == "semantickitti":
            return read_points(self.path)
        points = read_points(self.path, 5)[:, :4].copy()  # the fifth number is the beam
        points[:, 3] /= BRIGHTEST
        return points

    @property
    def coloured(self) -> bool:
        """Whether the fourth to sixth number of a point are a colour."""
        return self.layout == "pointcept" and (self.path / "color.npy").is_file()

    @property
    def normals(self) -> slice:
        """Which numbers of a point are a direction in space."""
        if self.layout != "pointcept" or not (self.path / "normal.npy").is_file():
            return slice(0, 0)
        return slice(6, 9) if self.coloured else slice(3, 6)

    def classes(self, count: int) -> Any:
        """int64 (n,): the class of each of `count` points, VOID where it does not count."""
        if self.labels is None:
            raise DataError("data", f"{self.path} without labels", "a label file beside it", "Add or remove it.")
        if self.layout == "semantickitti":
            raw = read_numbers(self.labels, numpy.uint32, 4, "4 bytes a point: its label in uint32") & 0xFFFF
            classes = _TABLE[raw]
        elif self.layout == "nuscenes":
            raw = read_numbers(self.labels, numpy.uint8, 1, "a byte a point")
            classes = numpy.array(self.numbers, dtype=numpy.int64)[raw]
        else:
            raw = read_array(self.labels).reshape(-1)
            with numpy.errstate(invalid="ignore"):
                classes = raw.astype(numpy.int64)
            if (classes != raw).any():
                wrong = raw[int((classes != raw).argmax())]
                got = f"{self.labels}: label {wrong}, which is no whole number"
                raise DataError("data", got, "labels", "Remove or repair it.")
        if len(classes) != count:
            got = f"{self.labels} with {len(classes):,} labels for {count:,} points in {self.path}"
            raise DataError("data", got, "a label for each point", "Remove or repair the scan.")
        bad = (classes < -1) | (classes >= VOID)
        if bad.any():
            place = int(bad.argmax())
            allowed = {"semantickitti": "one of SemanticKITTI's numbers", "nuscenes": "an index of category.json"}
            got = f"{self.labels}, point {place}: label {int(raw[place])}"
            raise DataError("data", got, allowed.get(self.layout, f"-1 to {VOID - 1}"), "Correct it.")
        return numpy.where(classes < 0, VOID, classes)


def _read_arrays(folder: Path) -> Any:
    parts: list[Any] = []
    for name in ("coord", *_ARRAYS):
        path = folder / f"{name}.npy"
        if name != "coord" and not path.is_file():
            continue
        check_size(path)
        array = read_array(path)
        array = array[:, None] if array.ndim == 1 else array
        if array.ndim != 2 or (parts and len(array) != len(parts[0])) or (not parts and array.shape[1] != 3):
            beside = f" beside {len(parts[0]):,} points in {folder / 'coord.npy'}" if parts else ""
            expected = "a row for each point" if parts else "(n, 3)"
            raise DataError("data", f"{path} of shape {array.shape}{beside}", expected, "Remove or repair the scene.")
        if name == "coord":
            check_places(path, array)
            array = near(array)
        elif name == "color":
            array = _from_black_to_white(path, array)
        elif name == "strength":
            check_remission(path, array)
        parts.append(array.astype(numpy.float32))
    return numpy.concatenate(parts, 1)


def _from_black_to_white(path: Path, colours: Any) -> Any:
    """Colours from -1 to 1: of bytes, of 16 bits where one exceeds 255, or of floats that go to 1.

    Raises DataError for others.
    """
    low, high = colours.min(initial=0), colours.max(initial=0)
    ranges = (1, 255, 65535) if colours.dtype.kind == "f" else (255, 65535)
    white = next((white for white in ranges if high <= white), None)
    if white is None or not low >= 0:  # also for what is no number
        got = f"{path} with a colour of {float(low if white else high):g}"
        raise DataError("data", got, "0 to 255, to 65,535, or to 1", "Repair the scene.")
    return colours.astype(numpy.float32) / (white / 2) - 1


def layout_of(folder: Path, layout: str | None) -> str:
    """The layout of a folder, by its files unless it is given. Raises DataError for a folder of none."""
    if layout is not None:
        check_choice("layout", layout, LAYOUTS)
    if not folder.is_dir():
        raise DataError("data", f"{folder}, which is no folder", "a folder of scans", "Check the path.")
    there = {"semantickitti": (folder / "sequences").is_dir(), "nuscenes": version_of(folder) is not None,
             "pointcept": (folder / "train").is_dir()}  # fmt: skip
    present = next((name for name, is_there in there.items() if is_there and layout in (None, name)), None)
    if present is None:
        marks = {"nuscenes": "v1.*/", "pointcept": "train/"}
        got = f"{folder} without {marks.get(str(layout), 'sequences/')}"
        allowed = "sequences/NN/velodyne/*.bin, v1.*/*.json with lidarseg/, or train/SCENE/coord.npy"
        raise DataError("data", got, allowed, "Check the path.")
    return present


def list_scans(folder: Path, layout: str, problems: Problems) -> tuple[list[Scan], list[Scan]]:
    """Training and test scans of a folder, by name. A part without scans, or without labels, is a problem."""
    if layout == "semantickitti":
        parts = [[Scan(path, layout, _beside(path)) for number in numbers
                  for path in sorted((folder / "sequences" / f"{number:02d}" / "velodyne").glob("*.bin"))]
                 for numbers in (TRAINING, VALIDATION)]  # fmt: skip
        names = ("sequences 00 to 10 without 08", "sequence 08")
        labelled = {scan.labels for part in parts for scan in part}
        for number in (*TRAINING, *VALIDATION):
            for path in sorted((folder / "sequences" / f"{number:02d}" / "labels").glob("*.label")):
                if path not in labelled:
                    problems.add(path, "", "it has no scan of its name in velodyne/")
    elif layout == "nuscenes":
        *keyframes, numbers = lidarseg.list_keyframes(folder, problems)
        parts = [[Scan(points, layout, labels, numbers) for points, labels in part] for part in keyframes]
        names = ("the training scenes", "the test scenes")
    else:
        scenes = [sorted(path for path in (folder / part).glob("*") if path.is_dir()) for part in ("train", "val")]
        parts = [[Scan(scene, layout, _labels_in(scene)) for scene in part] for part in scenes]
        names = ("train/", "val/")
    for scans, name in zip(parts, names, strict=True):
        if not scans:
            problems.add(folder, name, "no keyframe" if layout == "nuscenes" else "no scans")
        for scan in scans:
            if scan.labels is None:
                problems.add(scan.path, "", "it has no labels")
    return parts[0], parts[1]


def _labels_in(scene: Path) -> Path | None:
    return next((path for name in _LABELS if (path := scene / f"{name}.npy").is_file()), None)


def _beside(path: Path) -> Path | None:
    labels = path.parent.parent / "labels" / f"{path.stem}.label"
    return labels if labels.is_file() else None
