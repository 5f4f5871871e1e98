"""WIDER FACE's average precision."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from polymix.train.data.vision import torchvision

MIN_OVERLAP = 0.5  # IoU of a face that is found
THRESHOLDS = 1000


class Answer(NamedTuple):
    """The predictions (k, 4) and scores (k) of a picture, its faces (n, 4), and which of them count (n)."""

    boxes: Tensor
    scores: Tensor
    faces: Tensor
    counted: Tensor


def iou(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union of all pairs (k, n), of boxes whose corners are pixels that belong to them.

    As in WIDER FACE's evaluation, a box from x1 to x2 is x2 - x1 + 1 wide.
    """
    ends = torch.tensor([0.0, 0.0, 1.0, 1.0]).to(a)
    overlaps: Tensor = torchvision("ops").box_iou(a + ends, b + ends)
    return overlaps


def wider_ap(answers: Iterable[Answer]) -> float:
    """Average precision by the rule of WIDER FACE's evaluation; 0 where no face counts.

    Each prediction, the best first, belongs to the face with which its IoU is largest, if that is at least 0.5. If the
    face does not count in the subset, neither does the prediction. The first prediction of a face that counts is right;
    further ones, and those without a face, are wrong. Scores are scaled to [0, 1] over all pictures. Precision and
    recall at 1,000 thresholds, 0.999 to 0, give the area below the precision, which is first made to fall with the
    recall. Pictures without any face do not count.
    """
    pictures = list(answers)
    total = sum(int(picture.counted.sum()) for picture in pictures)
    every = torch.cat([torch.zeros(0), *(picture.scores for picture in pictures)]).double()
    if not total or not len(every):
        return 0.0
    low, high = every.min(), every.max()
    scores, judged, right = [], [], []
    for picture in pictures:
        if not len(picture.faces) or not len(picture.scores):
            continue
        order = picture.scores.argsort(descending=True, stable=True)
        best, face = iou(picture.boxes[order].double(), picture.faces.double()).max(1)
        near = best >= MIN_OVERLAP
        counts = picture.counted[face]
        first = torch.zeros_like(near)
        seen: set[int] = set()
        for place in (near & counts).nonzero()[:, 0].tolist():
            first[place] = int(face[place]) not in seen
            seen.add(int(face[place]))
        value = picture.scores[order].double()
        scores.append((value - low) / (high - low) if high > low else torch.ones_like(value))
        judged.append(~near | counts)
        right.append(first)
    if not scores:
        return 0.0
    order = torch.cat(scores).argsort(descending=True, stable=True)
    falling = -torch.cat(scores)[order]
    thresholds = 1 - torch.arange(1, THRESHOLDS + 1, dtype=torch.float64) / THRESHOLDS
    upto = torch.searchsorted(falling, -thresholds, right=True)
    counts_of = [torch.cat((torch.zeros(1), torch.cat(part)[order].cumsum(0)))[upto] for part in (judged, right)]
    precision = counts_of[1].double() / counts_of[0].clamp(min=1)
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    recall = torch.cat((ends[:1], counts_of[1].double() / total, ends[1:]))
    precision = torch.cat((ends[:1], precision, ends[:1])).flip(0).cummax(0).values.flip(0)
    return float((recall.diff() * precision[1:]).sum())
