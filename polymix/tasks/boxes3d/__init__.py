"""Boxes around the objects of a LiDAR scan: nuScenes' tables and KITTI, DSVT with any mixer, CenterPoint, NDS."""

from polymix.tasks.boxes3d.data import BoxData, check, load
from polymix.tasks.boxes3d.made import made
from polymix.tasks.boxes3d.recipe import Boxes3dRecipe

__all__ = ["BoxData", "Boxes3dRecipe", "check", "load", "made"]
