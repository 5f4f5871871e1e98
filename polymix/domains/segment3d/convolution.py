"""Submanifold sparse convolution: a convolution whose outputs are at the voxels of its inputs, and nowhere else."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from polymix.errors import ShapeError, check_choice, check_int


class Neighbours(NamedTuple):
    """Which voxels a convolution joins, for each of its kernel³ offsets: where it writes and where it reads."""

    kernel: int
    pairs: tuple[tuple[Tensor, Tensor], ...]

    @staticmethod
    def of(grid: Tensor, cloud: Tensor, kernel: int) -> Neighbours:
        """The neighbours of packed voxels; all convolutions of a stage share them.

        Args:
            grid: int64 (V, 3), from 0 on. cloud: int64 (V,), the cloud of each voxel; clouds do not meet.
            kernel: odd; the offsets go from -(kernel // 2) to kernel // 2 along x, y and z, z fastest.
        Returns:
            Costs O(kernel³ V log V), half of it saved because neighbours are mutual.
        Raises:
            ShapeError: two voxels of a cloud have the same coordinates. OptionError: kernel is even.
        """
        check_int("kernel", kernel, 1)
        check_choice("kernel", kernel % 2, (1,))
        radius = kernel // 2
        sides = [1] * 3 if not len(grid) else [int(side) + 1 + 2 * radius for side in grid.max(0).values]
        x, y, z = (axis + radius for axis in grid.unbind(1))
        keys = ((cloud * sides[0] + x) * sides[1] + y) * sides[2] + z
        ordered, places = keys.sort()
        if bool((ordered[1:] == ordered[:-1]).any()):
            twice = places[1:][ordered[1:] == ordered[:-1]][0]
            got = f"two voxels at {grid[twice].tolist()} in cloud {int(cloud[twice])}"
            raise ShapeError("grid", got, "each voxel once", "Use voxelize.")
        offsets = list(itertools.product(range(-radius, radius + 1), repeat=3))
        pairs: list[tuple[Tensor, Tensor]] = []
        for dx, dy, dz in offsets[: len(offsets) // 2]:
            asked = keys + (dx * sides[1] + dy) * sides[2] + dz
            at = torch.searchsorted(ordered, asked).clamp_max(max(len(ordered) - 1, 0))
            target = (ordered[at] == asked).nonzero()[:, 0]
            pairs.append((target, places[at[target]]))
        itself = torch.arange(len(grid), device=grid.device)
        mirrored = [(source, target) for target, source in reversed(pairs)]
        return Neighbours(kernel, (*pairs, (itself, itself), *mirrored))


class SubmanifoldConv3d(nn.Module):
    """y_v = b + Σ_o W_o x_(v + o) over the offsets o of a cube at which there is a voxel.

    Equal to `nn.Conv3d` with zero padding at the voxels, if all others are zero. Costs kernel³ V in out multiply-adds
    at most. Source: Graham et al. 2018.

    Args:
        inputs, outputs: channels. kernel: odd side of the cube. bias: add b.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int = 3, *, bias: bool = True) -> None:
        super().__init__()
        for name, value in (("inputs", inputs), ("outputs", outputs), ("kernel", kernel)):
            check_int(name, value, 1)
        bound = 1 / math.sqrt(inputs * kernel**3)
        self.kernel = kernel
        self.weight = nn.Parameter(torch.empty(kernel**3, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(outputs).uniform_(-bound, bound)) if bias else None

    def forward(self, x: Tensor, neighbours: Neighbours) -> Tensor:
        """Features (V, inputs) to (V, outputs). Raises ShapeError for neighbours of another kernel."""
        if neighbours.kernel != self.kernel:
            raise ShapeError("neighbours", f"a kernel of {neighbours.kernel}", f"one of {self.kernel}", "")
        y = x @ self.weight[len(neighbours.pairs) // 2]
        y = y if self.bias is None else y + self.bias
        for place, (target, source) in enumerate(neighbours.pairs):
            if len(target) and 2 * place + 1 != len(neighbours.pairs):
                y = y.index_add(0, target, (x.index_select(0, source) @ self.weight[place]).to(y.dtype))
        return y
