"""Curves that visit every voxel of a cube: z-order, Hilbert's, and both with x and y exchanged."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from polymix.domains.segment3d.grid import DEPTH
from polymix.domains.segment3d.recipe import ORDERS
from polymix.errors import ShapeError, check_choice, check_int

CLOUDS = 1 << (63 - 3 * DEPTH)  # that fit above the bits of a curve
_CHUNK = 1 << 15  # points whose numbers stay in cache
_LEVELS = 4  # of Hilbert's curve that are followed at once
# Where the bits of a number stand after each step that spreads them to every third place.
_SPREAD = ((32, 0x1F00000000FFFF), (16, 0x1F0000FF0000FF), (8, 0x100F00F00F00F00F), (4, 0x10C30C30C30C30C3),
           (2, 0x1249249249249249))  # fmt: skip


def z_order(grid: Tensor, depth: int = DEPTH) -> Tensor:
    """The place of voxels (V, 3) along the z-order curve: the bits of x, y and z in turn, x first. Int64 (V,).

    The code of a voxel of twice the side is code >> 3. Costs O(V). Raises ShapeError for coordinates of more bits than
    `depth`. Source: Morton 1966.
    """
    _check(grid, depth)
    return _in_pieces(lambda part: _interleave(list(part.unbind(1))), grid)


def hilbert(grid: Tensor, depth: int = DEPTH) -> Tensor:
    """The place of voxels (V, 3) along Hilbert's curve through a cube of 2^depth voxels a side. Int64 (V,).

    Voxels that follow each other on the curve share a face. The code of a voxel of twice the side is code >> 3, along
    the curve of depth - 1. Costs O(V depth). Raises ShapeError for coordinates of more bits than
    `depth`. Source: Skilling 2004, "Programming the Hilbert curve".
    """
    _check(grid, depth)
    table = _turns(_LEVELS).to(grid.device)
    return _in_pieces(lambda part: _followed(_interleave(list(part.unbind(1))), table, depth), grid)


def serialize(grid: Tensor, cloud: Tensor, order: str, depth: int = DEPTH) -> Tensor:
    """Codes (V,) by which to sort packed clouds: the cloud in the high bits, the place on the curve below.

    Args:
        grid: (V, 3). cloud: int64 (V,), the cloud of each voxel. order: one of `ORDERS`. depth: bits of a coordinate.
    Raises:
        OptionError: an unknown order or depth. ShapeError: coordinates beyond the depth, or too many clouds.
    """
    check_choice("order", order, ORDERS)
    if len(cloud) and int(cloud.max()) >= CLOUDS:
        raise ShapeError("cloud", f"{int(cloud.max()) + 1:,} clouds", f"at most {CLOUDS:,}", "Take smaller batches.")
    curve, _, exchanged = order.partition("-")
    place = {"z": z_order, "hilbert": hilbert}[curve](grid[:, [1, 0, 2]] if exchanged else grid, depth)
    return (cloud << 3 * depth) | place


def _check(grid: Tensor, depth: int) -> None:
    check_int("depth", depth, 1, DEPTH)
    if grid.ndim != 2 or grid.shape[1] != 3:
        raise ShapeError("grid", tuple(grid.shape), "(V, 3)", "")
    if len(grid) and (int(grid.min()) < 0 or int(grid.max()) >> depth):
        got = f"coordinates from {int(grid.min())} to {int(grid.max())}"
        raise ShapeError(
            "grid", got, f"0 to {(1 << depth) - 1}, {depth} bits", "Take larger voxels, or a larger depth."
        )


def _in_pieces(function: Callable[[Tensor], Tensor], grid: Tensor) -> Tensor:
    """A code for each voxel, computed for so many at a time that the numbers stay in cache."""
    return torch.cat([function(part) for part in grid.long().split(_CHUNK)]) if len(grid) else grid.new_zeros(0)


def _interleave(axes: list[Tensor]) -> Tensor:
    """The bits of three numbers in turn, the first number's first."""
    code = torch.zeros_like(axes[0])
    for place, axis in enumerate(axes):
        bits = axis
        for shift, mask in _SPREAD:
            bits = (bits | (bits << shift)) & mask
        code |= bits << (2 - place)
    return code


def _followed(octants: Tensor, table: Tensor, depth: int) -> Tensor:
    """Hilbert's codes from those of the z-order, whose digits say in which octant of each cube a voxel lies."""
    bits, steps = 3 * _LEVELS, -(-depth // _LEVELS)
    below = bits * steps - 3 * depth  # of the last step, under the voxels
    octants = octants << below
    state, code = torch.zeros_like(octants), torch.zeros_like(octants)
    for step in reversed(range(steps)):
        entry = table[state | (octants >> bits * step & (1 << bits) - 1)]
        code = code << bits | entry & (1 << bits) - 1
        state = entry & -(1 << bits)
    return code >> below


@lru_cache
def _turns(levels: int) -> Tensor:
    """A table by state and octants, of so many levels, with the digits on the curve and the next state above them.

    A state is one of the ways in which the curve lies turned in a cube. They are read off Skilling's algorithm.
    """
    cube = torch.cartesian_prod(*[torch.arange(2)] * 3)

    def digits_in(cell: Tensor, level: int) -> tuple[int, ...]:
        return tuple((_skilling(2 * cell + cube, level + 1) & 7).tolist())

    queue = [(torch.zeros(3, dtype=torch.int64), 0)]  # a cube for each state
    known = {digits_in(*queue[0]): 0}
    onward: list[list[int]] = []
    for cell, level in queue:
        inner = [(child, level + 1) for child in 2 * cell + cube]
        for child in inner:
            if (pattern := digits_in(*child)) not in known:
                known[pattern] = len(known)
                queue.append(child)
        onward.append([known[digits_in(*child)] for child in inner])
    one, following = torch.tensor(list(known)), torch.tensor(onward)  # (states, 8)
    digits, state = one, following
    for _ in range(levels - 1):
        digits, state = (digits[..., None] << 3 | one[state]).flatten(1), following[state].flatten(1)
    return (state << 3 * levels | digits).flatten()


def _skilling(grid: Tensor, depth: int) -> Tensor:
    x, y, z = (axis.int() for axis in grid.unbind(1))
    axes = [x.clone(), y.clone(), z.clone()]
    for level in range(depth - 1, 0, -1):  # undo the turns of the sub-cubes, from the largest on
        low = (1 << level) - 1
        for place in range(3):
            here = -((axes[place] >> level) & 1)  # all ones where the bit is set
            if place == 0:
                axes[0] ^= here & low
                continue
            turned = (axes[0] ^ axes[place]) & low & ~here
            axes[0] ^= (here & low) | turned
            axes[place] ^= turned
    axes[1] ^= axes[0]  # Gray code
    axes[2] ^= axes[1]
    turn = torch.zeros_like(x)
    for level in range(depth - 1, 0, -1):
        turn ^= -((axes[2] >> level) & 1) & ((1 << level) - 1)
    return _interleave([(axis ^ turn).long() for axis in axes])
