"""One moment of a drive: its points, the boxes around its objects, and where the vehicle is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy

from polymix.errors import DataError
from polymix.tasks.boxes3d.poses import Pose

INPUTS = 5  # numbers of a point: x, y, z in metres, intensity from 0 to 1, and its age in seconds


class Objects(NamedTuple):
    """True boxes float32 (m, 9), classes (m,), attributes by name, "" for none, and points in each (m,)."""

    boxes: Any
    labels: Any
    attributes: list[str]
    points: Any


@dataclass(frozen=True)
class Frame:
    """One moment of a drive, in the frame of the vehicle.

    path: of its points. token: its name in results. read: gives its points. objects: None where nothing is labelled.
    pose: of the vehicle in the world. calibration: KITTI's; None elsewhere.
    """

    path: Path
    token: str
    read: Callable[[], Any]
    objects: Objects | None
    pose: Pose | None = None
    calibration: Any = None

    def points(self) -> Any:
        """float32 (n, 5). Raises DataError for a file that is no sound scan."""
        return self.read()


def read_points(path: Path, columns: int) -> Any:
    """float32 (n, columns). Raises DataError for no points, another length, or numbers that are not finite."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError("data", f"{path}: {error.strerror}", "a file of points", "Check the path.") from error
    if size % (4 * columns):
        expected = f"{4 * columns} bytes a point: {columns} numbers in float32"
        raise DataError("data", f"{path} with {size:,} bytes", expected, "It may be cut off.")
    if not size:
        raise DataError("data", f"{path} without points", "one point or more", "Remove it.")
    found = numpy.fromfile(path, dtype=numpy.float32).reshape(-1, columns)
    wrong = ~numpy.isfinite(found).all(1)
    if wrong.any():
        place = int(wrong.argmax())
        raise DataError("data", f"{path}, point {place}: {found[place].tolist()}", "finite numbers", "Remove it.")
    return found
