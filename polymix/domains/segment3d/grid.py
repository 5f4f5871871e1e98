"""Points to voxels, and voxels to coarser ones. A batch of clouds is packed: one after another, with offsets."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from polymix.errors import OptionError, ShapeError

DEPTH = 16  # bits of a coordinate
MAX_VOXELS = 1 << DEPTH  # along each axis of a cloud


class Voxels(NamedTuple):
    """The voxels of one cloud.

    grid: (V, 3), whole coordinates from 0 on. first: (V,), a point of each voxel. inverse: (n,), the voxel of each
    point.
    """

    grid: Tensor
    first: Tensor
    inverse: Tensor

    def drawn(self) -> Tensor:
        """A random point of each voxel (V,)."""
        order = torch.randperm(len(self.inverse), device=self.inverse.device)
        return order[_first(self.inverse[order], len(self.first))]


def voxelize(coordinates: Tensor, size: float) -> Voxels:
    """The voxels that a cloud occupies: floor(coordinate / size), less the smallest along each axis.

    Args:
        coordinates: (n, 3), in metres, say. size: side of a voxel in the same unit.
    Returns:
        `Voxels`, in the order of their coordinates; the point of a voxel is the first one. Costs O(n log n).
    Raises:
        ShapeError: no points, another shape, numbers that are not finite, or more than 65,536 voxels along an axis.
        OptionError: size is not above 0.
    """
    if not size > 0:
        raise OptionError("size", size, "a number above 0", "Pass the side of a voxel, such as 0.05.")
    if coordinates.ndim != 2 or coordinates.shape[1] != 3 or not len(coordinates):
        raise ShapeError(
            "coordinates", tuple(coordinates.shape), "(n, 3) with n of at least 1", "Leave empty clouds out."
        )
    finite = coordinates.isfinite().all(1)
    if not finite.all():
        place = int((~finite).nonzero()[0])
        raise ShapeError(
            "coordinates", f"point {place} at {coordinates[place].tolist()}", "finite numbers", "Remove it."
        )
    cells = (coordinates.double() / size).floor()
    cells = (cells - cells.min(0).values).long()
    if int(cells.max()) >> DEPTH:
        got = f"{int(cells.max()) + 1:,} voxels of {size} along an axis"
        raise ShapeError("coordinates", got, f"at most {MAX_VOXELS:,}", "Take larger voxels, or remove far points.")
    keys = (cells[:, 0] << 2 * DEPTH) | (cells[:, 1] << DEPTH) | cells[:, 2]
    unique, inverse = keys.unique(return_inverse=True)
    first = _first(inverse, len(unique))
    return Voxels(cells[first], first, inverse)


def pool(codes: Tensor, grid: Tensor, coarser: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Voxels of twice the side: those that share their code without its last three bits are one.

    Args:
        codes: (orders, V), from `serialize`. grid: (V, 3).
        coarser: False where one voxel a cloud is left, whose codes have no bits below the cloud's: it stays.
    Returns:
        The coarser codes (orders, W) and grid (W, 3), and the coarse voxel of each voxel (V,). Clouds stay in order.
    """
    codes, grid = (codes >> 3, grid >> 1) if coarser else (codes, grid)
    unique, inverse = codes[0].unique(return_inverse=True)
    first = _first(inverse, len(unique))
    return codes[:, first], grid[first], inverse


def cloud_of(offsets: Tensor) -> Tensor:
    """The cloud of each point (V,) by the offsets (B + 1,) of the clouds."""
    return torch.arange(len(offsets) - 1, device=offsets.device).repeat_interleave(offsets.diff())


def _first(inverse: Tensor, count: int) -> Tensor:
    """The first place of each of `count` values in `inverse`."""
    places = torch.arange(len(inverse), device=inverse.device)
    return places.new_full((count,), len(inverse)).scatter_reduce(0, inverse, places, "amin")
