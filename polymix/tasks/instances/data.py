"""The data of instance segmentation: see `polymix.tasks.boxes.data`. Every object needs a mask."""

from polymix.tasks.boxes.data import LAYOUTS, DetectionData, check, for_evaluation, from_summary, load, made

__all__ = ["LAYOUTS", "DetectionData", "check", "for_evaluation", "from_summary", "load", "made"]
