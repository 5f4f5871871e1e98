"""A detector of boxes in LiDAR scans: pillars or voxels, DSVT, a network over the ground, CenterPoint's head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polymix.domains.detect3d.center_head import CenterHead
from polymix.domains.detect3d.dsvt import DSVT
from polymix.domains.detect3d.extent import Extent
from polymix.domains.detect3d.pillars import GroundBackbone, PillarEncoder, scatter_map
from polymix.errors import OptionError, ShapeError, check_int
from polymix.mixers import MixerConfig


class CenterPoint(nn.Module):
    """Points to heat maps and boxes, by DSVT with any mixer.

    The parts are DSVT's: learned features of pillars (or voxels), DSVT, the map of the ground, a residual network. The
    head is CenterPoint's. For Waymo that is as published; for nuScenes DSVT and PADRe have TransFusion's head (200
    proposals, one layer of a decoder) instead: here a deviation.

    Args:
        mixer: a config, or one for each layer of DSVT.
        inputs: numbers of a point, x, y and z first.
        groups: the classes of each group of the head.
        space: (x, y, z, x, y, z) in metres, the low corner first. voxel: its sides in metres.
        encoder: channels of the layers over points; the last is DSVT's width.
        dsvt: options of `DSVT`, without dim and shape.
        depths, strides, channels, out: of the network over the ground. stride: of its output, in voxels.
        head_dim, convolutions, velocity: of the head.
    Raises:
        OptionError: an option is out of range. ShapeError: an input does not fit.
    Source: DSVT, Sections 3 and 4; CenterPoint, Section 4.
    """

    def __init__(
        self, mixer: MixerConfig | Sequence[MixerConfig] | None = None, *, inputs: int = 5,
        groups: Sequence[int] = (1, 2, 2, 1, 2, 2), space: Sequence[float] = (-54.0, -54.0, -5.0, 54.0, 54.0, 3.0),
        voxel: Sequence[float] = (0.3, 0.3, 8.0), encoder: Sequence[int] = (128, 128),
        dsvt: Mapping[str, Any] | None = None, depths: Sequence[int] = (1, 2, 2), strides: Sequence[int] = (1, 2, 2),
        channels: Sequence[int] = (128, 128, 256), out: int = 128, stride: int = 2, head_dim: int = 64,
        convolutions: int = 2, velocity: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        for name, value in (("out", out), ("stride", stride), ("head_dim", head_dim)):
            check_int(name, value, 1)
        self.extent = Extent.of(space, voxel)
        self.encoder = PillarEncoder(inputs, self.extent, encoder)
        self.dsvt = DSVT(mixer, dim=encoder[-1], shape=self.extent.shape, **(dsvt or {}))
        self.ground = GroundBackbone(encoder[-1], depths, strides, channels, out, stride)
        for axis in (0, 1):
            if self.extent.shape[axis] % max(self.ground.total, stride):
                got = f"{self.extent.shape[axis]} voxels along an axis"
                raise OptionError("space", got, f"a multiple of {max(self.ground.total, stride)}", "Change the space.")
        self.head = CenterHead(self.ground.outputs, groups, head_dim, convolutions, velocity)

    @property
    def stride(self) -> int:
        """Voxels along a side of the head's cells."""
        return self.ground.stride

    def forward(self, points: Tensor, offsets: Tensor) -> dict[str, Tensor]:
        """Packed points (n, inputs) and the clouds' offsets (B + 1,) to the head's heat and boxes."""
        sizes = offsets.diff() if offsets.ndim == 1 else offsets
        fits = offsets.ndim == 1 and len(offsets) > 1 and int(offsets[0]) == 0 and int(offsets[-1]) == len(points)
        if not fits or bool((sizes < 0).any()):
            allowed = f"the start of each cloud, from 0, and {len(points)} at the end"
            raise ShapeError("offsets", offsets.tolist(), allowed, "")
        count = len(offsets) - 1
        cloud = torch.arange(count, device=points.device).repeat_interleave(sizes)
        x, places, cloud = self.dsvt(*self.encoder(points, cloud))
        return self.head(self.ground(scatter_map(x, places, cloud, count, self.extent.shape)))
