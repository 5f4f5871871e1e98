"""A class for every pixel of a picture: readers, hosts with any mixer, mIoU."""

from polymix.tasks.segment.data import SegmentData, check, load, made
from polymix.tasks.segment.recipe import SegmentRecipe

__all__ = ["SegmentData", "SegmentRecipe", "check", "load", "made"]
