"""Point clouds: voxels, curves through them, sparse convolutions, mixers along a curve and in sets, PTv3 and DSVT."""

from polymix.models.points.along import AlongCurve
from polymix.models.points.center_head import CenterHead
from polymix.models.points.center_point import CenterPoint
from polymix.models.points.convolution import Neighbours, SubmanifoldConv3d
from polymix.models.points.curves import ORDERS, hilbert, serialize, z_order
from polymix.models.points.dsvt import DSVT, SetMixer, Sets
from polymix.models.points.grid import MOST_VOXELS, Voxels, pool, voxelize
from polymix.models.points.pillars import Extent, GroundBackbone, PillarEncoder
from polymix.models.points.ptv3 import PTv3

__all__ = [
    "DSVT", "MOST_VOXELS", "ORDERS", "AlongCurve", "CenterHead", "CenterPoint", "Extent", "GroundBackbone",
    "Neighbours", "PTv3", "PillarEncoder", "SetMixer", "Sets", "SubmanifoldConv3d", "Voxels", "hilbert", "pool",
    "serialize", "voxelize", "z_order",
]  # fmt: skip
