"""A class for every point of a scan: SemanticKITTI and Pointcept's folders, PTv3 with any mixer, mIoU."""

from polymix.tasks.points.data import PointData, check, load, made
from polymix.tasks.points.recipe import PointsRecipe

__all__ = ["PointData", "PointsRecipe", "check", "load", "made"]
