"""Masks of objects as files have them: polygons, and run-length codes as lists of counts or as COCO's strings.

Polygons are filled, and masks encoded, by pycocotools. Run-length codes are decoded here: those whose counts do not add
up to the picture (or that break off) pycocotools 2.0.11 decodes to whatever the memory held.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

from polymix.extras import needs

MAX_SHIFT = 60  # bits before the last group of a count
FAR_OUTSIDE = 10  # sides of a picture; pycocotools lists each pixel along an edge, also far outside of the picture


def decode(shape: Any, height: int, width: int) -> Tensor:
    """The mask (height, width) of a polygon list or a run-length code. ValueError: neither, or another size."""
    if isinstance(shape, Mapping):
        return _decode_runs(shape, height, width)
    if not isinstance(shape, list) or not shape:
        raise ValueError("neither polygons nor an RLE")
    if all(isinstance(value, (int, float)) for value in shape):  # some tools write one polygon without its list
        shape = [shape]
    if not all(isinstance(part, list) and all(isinstance(v, (int, float)) for v in part) for part in shape):
        raise ValueError("a polygon that is no list of numbers")
    # Points and lines, which tools write too, have no area.
    shape = [polygon for polygon in shape if len(polygon) >= 6 and not len(polygon) % 2]
    if not shape:
        raise ValueError("a polygon of fewer than three points, or of half a point")
    for polygon in shape:
        if not all(abs(value) < FAR_OUTSIDE * max(height, width) for value in polygon):  # no NaN is
            raise ValueError("a polygon with a point far outside the picture, or of no numbers")
    library = _library()
    polygons = [[float(value) for value in polygon] for polygon in shape]
    return _decode_runs(library.merge(library.frPyObjects(polygons, height, width)), height, width)


def encode(mask: Tensor) -> dict[str, Any]:
    """A mask (height, width) as a run-length code with COCO's string, column by column."""
    runs = _library().encode(numpy.asfortranarray(mask.cpu().to(torch.uint8).numpy()))
    return {"size": list(map(int, runs["size"])), "counts": runs["counts"].decode("ascii")}


def box_of(code: Mapping[str, Any]) -> list[float]:
    """The smallest box x, y, width, height around an encoded mask; zeros around an empty one."""
    return [float(value) for value in _library().toBbox({**code, "counts": code["counts"].encode()})]


def _decode_runs(code: Mapping[str, Any], height: int, width: int) -> Tensor:
    counts = code.get("counts")
    if isinstance(counts, (str, bytes)):
        counts = _counts_of(counts.decode("ascii", "replace") if isinstance(counts, bytes) else counts)
    size = code.get("size")
    size = size if isinstance(size, list) else []
    if size != [height, width]:
        raise ValueError(f"an RLE of {' × '.join(map(str, size)) or 'no size'} in a picture of {height} × {width}")
    if not isinstance(counts, list) or not all(type(count) is int and count >= 0 for count in counts):
        raise ValueError("an RLE whose counts are no list of numbers and no string")
    if sum(counts) != height * width:
        raise ValueError(f"an RLE of {sum(counts):,} pixels in a picture of {height} × {width}")
    values = torch.arange(len(counts)) % 2 == 1
    return values.repeat_interleave(torch.tensor(counts, dtype=torch.int64)).view(width, height).t()


def _counts_of(text: str) -> list[int]:
    """The counts in COCO's string: groups of five bits; from the third count on, differences to the last but one."""
    counts: list[int] = []
    place = 0
    while place < len(text):
        value, shift, more = 0, 0, True
        while more:
            if place == len(text) or shift > MAX_SHIFT or not 0 <= (byte := ord(text[place]) - 48) < 64:
                raise ValueError(f"counts that break off or have another letter at {place}")
            value |= (byte & 31) << shift
            shift, place, more = shift + 5, place + 1, bool(byte & 32)
        if byte & 16:
            value -= 1 << shift
        counts.append(value + (counts[-2] if len(counts) > 2 else 0))
    return counts


def _library() -> Any:
    with needs("detection", "Masks in COCO's format need it."):
        import pycocotools.mask
    return pycocotools.mask
