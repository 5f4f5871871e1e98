"""The space that a detector sees, in voxels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from polymix.errors import OptionError


class Extent(NamedTuple):
    """The space that a detector sees: low and high (x, y, z) in metres, and the sides of a voxel in metres."""

    low: tuple[float, float, float]
    high: tuple[float, float, float]
    voxel: tuple[float, float, float]

    @staticmethod
    def of(space: Sequence[float], voxel: Sequence[float]) -> Extent:
        """From (x, y, z, x, y, z), the low corner first, and the sides of a voxel.

        Raises OptionError for other counts, an empty space, or one that is no whole number of voxels.
        """
        low, high, sides = tuple(space[:3]), tuple(space[3:]), tuple(voxel)
        if len(space) != 6 or not all(a < b for a, b in zip(low, high, strict=True)):
            raise OptionError("space", repr(tuple(space)), "(x, y, z, x, y, z), the low corner first", "")
        if len(sides) != 3 or not all(side > 0 for side in sides):
            raise OptionError("voxel", repr(sides), "three sides above 0", "For example, (0.3, 0.3, 8.0).")
        for a, b, side in zip(low, high, sides, strict=True):
            if abs((b - a) / side - round((b - a) / side)) > 1e-6:
                got = f"{side} over {b - a:g} m"
                raise OptionError("voxel", got, "a side that divides the space", "Change one of the two.")
        return Extent(low, high, sides)  # type: ignore[arg-type]

    @property
    def shape(self) -> tuple[int, int, int]:
        """The voxels along x, y and z."""
        sides = zip(self.low, self.high, self.voxel, strict=True)
        x, y, z = (round((b - a) / side) for a, b, side in sides)
        return x, y, z
