"""One moment of a drive: its points, the boxes around its objects, and where the vehicle is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from polymix.tasks.boxes3d.poses import Pose
from polymix.tasks.points.layouts import read_bin, sound

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
    return sound(path, read_bin(path, columns))
