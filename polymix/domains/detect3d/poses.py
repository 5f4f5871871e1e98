"""Where a sensor or a vehicle is: quaternions, and moves of points and boxes from one frame to another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy

from polymix.errors import DataError

LENGTH_OFF = 1e-3  # by how much the length of a quaternion may differ from one


class Pose(NamedTuple):
    """A rotation (3, 3) and a place (3,) in metres: x in the outer frame is turn @ x + place."""

    turn: Any
    place: Any

    @staticmethod
    def of(rotation: Sequence[float], translation: Sequence[float], where: str) -> Pose:
        """From a quaternion (w, x, y, z) and a place. Raises DataError, which names `where`, if they are none."""
        place = numbers(translation, 3, f"{where}: translation")
        return Pose(matrix_of(rotation, where), place)

    def apply(self, points: Any) -> Any:
        """Points (n, 3) of this frame in the outer one, float64."""
        return points @ self.turn.T + self.place

    def undo(self, points: Any) -> Any:
        """Points (n, 3) of the outer frame in this one, float64."""
        return (points - self.place) @ self.turn


def numbers(values: Any, count: int, where: str) -> Any:
    """`count` finite numbers, float64. Raises DataError, which names `where`, for anything else."""
    try:
        array = numpy.array(values, dtype=numpy.float64)
    except (TypeError, ValueError, OverflowError):
        array = numpy.zeros(0)
    if array.shape != (count,) or not numpy.isfinite(array).all():
        raise DataError("data", f"{where} {values}", f"{count} finite numbers", "Correct it.")
    return array


def matrix_of(rotation: Sequence[float], where: str) -> Any:
    """The rotation matrix (3, 3) of a quaternion (w, x, y, z). Raises DataError unless its length is one."""
    quaternion = numbers(rotation, 4, f"{where}: rotation")
    length = float(numpy.linalg.norm(quaternion))
    if abs(length - 1) > LENGTH_OFF:
        got = f"{where}: a quaternion of length {length:.4g}"
        raise DataError("data", got, "one of length 1, as w, x, y, z", "Correct or normalise it.")
    w, x, y, z = quaternion / length
    return numpy.array([
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ])  # fmt: skip


def yaw_of(turn: Any) -> float:
    """The turn about the vertical axis, in radians: where a rotation (3, 3) sends the x axis, seen from above."""
    return math.atan2(turn[1, 0], turn[0, 0])


def quaternion_of(yaw: float) -> list[float]:
    """The quaternion (w, x, y, z) of a turn about the vertical axis."""
    return [math.cos(yaw / 2), 0.0, 0.0, math.sin(yaw / 2)]
