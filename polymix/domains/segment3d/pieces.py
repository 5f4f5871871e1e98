"""Scans that are too large to be computed at once, cut into pieces with a rim of their neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy

RIM = 16  # voxels around a piece, whose points are seen but get their classes elsewhere


def pieces_of(places: Any, most: int, rim: int) -> Iterator[tuple[Any, Any]]:
    """Pieces of at most `most` points: for each its points, and those less than `rim` around it, as numbers.

    A piece is halved across its longest side until it is small enough. Of a rim with more points than `most` only
    every second is kept, or every third, and so on; so no piece costs more than 2 `most` points. Every point is in one
    piece. Costs O(n log(n / most)). Points of one voxel are cut only where there are more than `most`.

    Args:
        places: whole numbers (n, 3), the voxels of the points, which are not cut.
    """
    waiting = [(numpy.arange(len(places)), numpy.arange(0))]
    while waiting:
        own, around = waiting.pop()
        if len(own) <= most:
            yield own, around[:: max(1, -(-len(around) // most))]
            continue
        near = places[own]
        axis = int(numpy.ptp(near, axis=0).argmax())
        along, beside = near[:, axis], places[around, axis]
        middle = len(own) // 2
        plane = numpy.partition(along, middle)[middle]
        low = along < plane
        if not low.any():
            low = along <= plane
        if low.all():  # all in one place
            low = numpy.arange(len(own)) < middle
        reach = along < plane + rim, along >= plane - rim
        for mine, seen, outside in ((low, reach[0], beside < plane + rim), (~low, reach[1], beside >= plane - rim)):
            waiting.append((own[mine], numpy.concatenate((own[seen & ~mine], around[outside]))))
