"""Operators of torchvision, without which it cannot be imported, in PyTorch: for where its compiled ones do not load.

It needs PyTorch alone and names nothing of polymix: `polymix doctor --fix` adds this very text to torchvision.
"""

import sys
from typing import Any

import torch
from torch import Tensor

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor",
)
_BLOCK = 256  # boxes that are compared at once
_MAX_CORNERS = 1 << 22  # positions that are read at once
_defined: list[torch.library.Library] = []  # kept alive: the schemas are removed together with this object


def define() -> None:
    """Define the operators; after that torchvision can be imported."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _SCHEMAS:
        library.define(schema)
    library.impl("nms", nms, "CPU")
    library.impl("roi_align", roi_align, "CompositeImplicitAutograd")
    _defined.append(library)


def enable() -> None:
    """Tell the two modules of torchvision, once they are imported, that their operators are there."""
    for name in ("boxes", "roi_align"):
        module: Any = sys.modules.get(f"torchvision.ops.{name}")
        if module is not None:
            module._has_ops, module._assert_has_ops = _are_there, _pass


def _are_there() -> bool:
    return True


def _pass() -> None:
    pass


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Non-maximum suppression: the boxes that overlap no kept box of a higher score by more than the threshold.

    Where a block of boxes suppresses its own members, the decision is iterated: after i rounds it is right for the
    first i boxes, and it is final once a round changes nothing.

    Args:
        boxes: (N, 4), as x1, y1, x2, y2.
        scores: (N).
        iou_threshold: intersection over union above which the box of the lower score is dropped.
    Returns:
        places of the kept boxes, by decreasing score. Cost: O(N²) comparisons in vectors.
    """
    if boxes.ndim != 2 or boxes.shape[1] != 4 or scores.shape != boxes.shape[:1]:
        shapes = f"{tuple(boxes.shape)} and {tuple(scores.shape)}"
        raise ValueError(f"nms: expected boxes of (N, 4) and scores of (N), got {shapes}")
    order = scores.argsort(stable=True, descending=True)
    x1, y1, x2, y2 = (boxes if boxes.dtype == torch.float64 else boxes.float())[order].unbind(1)
    area = (x2 - x1) * (y2 - y1)
    remaining = torch.ones_like(order, dtype=torch.bool)
    for start in range(0, len(order), _BLOCK):
        mine = slice(start, start + _BLOCK)
        rows, rest = torch.arange(start, min(start + _BLOCK, len(order))), slice(start, None)
        rows = rows[remaining[mine]]  # boxes that earlier blocks have left
        wide = torch.minimum(x2[rows, None], x2[rest]) - torch.maximum(x1[rows, None], x1[rest])
        high = torch.minimum(y2[rows, None], y2[rest]) - torch.maximum(y1[rows, None], y1[rest])
        both = wide.clamp_(min=0) * high.clamp_(min=0)
        over = (both / (area[rows, None] + area[rest] - both)).double() > iou_threshold
        among = over[:, rows - start].triu(1).float()  # by which earlier box of the block each is dropped
        alive = torch.ones(len(rows))
        while not torch.equal(now := (alive @ among == 0).float(), alive):
            alive = now
        dropped = over[alive.bool()].any(0)
        dropped[rows - start] = alive == 0
        remaining[rest] &= ~dropped
    return order[remaining]


def roi_align(
    input: Tensor, rois: Tensor, spatial_scale: float, pooled_height: int, pooled_width: int, sampling_ratio: int,
    aligned: bool,
) -> Tensor:  # fmt: skip
    """RoIAlign (Mask R-CNN, section 3) as a weighted sum of the map's columns: one `embedding_bag` over all boxes.

    Each of the pooled bins is the mean of points read bilinearly; a point beyond the edge reads the edge, as in
    torchvision's implementation in Python. Differentiable with respect to `input`.

    Args:
        input: feature maps (N, C, H, W).
        rois: (K, 5), the image's place in the batch, then x1, y1, x2, y2 in pixels.
        spatial_scale: cells of the map per pixel.
        pooled_height, pooled_width: bins.
        sampling_ratio: points along each side of a bin; at most 0: the sides of the bin, rounded up.
        aligned: shift boxes by half a cell, and allow sides shorter than a cell.
    Returns:
        (K, C, pooled_height, pooled_width). Cost: 4 C reads a point.
    """
    channels, height, width = input.shape[1:]
    kind = torch.promote_types(input.dtype, torch.float32)
    table = input.permute(0, 2, 3, 1).reshape(-1, channels).to(kind)
    place, boxes = rois[:, 0].long(), rois[:, 1:].to(kind) * spatial_scale - (0.5 if aligned else 0.0)
    sides = boxes[:, 2:] - boxes[:, :2]
    sides = sides if aligned else sides.clamp(min=1.0)
    axes = []
    for axis, (bins, size) in enumerate(((pooled_width, width), (pooled_height, height))):
        cell = sides[:, axis] / bins
        points = torch.full_like(cell, sampling_ratio) if sampling_ratio > 0 else cell.ceil()
        most = sampling_ratio if sampling_ratio > 0 or not len(rois) else int(points.amax().clamp(0, size).item())
        axes.append((boxes[:, axis], cell, points, max(0, most), bins, size))
    per_box = 4 * pooled_height * pooled_width * axes[0][3] * axes[1][3]
    step = max(1, _MAX_CORNERS // max(1, per_box))
    parts = [input.new_zeros(0, pooled_height * pooled_width, channels, dtype=kind)]
    for start in range(0, len(rois), step):
        part = slice(start, start + step)
        (columns, across), (rows, down) = (
            _corners(begin[part], cell[part], points[part], *sizes) for begin, cell, points, *sizes in axes
        )
        count = (axes[0][2][part] * axes[1][2][part]).clamp(min=1)
        places = place[part, None, None, None, None] * (height * width)
        places = places + rows[:, :, None, :, None] * width + columns[:, None, :, None, :]
        weights = down[:, :, None, :, None] * (across / count[:, None, None])[:, None, :, None, :]
        bags = places.flatten(0, 2).flatten(1)
        if not bags.shape[1]:
            parts.append(input.new_zeros(len(places), pooled_height * pooled_width, channels, dtype=kind))
            continue
        values = torch.nn.functional.embedding_bag(
            bags, table, mode="sum", per_sample_weights=weights.flatten(0, 2).flatten(1)
        )
        parts.append(values.view(len(places), -1, channels))
    pooled = torch.cat(parts).view(-1, pooled_height, pooled_width, channels).permute(0, 3, 1, 2)
    return pooled.contiguous().to(input.dtype)


def _corners(begin: Tensor, cell: Tensor, points: Tensor, most: int, bins: int, size: int) -> tuple[Tensor, Tensor]:
    """Along one axis: the cells that each bin's points read, and their weights; both (K, bins, 2 × most).

    A box with fewer points than the most has weights of 0.
    """
    inside = torch.arange(most, device=begin.device)
    valid = inside < points[:, None]  # (K, points)
    share = torch.where(points > 0, cell / points, 0.0)
    at = begin[:, None, None] + torch.arange(bins, device=begin.device)[:, None] * cell[:, None, None]
    at = (at + (inside + 0.5) * share[:, None, None]).clamp(0, size - 1)
    low = at.long()
    high = (low + 1).clamp(max=size - 1)
    part = at - low
    weights = torch.cat((1 - part, part), -1) * valid.repeat(1, 2)[:, None]
    return torch.cat((low, high), -1), weights
