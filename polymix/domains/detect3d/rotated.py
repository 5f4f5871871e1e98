"""Boxes that stand on the ground and turn about the vertical axis: corners, overlaps, and the best of many."""

from __future__ import annotations

import torch
from torch import Tensor

from polymix.errors import ShapeError

# Columns of a box: centre in metres, sides in metres, turn about the vertical axis in radians, velocity in metres per
# second. A turn of 0 points along x; the length lies along the turn.
COLUMNS = ("x", "y", "z", "length", "width", "height", "yaw", "vx", "vy")
_EDGE_TOLERANCE = 1e-9  # relative distance at which a corner lies on a side


def check_boxes(boxes: Tensor) -> None:
    """Raise ShapeError unless `boxes` is (n, 7) or more columns, as `COLUMNS` has them."""
    if boxes.ndim != 2 or boxes.shape[1] < 7:
        raise ShapeError("boxes", tuple(boxes.shape), f"(n, 7) or (n, 9): {', '.join(COLUMNS)}", "")


def corners_from_above(boxes: Tensor) -> Tensor:
    """The corners (n, 4, 2) of boxes on the ground, counter-clockwise, front left first."""
    check_boxes(boxes)
    half = boxes[:, None, 3:5] / 2 * boxes.new_tensor([[1, 1], [-1, 1], [-1, -1], [1, -1]])
    cos, sin = boxes[:, 6, None].cos(), boxes[:, 6, None].sin()
    turned = torch.stack((cos * half[..., 0] - sin * half[..., 1], sin * half[..., 0] + cos * half[..., 1]), -1)
    return turned + boxes[:, None, :2]


def corners(boxes: Tensor) -> Tensor:
    """The eight corners (n, 8, 3) of boxes: the four below, then the four above them."""
    ground, z, high = corners_from_above(boxes), boxes[:, 2], boxes[:, 5] / 2
    ends = [torch.cat((ground, (z + side * high)[:, None, None].expand(-1, 4, 1)), -1) for side in (-1, 1)]
    return torch.cat(ends, 1)


def overlap_from_above(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union of boxes seen from above: (n, 7) and (m, 7) to (n, m), float64.

    The intersection is the polygon of corners inside the other box and of crossings of sides. Costs O(n m).
    """
    check_boxes(a)
    check_boxes(b)
    a, b = a.double(), b.double()
    overlaps = a.new_zeros(len(a), len(b))
    reach = (a[:, 3:5].norm(dim=1)[:, None] + b[:, 3:5].norm(dim=1)) / 2
    i, j = ((a[:, None, :2] - b[:, :2]).norm(dim=-1) < reach).nonzero().unbind(1)
    if not len(i):
        return overlaps
    both = _intersection(a[i], b[j])
    union = a[i, 3] * a[i, 4] + b[j, 3] * b[j, 4] - both
    overlaps[i, j] = both / union.clamp_min(1e-12)
    return overlaps


def _intersection(a: Tensor, b: Tensor) -> Tensor:
    """The area (P,) that pairs of boxes share from above."""
    p, q = corners_from_above(a), corners_from_above(b)
    r, s = p.roll(-1, 1) - p, q.roll(-1, 1) - q
    gap = q[:, None] - p[:, :, None]  # (P, 4 of a, 4 of b, 2)
    cross = _cross(r[:, :, None], s[:, None])
    parallel = cross.abs() < 1e-12
    safe = cross.masked_fill(parallel, 1.0)
    t, u = _cross(gap, s[:, None]) / safe, _cross(gap, r[:, :, None]) / safe
    crossing = ~parallel & (t >= 0) & (t <= 1) & (u >= 0) & (u <= 1)
    meets = p[:, :, None] + t[..., None] * r[:, :, None]
    points = torch.cat((p, q, meets.flatten(1, 2)), 1)
    there = torch.cat((_inside(p, b), _inside(q, a), crossing.flatten(1)), 1)
    count = there.sum(1, keepdim=True).clamp_min(1)
    middle = (points * there[..., None]).sum(1) / count
    points = points - middle[:, None]
    stand_in = points.gather(1, there.int().argmax(1)[:, None, None].expand(-1, 1, 2))
    points = torch.where(there[..., None], points, stand_in)
    order = torch.atan2(points[..., 1], points[..., 0]).argsort(1)
    points = points.gather(1, order[..., None].expand_as(points))
    area = _cross(points, points.roll(-1, 1)).sum(1).abs() / 2
    return area.masked_fill(~there.any(1), 0.0)


def _cross(a: Tensor, b: Tensor) -> Tensor:
    return a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0]


def _inside(points: Tensor, boxes: Tensor) -> Tensor:
    """Whether points (P, k, 2) lie in their box (P, 7) from above."""
    gap = points - boxes[:, None, :2]
    cos, sin = boxes[:, 6, None].cos(), boxes[:, 6, None].sin()
    along, across = cos * gap[..., 0] + sin * gap[..., 1], cos * gap[..., 1] - sin * gap[..., 0]
    length, width = (boxes[:, place, None] / 2 * (1 + _EDGE_TOLERANCE) for place in (3, 4))
    return (along.abs() <= length) & (across.abs() <= width)


def rotated_nms(boxes: Tensor, scores: Tensor, overlap: float) -> Tensor:
    """The places of the boxes to keep, the best first; boxes that overlap a better one by more are dropped."""
    order = scores.argsort(descending=True, stable=True)
    ordered = boxes[order]
    return order[_greedy(overlap_from_above(ordered, ordered) > overlap)]


def circle_nms(boxes: Tensor, scores: Tensor, radius: float) -> Tensor:
    """The places of the boxes to keep, the best first: a box within `radius` metres of a better one is dropped.

    Distances are between centres on the ground. Source: CenterPoint, Section 4, whose code compares their squares: its
    (4, 12, 10, 1, 0.85, 0.175) for nuScenes' groups are radii of (2, 3.46, 3.16, 1, 0.92, 0.42) metres here.
    """
    check_boxes(boxes)
    order = scores.argsort(descending=True, stable=True)
    centres = boxes[order, :2].double()
    return order[_greedy(torch.cdist(centres, centres) <= radius)]


def _greedy(near: Tensor) -> Tensor:
    """From the first on, keep each row that is near no kept one."""
    places: list[int] = []
    gone = torch.zeros(len(near), dtype=torch.bool, device=near.device)
    for place in range(len(near)):
        if not gone[place]:
            places.append(place)
            gone |= near[place]
    return torch.tensor(places, dtype=torch.int64, device=near.device)
