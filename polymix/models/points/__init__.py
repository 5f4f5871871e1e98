"""Point clouds: voxels, curves through them, sparse convolutions, mixers along a curve, and PTv3."""

from polymix.models.points.along import AlongCurve
from polymix.models.points.convolution import Neighbours, SubmanifoldConv3d
from polymix.models.points.curves import ORDERS, hilbert, serialize, z_order
from polymix.models.points.grid import MOST_VOXELS, Voxels, pool, voxelize
from polymix.models.points.ptv3 import PTv3

__all__ = [
    "MOST_VOXELS", "ORDERS", "AlongCurve", "Neighbours", "PTv3", "SubmanifoldConv3d", "Voxels", "hilbert", "pool",
    "serialize", "voxelize", "z_order",
]  # fmt: skip
