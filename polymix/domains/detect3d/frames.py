"""One moment of a drive: its points, the boxes around its objects, and where the vehicle is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from polymix.domains.detect3d.poses import Pose

# Numbers of a point: x, y, z in metres, intensity, and its age in seconds. Intensities have the unit of their data, as
# in OpenPCDet: nuScenes' go to 255. Beside metres, shares from 0 to 1 vanish in the encoder's batch norm.
INPUTS = 5


class Ignored(NamedTuple):
    """What counts neither for nor against a prediction.

    boxes: float32 (k, 9), of other classes that look like some: a van found as a car is no mistake. names: those
    classes (k,). regions: (r, 4), left, top, right and bottom in pixels of the camera, where nobody labelled objects.
    """

    boxes: Any
    names: Any
    regions: Any


class Objects(NamedTuple):
    """True boxes float32 (m, 9), classes (m,), attributes by name, "" for none, and points in each (m,)."""

    boxes: Any
    labels: Any
    attributes: list[str]
    points: Any
    ignored: Ignored | None = None


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
