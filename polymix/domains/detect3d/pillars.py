"""Points to pillars or voxels with learned features, and voxels to a map of the ground."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from polymix.domains.detect3d.extent import Extent
from polymix.errors import OptionError, ShapeError, check_int
from polymix.models.points import PointNorm


def cells_of(points: Tensor, extent: Extent) -> tuple[Tensor, Tensor]:
    """The voxel of each point (n, 3), int64, and whether it lies in the space (n,)."""
    low, side = (torch.tensor(part, dtype=torch.float64, device=points.device) for part in (extent.low, extent.voxel))
    cells = ((points[:, :3].double() - low) / side).floor()
    shape = torch.tensor(extent.shape, device=points.device)
    return cells.nan_to_num(-1.0, -1.0, -1.0).long(), ((cells >= 0) & (cells < shape)).all(1)


class _PointLayer(nn.Module):
    """ReLU(BN(W x)) of each point; then beside it the voxel's maximum, or in the last layer that maximum alone."""

    def __init__(self, inputs: int, dim: int, last: bool) -> None:
        super().__init__()
        self.last = last
        own = dim if last else dim // 2
        self.linear, self.norm = nn.Linear(inputs, own, bias=False), PointNorm(own)

    def forward(self, x: Tensor, voxel: Tensor, count: int) -> Tensor:
        x = self.norm(self.linear(x)).relu()
        most = x.new_zeros(count, x.shape[1]).scatter_reduce(0, voxel[:, None].expand_as(x), x, "amax")
        return most if self.last else torch.cat((x, most.index_select(0, voxel)), 1)


class PillarEncoder(nn.Module):
    """Packed points (n, inputs) to the features, places and clouds of the voxels that they occupy.

    A point's features are its own numbers, x, y and z first, its offset from the mean of its voxel's points, and from
    the voxel's centre; then PointNet layers, each a linear map, batch norm and ReLU, with the maximum over the voxel's
    points. All points of a voxel count ("dynamic"); points outside the space are left out. Costs O(n log n + n D²).
    Source: DSVT's VFE, after Zhou et al. 2019.

    Args:
        inputs: numbers of a point. extent: the space and its voxels; pillars are voxels as high as the space.
        channels: of the layers; even but for the last.
    Raises:
        OptionError: an option is out of range. ShapeError: an input does not fit, or no point lies in the space.
    """

    def __init__(self, inputs: int, extent: Extent, channels: Sequence[int] = (128, 128)) -> None:
        super().__init__()
        check_int("inputs", inputs, 3)
        for dim in channels:
            check_int("channels", dim, 2)
        if not channels or any(dim % 2 for dim in channels[:-1]):
            raise OptionError("channels", repr(tuple(channels)), "even numbers, one or more", "")
        self.inputs, self.extent = inputs, extent
        sizes = [inputs + 6, *channels]
        self.layers = nn.ModuleList(
            _PointLayer(a, b, last=place == len(channels) - 1) for place, (a, b) in enumerate(pairwise(sizes))
        )

    def forward(self, points: Tensor, cloud: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Points (n, inputs) and their clouds (n,) to features (V, D), places (V, 3) and clouds (V,)."""
        if points.ndim != 2 or points.shape[1] != self.inputs or cloud.shape != points.shape[:1]:
            got = f"{tuple(points.shape)} with clouds {tuple(cloud.shape)}"
            raise ShapeError("points", got, f"(n, {self.inputs}) with clouds (n,)", "")
        if not points.isfinite().all():
            place = int((~points.isfinite().all(1)).nonzero()[0])
            raise ShapeError("points", f"point {place}: {points[place].tolist()}", "finite numbers", "Remove it.")
        cells, inside = cells_of(points, self.extent)
        points, cloud, cells = points[inside], cloud[inside], cells[inside]
        if not len(points):
            space = f"{self.extent.low} to {self.extent.high}"
            raise ShapeError("points", "none of them there", f"points in {space}", "Widen the space.")
        X, Y, Z = self.extent.shape
        keys, voxel = (((cloud * X + cells[:, 0]) * Y + cells[:, 1]) * Z + cells[:, 2]).unique(return_inverse=True)
        places = torch.stack((keys // (Y * Z) % X, keys // Z % Y, keys % Z), 1)
        xyz = points[:, :3]
        sums = xyz.new_zeros(len(keys), 3).index_add(0, voxel, xyz)
        mean = sums / voxel.bincount(minlength=len(keys))[:, None]
        low, side = (
            torch.tensor(part, dtype=xyz.dtype, device=xyz.device) for part in (self.extent.low, self.extent.voxel)
        )
        centre = low + (cells.to(xyz.dtype) + 0.5) * side
        features = torch.cat((points, xyz - mean[voxel], xyz - centre), 1)
        for layer in self.layers:
            features = layer(features, voxel, len(keys))
        return features, places, keys // (X * Y * Z)


def scatter_map(x: Tensor, places: Tensor, cloud: Tensor, count: int, shape: Sequence[int]) -> Tensor:
    """Features (V, D) of pillars to a map of the ground (count, D, Y, X), zero where there is no pillar."""
    X, Y = shape[0], shape[1]
    flat = x.new_zeros(count * Y * X, x.shape[1]).index_copy(0, (cloud * Y + places[:, 1]) * X + places[:, 0], x)
    return flat.view(count, Y, X, -1).permute(0, 3, 1, 2).contiguous()


class _Residual(nn.Module):
    """Two convolutions of 3 × 3 with batch norm, added to the input, or to its projection where the shape changes."""

    def __init__(self, inputs: int, dim: int, stride: int, projected: bool) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(inputs, dim, 3, stride, 1, bias=False), _norm(dim)
        self.second, self.norm2 = nn.Conv2d(dim, dim, 3, 1, 1, bias=False), _norm(dim)
        self.shortcut = nn.Sequential(nn.Conv2d(inputs, dim, 1, stride, bias=False), _norm(dim)) if projected else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.second(self.norm1(self.first(x)).relu()))
        return (y + (x if self.shortcut is None else self.shortcut(x))).relu()


def _norm(dim: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(dim, eps=1e-3, momentum=0.01)


class GroundBackbone(nn.Module):
    """A residual network over the map of the ground, whose levels are brought to one size and put beside each other.

    Args:
        inputs: channels of the map. depths, strides, channels: of the levels; a level has one block more than its
            depth. out: channels of each level's output. stride: of the output, at most the product of the strides.
    """

    def __init__(
        self, inputs: int, depths: Sequence[int], strides: Sequence[int], channels: Sequence[int], out: int, stride: int
    ) -> None:
        super().__init__()
        if not len(depths) == len(strides) == len(channels) or not depths:
            got = f"{len(depths)} depths, {len(strides)} strides, {len(channels)} channels"
            raise OptionError("depths", got, "as many of each", "Pass one for each level.")
        self.levels, self.ups, self.stride = nn.ModuleList(), nn.ModuleList(), stride
        total = 1
        for depth, step, dim in zip(depths, strides, channels, strict=True):
            for name, value in (("depths", depth), ("strides", step), ("channels", dim)):
                check_int(name, value, 0 if name == "depths" else 1)
            blocks = [_Residual(inputs, dim, step, True), *(_Residual(dim, dim, 1, False) for _ in range(depth))]
            self.levels.append(nn.Sequential(*blocks))
            total, inputs = total * step, dim
            if max(total, stride) % min(total, stride):
                raise OptionError("stride", stride, f"a divisor or a multiple of {total}", "")
            up: Any = (nn.ConvTranspose2d(dim, out, total // stride, total // stride, bias=False) if total >= stride
                       else nn.Conv2d(dim, out, stride // total, stride // total, bias=False))  # fmt: skip
            self.ups.append(nn.Sequential(up, _norm(out), nn.ReLU()))
        self.total, self.outputs = total, out * len(depths)

    def forward(self, x: Tensor) -> Tensor:
        """A map (B, inputs, Y, X) to (B, out · levels, Y / stride, X / stride)."""
        outputs = []
        for level, up in zip(self.levels, self.ups, strict=True):
            x = level(x)
            outputs.append(up(x))
        return torch.cat(outputs, 1)
