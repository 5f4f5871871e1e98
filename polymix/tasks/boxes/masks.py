"""Masks of objects as files have them: polygons, and run-length codes as lists of counts or as COCO's strings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def decode_string(text: str) -> list[int]:
    """The counts in COCO's string: groups of five bits; from the third count on, differences to the last but one."""
    counts: list[int] = []
    place = 0
    while place < len(text):
        value, shift, more = 0, 0, True
        while more:
            if place == len(text) or not 0 <= (byte := ord(text[place]) - 48) < 64:
                raise ValueError(f"counts that break off or have another letter at {place}")
            value |= (byte & 31) << shift
            shift, place, more = shift + 5, place + 1, bool(byte & 32)
        if byte & 16:
            value -= 1 << shift
        counts.append(value + (counts[-2] if len(counts) > 2 else 0))
    return counts


def encode_string(counts: Sequence[int]) -> str:
    """The inverse of `decode_string`."""
    text = ""
    for place, count in enumerate(counts):
        value, more = int(count) - (int(counts[place - 2]) if place > 2 else 0), True
        while more:
            byte, value = value & 31, value >> 5
            more = value != (-1 if byte & 16 else 0)
            text += chr((byte | (32 if more else 0)) + 48)
    return text


def decode(shape: Any, height: int, width: int) -> Tensor:
    """The mask (height, width) of a polygon list or a run-length code. ValueError: neither, or another size."""
    if isinstance(shape, Mapping):
        counts = shape.get("counts")
        if isinstance(counts, (str, bytes)):
            counts = decode_string(counts.decode("ascii", "replace") if isinstance(counts, bytes) else counts)
        size = list(shape.get("size") or ())
        if size != [height, width]:
            raise ValueError(f"an RLE of {' × '.join(map(str, size)) or 'no size'} in a picture of {height} × {width}")
        if not isinstance(counts, list) or not all(type(count) is int and count >= 0 for count in counts):
            raise ValueError("an RLE whose counts are no list of numbers and no string")
        if sum(counts) != height * width:
            raise ValueError(f"an RLE of {sum(counts):,} pixels in a picture of {height} × {width}")
        values = torch.arange(len(counts)) % 2 == 1
        return values.repeat_interleave(torch.tensor(counts, dtype=torch.int64)).view(width, height).t()
    if not isinstance(shape, list) or not shape:
        raise ValueError("neither polygons nor an RLE")
    mask = torch.zeros(height, width, dtype=torch.bool)
    for polygon in shape:
        numbers = isinstance(polygon, list) and all(isinstance(value, (int, float)) for value in polygon)
        if not numbers or len(polygon) < 6 or len(polygon) % 2:
            raise ValueError("a polygon of fewer than three points, or of half a point")
        mask |= fill(torch.tensor(polygon, dtype=torch.float64).view(-1, 2), height, width)
    return mask


def fill(points: Tensor, height: int, width: int) -> Tensor:
    """The pixels whose centre lies inside a polygon (K, 2) of x and y, by the even-odd rule."""
    (x1, y1), (x2, y2) = points.t(), points.roll(-1, 0).t()
    rows = torch.arange(height, dtype=points.dtype) + 0.5
    crossed = (y1[:, None] <= rows) != (y2[:, None] <= rows)  # (edges, rows)
    at = x1[:, None] + (rows - y1[:, None]) * ((x2 - x1) / torch.where(y2 == y1, 1.0, y2 - y1))[:, None]
    first = (at - 0.5).ceil().clamp(0, width).long()  # the first pixel to the right of the crossing
    turns = torch.zeros(height, width + 1, dtype=torch.int64)
    turns.index_put_((torch.arange(height).expand_as(first)[crossed], first[crossed]), torch.tensor(1), accumulate=True)
    return (turns.cumsum(1)[:, :width] % 2).bool()


def encode(mask: Tensor) -> dict[str, Any]:
    """A mask (height, width) as a run-length code with COCO's string, column by column."""
    flat = mask.t().flatten().to(torch.int8)
    ends = (flat[1:] != flat[:-1]).nonzero()[:, 0] + 1
    edges = torch.cat((torch.zeros(1, dtype=torch.int64), ends, torch.tensor([len(flat)])))
    counts = edges.diff().tolist()
    counts = [0, *counts] if len(flat) and flat[0] else counts
    return {"size": list(mask.shape), "counts": encode_string(counts)}


def box_of(mask: Tensor) -> list[float]:
    """The smallest box x, y, width, height around a mask; zeros around an empty one."""
    if not mask.any():
        return [0.0, 0.0, 0.0, 0.0]
    rows, columns = mask.any(1).nonzero()[:, 0], mask.any(0).nonzero()[:, 0]
    x, y = columns[0].item(), rows[0].item()
    return [float(x), float(y), float(columns[-1].item() - x + 1), float(rows[-1].item() - y + 1)]
