"""The data of detection: see `polymix.tasks.boxes.data`."""

from polymix.tasks.boxes.data import LAYOUTS, DetectionData, check, for_evaluation, from_summary, load, made, read

__all__ = ["LAYOUTS", "DetectionData", "check", "for_evaluation", "from_summary", "load", "made", "read"]
