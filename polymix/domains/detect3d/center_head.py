"""The head of CenterPoint: objects as peaks of a heat map, and at each peak a box."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, max_pool2d

from polymix.domains.detect3d.extent import Extent
from polymix.domains.detect3d.rotated import circle_nms, rotated_nms
from polymix.errors import OptionError, check_choice, check_int

MIN_OVERLAP, MIN_RADIUS = 0.1, 2  # of the peaks in the targets
PRIOR = -2.19  # logit of a share of 0.1
PARTS: Mapping[str, int] = {"offset": 2, "height": 1, "size": 3, "turn": 2, "velocity": 2}  # numbers of a box
_VELOCITY = 0.2  # weight of velocities among the numbers of a box
_MAX_LOG_SIDE = 10.0  # log of the longest side that is decoded


class CenterHead(nn.Module):
    """Heat maps of K classes and ten numbers of a box at each place.

    A shared convolution, then for each group of classes a branch of `convolutions` for its heat maps, and one for each
    of `PARTS`: offset from the cell's corner along x and y in cells, z in metres, log of length, width and height, sine
    and cosine of the turn, and velocity along x and y. Biases of the heat maps begin at `PRIOR`, the weights of the
    other branches normal with variance 2 / fan-in, as in OpenPCDet.

    Args:
        inputs: channels. groups: how many classes each group has, in the order of the classes. dim: of the branches.
        convolutions: of a branch, the last one included. velocity: False leaves out the last two numbers.
    Source: Yin et al. 2021 (CenterPoint), Section 4.
    """

    def __init__(
        self, inputs: int, groups: Sequence[int], dim: int = 64, convolutions: int = 2, velocity: bool = True
    ) -> None:
        super().__init__()
        for size in groups:
            check_int("groups", size, 1)
        if not groups:
            raise OptionError("groups", "()", "the classes of each group", "For example, (10,).")
        check_int("convolutions", convolutions, 1)
        check_choice("velocity", velocity, (True, False))
        self.groups = tuple(groups)
        parts = {name: size for name, size in PARTS.items() if velocity or name != "velocity"}
        self.shared = nn.Sequential(nn.Conv2d(inputs, dim, 3, 1, 1, bias=False), _norm(dim), nn.ReLU())
        self.heat = nn.ModuleList(_branch(dim, size, convolutions) for size in groups)
        self.boxes = nn.ModuleList(
            nn.ModuleDict({name: _branch(dim, size, convolutions) for name, size in parts.items()}) for _ in groups
        )
        for branch in self.heat:
            nn.init.constant_(branch[-1].bias, PRIOR)  # type: ignore[index]
        for module in self.boxes.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    @property
    def group_of(self) -> list[int]:
        """The group of each class."""
        return [place for place, size in enumerate(self.groups) for _ in range(size)]

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """A map (B, inputs, Y, X) to heat (B, K, Y, X), logits, and boxes (B, G, 10, Y, X)."""
        x = self.shared(x)
        groups: Any = self.boxes
        return {"heat": torch.cat([branch(x) for branch in self.heat], 1),
                "boxes": torch.stack([torch.cat([branch(x) for branch in parts.values()], 1) for parts in groups], 1),
                }  # fmt: skip


def _norm(dim: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(dim, eps=1e-3, momentum=0.01)


def _branch(dim: int, out: int, convolutions: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(convolutions - 1):
        layers += [nn.Conv2d(dim, dim, 3, 1, 1, bias=False), _norm(dim), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(dim, out, 3, 1, 1))


def peak_radius(length: float, width: float, overlap: float = MIN_OVERLAP, legacy: bool = False) -> float:
    """How far the two corners of a box may move, in its own unit, and still overlap it by an IoU of `overlap`.

    The least of three cases: both corners move the same way, both inwards, both outwards. Source: Law & Deng 2018
    (CornerNet), Section 3.2; each case solved exactly. CenterPoint's code takes the larger roots and divides them by 2
    in place of 2a: `legacy` does so too. It has larger radii for long boxes.
    """
    total, area = length + width, length * width
    along, inwards, outwards = (
        math.sqrt(total**2 - 4 * area * part) for part in ((1 - overlap) / (1 + overlap), 1 - overlap, 1 - 1 / overlap)
    )
    if legacy:
        return min((total + along) / 2, total + inwards, overlap * (outwards - total))
    return min((total - along) / 2, (total - inwards) / 4, (outwards - total) / 4)


def _places(boxes: Tensor, extent: Extent, stride: int) -> tuple[int, int, Tensor, Tensor, Tensor]:
    """The map's sides X and Y, a cell's, where in the map (m, 2) the centres of boxes lie, and which lie in it."""
    X, Y = (extent.shape[axis] // stride for axis in (0, 1))
    cell = torch.tensor([extent.voxel[0] * stride, extent.voxel[1] * stride], device=boxes.device)
    place = (boxes[:, :2] - boxes.new_tensor(extent.low[:2])) / cell
    return X, Y, cell, place, ((place >= 0) & (place < place.new_tensor([X, Y]))).all(1)


def center_targets(
    boxes: Tensor, labels: Tensor, classes: int, extent: Extent, stride: int, legacy_radius: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the head should say of one scan: heat (K, Y, X), cells (n,), numbers (n, 10) and classes (n,) of n boxes.

    A box has a Gaussian peak at the cell of its centre, of a radius by `peak_radius` and at least two cells, with a
    deviation of a sixth of its width. Boxes whose centre lies outside the map are left out. Numbers that are not known
    are NaN.

    Args:
        boxes: (m, 9), as `rotated.COLUMNS`. labels: int64 (m,). legacy_radius: `legacy` of `peak_radius`.
    """
    X, Y, cell, place, inside = _places(boxes, extent, stride)
    heat = boxes.new_zeros(classes, Y, X)
    boxes, labels, place = boxes[inside], labels[inside], place[inside]
    whole = place.floor().long()
    for (x, y), label, box in zip(whole.tolist(), labels.tolist(), boxes.tolist(), strict=True):
        r = max(MIN_RADIUS, int(peak_radius(box[3] / cell[0].item(), box[4] / cell[1].item(), legacy=legacy_radius)))
        xs, ys = (
            torch.arange(max(0, at - r), min(side, at + r + 1), device=boxes.device) for at, side in ((x, X), (y, Y))
        )
        sigma = (2 * r + 1) / 6
        peak = torch.exp(-((xs - x) ** 2 + (ys[:, None] - y) ** 2) / (2 * sigma**2)).to(heat.dtype)
        part = heat[label, ys[0] : ys[-1] + 1, xs[0] : xs[-1] + 1]
        torch.maximum(part, peak, out=part)
    yaw = boxes[:, 6]
    numbers = torch.cat((place - whole, boxes[:, 2:3], boxes[:, 3:6].log(), torch.stack((yaw.sin(), yaw.cos()), 1),
                         boxes[:, 7:9]), 1)  # fmt: skip
    return heat, whole[:, 1] * X + whole[:, 0], numbers, labels


def center_counts(
    scans: Sequence[tuple[Tensor, Tensor]], extent: Extent, stride: int, group_of: Sequence[int]
) -> Tensor:
    """What `center_losses` are divided by (2 G,): the cells that are centres in each group, and its boxes.

    Args:
        scans: boxes (m, 9) and labels (m,) of each. group_of: the group of each class.
    """
    numbered = []
    for boxes, labels in scans:
        _, _, _, place, inside = _places(boxes, extent, stride)
        numbered.append(torch.cat((labels[inside, None], place[inside].floor().long()), 1))
    groups, count = torch.tensor(group_of, device=numbered[0].device), max(group_of) + 1
    centres = torch.cat([cells.unique(dim=0)[:, 0] for cells in numbered])
    return torch.cat([groups[labels].bincount(minlength=count) for labels in (centres, torch.cat(numbered)[:, 0])])


def center_losses(
    output: Mapping[str, Tensor], targets: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]], group_of: Sequence[int],
    box_weight: float = 0.25,
) -> Tensor:  # fmt: skip
    """The summed focal loss of each group's heat maps (G,), and the L1 of its boxes (G,), together (2 G,).

    -Σ (1 - p)² log p at centres, -Σ (1 - y)⁴ p² log(1 - p) elsewhere. Divided by `center_counts`, a group counts the
    same however rare its classes are. Velocities weigh 0.2, and count where they are known (the authors learn 0
    elsewhere). Source: CenterPoint, Section 4; Law & Deng 2018, equation 1; OpenPCDet.

    Args:
        output: of `CenterHead`. targets: of `center_targets` for each scan. group_of: the group of each class.
    """
    heat = torch.stack([target[0] for target in targets])
    logits = output["heat"].float()
    p, centre = logits.sigmoid(), heat == 1
    at, off = (1 - p) ** 2 * logsigmoid(logits), (1 - heat) ** 4 * p**2 * logsigmoid(-logits)
    groups, count = torch.tensor(group_of, device=logits.device), max(group_of) + 1
    sums = logits.new_zeros(2 * count).index_add(0, groups, -torch.where(centre, at, off).sum((0, 2, 3)))
    for place, (_, cells, numbers, labels) in enumerate(targets):
        boxes = output["boxes"][place].float().flatten(2)  # (G, 10, Y X)
        mine, true = boxes[groups[labels], :, cells], numbers[:, : boxes.shape[1]]
        known = true.isfinite()
        gap = (mine - true.nan_to_num(0.0)).abs() * known
        weights = gap.new_tensor([1.0] * 8 + [_VELOCITY] * 2)[: gap.shape[1]]
        sums = sums.index_add(0, count + groups[labels], box_weight * (gap * weights).sum(1))
    return sums


def decode(
    output: Mapping[str, Tensor], group_of: Sequence[int], extent: Extent, stride: int, *, most: int = 500,
    least: float = 0.1, nms: str = "rotated", overlap: float = 0.2, radius: Sequence[float] = (1.0,),
) -> list[dict[str, Tensor]]:  # fmt: skip
    """The objects of each scan, the best first: boxes (n, 9), scores (n,) and labels (n,), on the CPU.

    Candidates are cells that are no lower than their eight neighbours in the heat map of their class. Then for each
    group, by `nms`: "rotated" drops boxes that overlap a better one by more than `overlap` from above, "circle" those
    within `radius` metres of a better one.

    Args:
        most: boxes of a scan. least: the lowest score. radius: one for all groups, or one for each.
    Raises:
        OptionError: another number of radii with nms="circle".
    """
    heat, numbers = output["heat"].float().sigmoid(), output["boxes"].float()
    peaks = heat.masked_fill(heat < max_pool2d(heat, 3, 1, 1), -1.0).cpu()
    numbers = numbers.flatten(3).cpu()
    X = heat.shape[3]
    count = max(group_of) + 1
    radii = list(radius) * (count if len(radius) == 1 else 1)
    if nms == "circle" and len(radii) != count:
        raise OptionError("radius", repr(tuple(radius)), f"one, or one for each of {count} groups", "")
    cell = torch.tensor([extent.voxel[0] * stride, extent.voxel[1] * stride])
    groups, rows = torch.tensor(group_of), []
    for place, mine in enumerate(peaks.flatten(2)):
        scores, flat = mine.flatten().topk(min(2 * most, mine.numel()))
        flat, scores = flat[scores >= least], scores[scores >= least]
        labels, cells = flat.div(mine.shape[1], rounding_mode="floor"), flat % mine.shape[1]
        values = numbers[place][groups[labels], :, cells]
        whole = torch.stack((cells % X, cells.div(X, rounding_mode="floor")), 1)
        centre = (whole + values[:, :2]) * cell + torch.tensor(extent.low[:2])
        yaw = torch.atan2(values[:, 6], values[:, 7])
        speed = values[:, 8:10] if values.shape[1] > 8 else torch.full((len(values), 2), math.nan)
        sides = values[:, 3:6].clamp(-_MAX_LOG_SIDE, _MAX_LOG_SIDE).exp()
        boxes = torch.cat((centre, values[:, 2:3], sides, yaw[:, None], speed), 1)
        parts = [torch.zeros(0, dtype=torch.int64)]
        for group in groups[labels].unique().tolist():
            own = (groups[labels] == group).nonzero()[:, 0]
            if nms == "rotated":
                own = own[rotated_nms(boxes[own], scores[own], overlap)]
            elif nms == "circle":
                own = own[circle_nms(boxes[own], scores[own], radii[group])]
            parts.append(own)
        chosen = torch.cat(parts)
        chosen = chosen[scores[chosen].argsort(descending=True, stable=True)][:most]
        rows.append({"boxes": boxes[chosen], "scores": scores[chosen], "labels": labels[chosen]})
    return rows
