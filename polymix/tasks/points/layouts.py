"""Scans as they lie on disk: files of SemanticKITTI and nuScenes-lidarseg, and Pointcept's folders of arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from polymix.errors import DataError, check_choice
from polymix.limits import memory_of
from polymix.tasks.nuscenes_tables import BRIGHTEST, version_of
from polymix.tasks.points import lidarseg

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
            return sound(self.path, read_bin(self.path))
        found = read_bin(self.path, 5)[:, :4].copy()  # the fifth number is the beam
        found[:, 3] /= BRIGHTEST
        return sound(self.path, found)

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
        try:
            if self.layout == "semantickitti":
                raw = _read_whole(self.labels, numpy.uint32, 4, "4 bytes a point: its label in uint32") & 0xFFFF
                found = _TABLE[raw]
            elif self.layout == "nuscenes":
                raw = _read_whole(self.labels, numpy.uint8, 1, "a byte a point")
                found = numpy.array(self.numbers, dtype=numpy.int64)[raw]
            else:
                raw = numpy.load(self.labels, allow_pickle=False).reshape(-1)
                found = raw.astype(numpy.int64)
        except DataError:
            raise
        except (OSError, ValueError) as error:
            raise DataError("data", f"{self.labels}: {error}", "labels", "Remove or repair it.") from error
        if len(found) != count:
            got = f"{self.labels} with {len(found):,} labels for {count:,} points"
            raise DataError("data", got, "a label for each point", "Remove or repair the scan.")
        bad = (found < -1) | (found >= VOID)
        if bad.any():
            place = int(bad.argmax())
            allowed = {"semantickitti": "one of SemanticKITTI's numbers", "nuscenes": "an index of category.json"}
            got = f"{self.labels}, point {place}: label {int(raw[place])}"
            raise DataError("data", got, allowed.get(self.layout, f"-1 to {VOID - 1}"), "Correct it.")
        return numpy.where(found < 0, VOID, found)


def read_bin(path: Path, columns: int = 4) -> Any:
    """float32 (n, columns): x, y, z, remission and more. Raises DataError where the length is none of such points."""
    expected = f"{4 * columns} bytes a point: x, y, z and {'remission' if columns == 4 else 'more'} in float32"
    return _read_whole(path, numpy.float32, 4 * columns, expected).reshape(-1, columns)


def sound(path: Path, points: Any) -> Any:
    """The points of a file. Raises DataError if there are none, or a number is not finite."""
    if not len(points):
        raise DataError("data", f"{path} without points", "one point or more", "Remove it.")
    wrong = ~numpy.isfinite(points).all(1)
    if wrong.any():
        place = int(wrong.argmax())
        raise DataError(
            "data", f"{path}, point {place}: {points[place].tolist()}", "finite numbers", "Remove the point."
        )
    return points


def _size_of(path: Path) -> int:
    """The bytes of a file. Raises DataError where it cannot be read, or is larger than this machine's memory."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError("data", f"{path}: {error.strerror}", "a file of points or labels", "Check the path.") from error
    there = memory_of()
    if size > there:
        allowed = f"at most the {there:,} bytes of memory of this machine"
        raise DataError(
            "data", f"{path} with {size:,} bytes, larger than memory", allowed, "Cut it into smaller scans."
        )
    return size


def _read_whole(path: Path, dtype: Any, each: int, expected: str) -> Any:
    """The numbers of a file. Raises DataError where it cannot be read, does not fit into memory, or is cut off."""
    size = _size_of(path)
    if size % each:
        raise DataError("data", f"{path} with {size:,} bytes, no multiple of {each}", expected, "It may be cut off.")
    return numpy.fromfile(path, dtype=dtype)


def _read_arrays(folder: Path) -> Any:
    parts: list[Any] = []
    for name in ("coord", *_ARRAYS):
        path = folder / f"{name}.npy"
        if name != "coord" and not path.is_file():
            continue
        _size_of(path)
        try:
            array = numpy.load(path, allow_pickle=False).astype(numpy.float32)
        except (OSError, ValueError) as error:
            raise DataError("data", f"{path}: {error}", "an array", "Remove or repair the scene.") from error
        array = array[:, None] if array.ndim == 1 else array
        if array.ndim != 2 or (parts and len(array) != len(parts[0])) or (not parts and array.shape[1] != 3):
            expected = f"a row for each of {len(parts[0]):,} points" if parts else "(n, 3)"
            raise DataError("data", f"{path} of shape {array.shape}", expected, "Remove or repair the scene.")
        parts.append(array / 127.5 - 1 if name == "color" else array)
    return numpy.concatenate(parts, 1)


def layout_of(folder: Path, layout: str | None) -> str:
    """The layout of a folder, by its files unless it is given. Raises DataError for a folder of none."""
    if layout is not None:
        check_choice("layout", layout, LAYOUTS)
    if not folder.is_dir():
        raise DataError("data", f"{folder}, which is no folder", "a folder of scans", "Check the path.")
    there = {"semantickitti": (folder / "sequences").is_dir(), "nuscenes": version_of(folder) is not None,
             "pointcept": (folder / "train").is_dir()}  # fmt: skip
    found = next((name for name, is_there in there.items() if is_there and layout in (None, name)), None)
    if found is None:
        marks = {"nuscenes": "v1.*/", "pointcept": "train/"}
        got = f"{folder} without {marks.get(str(layout), 'sequences/')}"
        allowed = "sequences/NN/velodyne/*.bin, v1.*/*.json with lidarseg/, or train/SCENE/coord.npy"
        raise DataError("data", got, allowed, "Check the path.")
    return found


def find(folder: Path, layout: str, problem: Callable[[str], None]) -> tuple[list[Scan], list[Scan]]:
    """Training and test scans of a folder, by name. A part without scans, or without labels, is a problem."""
    if layout == "semantickitti":
        parts = [[Scan(path, layout, _beside(path)) for number in numbers
                  for path in sorted((folder / "sequences" / f"{number:02d}" / "velodyne").glob("*.bin"))]
                 for numbers in (TRAINING, VALIDATION)]  # fmt: skip
        names = ("sequences 00 to 10 without 08", "sequence 08")
        known = {scan.labels for part in parts for scan in part}
        for number in (*TRAINING, *VALIDATION):
            for path in sorted((folder / "sequences" / f"{number:02d}" / "labels").glob("*.label")):
                if path not in known:
                    problem(f"{path} has no scan of its name in velodyne/")
    elif layout == "nuscenes":
        *found, classes = lidarseg.find(folder, problem)
        parts = [[Scan(points, layout, labels, classes) for points, labels in part] for part in found]
        names = ("the training scenes", "the test scenes")
    else:
        scenes = [sorted(path for path in (folder / part).glob("*") if path.is_dir()) for part in ("train", "val")]
        parts = [[Scan(scene, layout, _labels_in(scene)) for scene in part] for part in scenes]
        names = ("train/", "val/")
    for scans, name in zip(parts, names, strict=True):
        if not scans:
            problem(f"{folder}: {name} has no scans" if layout != "nuscenes" else f"{folder}: {name} have no keyframe")
        for one in scans:
            if one.labels is None:
                problem(f"{one.path} has no labels")
    return parts[0], parts[1]


def _labels_in(scene: Path) -> Path | None:
    return next((path for name in _LABELS if (path := scene / f"{name}.npy").is_file()), None)


def _beside(path: Path) -> Path | None:
    labels = path.parent.parent / "labels" / f"{path.stem}.label"
    return labels if labels.is_file() else None
