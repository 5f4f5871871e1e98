"""Synthetic scans in the layout of SemanticKITTI, of streets that a virtual LiDAR sees."""

from __future__ import annotations

from pathlib import Path

import numpy

from polymix.train.data.scans.lidar import scan

NAME = "scans of a virtual LiDAR"
TRAINING, TEST = 0, 8  # sequences


def synthetic(folder: str | Path, seed: int = 0, scans: int = 60, test_scans: int = 16, question: str = "what") -> Path:
    """Write scans as SemanticKITTI has them into a folder, and return it.

    Training scans are in sequence 00 and test scans in sequence 08; every scan has a street of its own. question: one
    of `Streets`.
    """
    folder = Path(folder)
    for number, count in ((TRAINING, scans), (TEST, test_scans)):
        sequence = folder / "sequences" / f"{number:02d}"
        for kind in ("velodyne", "labels"):
            (sequence / kind).mkdir(parents=True, exist_ok=True)
        for place in range(count):
            points, labels = scan(numpy.random.default_rng([seed, number, place]), question)
            points.tofile(sequence / "velodyne" / f"{place:06d}.bin")
            labels.tofile(sequence / "labels" / f"{place:06d}.label")
    return folder
