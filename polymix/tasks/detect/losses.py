"""Targets and losses of the dense head: focal loss, GIoU and L1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, l1_loss


def giou(a: Tensor, b: Tensor) -> Tensor:
    """Generalised intersection over union of pairs of boxes (K, 4), from -1 to 1 (Rezatofighi et al. 2019)."""
    size = (a[:, 2:] - a[:, :2]).prod(1) + (b[:, 2:] - b[:, :2]).prod(1)
    both = (torch.minimum(a[:, 2:], b[:, 2:]) - torch.maximum(a[:, :2], b[:, :2])).clamp(min=0).prod(1)
    hull = (torch.maximum(a[:, 2:], b[:, 2:]) - torch.minimum(a[:, :2], b[:, :2])).prod(1)
    union = size - both
    return both / union.clamp(min=1e-9) - (hull - union) / hull.clamp(min=1e-9)


def focal(logits: Tensor, targets: Tensor, alpha: float = 0.25, gamma: float = 2.0) -> Tensor:
    """Sigmoid focal loss, summed (Lin et al. 2017, equation 5)."""
    p = logits.sigmoid()
    hit = p * targets + (1 - p) * (1 - targets)
    weight = (alpha * targets + (1 - alpha) * (1 - targets)) * (1 - hit) ** gamma
    return (weight * binary_cross_entropy_with_logits(logits, targets, reduction="none")).sum()


def assign(centres: Tensor, boxes: Tensor, stride: int) -> Tensor:
    """For each token the object that it answers for, or -1: the smallest whose centre is within a stride.

    A token also has to lie in the object's box, but the token nearest to a centre always answers.

    Args:
        centres: (N, 2), of the tokens. boxes: (n, 4).
    """
    if not len(boxes):
        return torch.full((len(centres),), -1, device=centres.device)
    middle = (boxes[:, :2] + boxes[:, 2:]) / 2
    far = (centres[:, None] - middle).abs().amax(-1)
    inside = ((centres[:, None] > boxes[:, :2]) & (centres[:, None] < boxes[:, 2:])).all(-1)
    mine = (far < stride) & inside
    mine |= far == far.amin(0)
    size = (boxes[:, 2:] - boxes[:, :2]).prod(1).expand_as(far)
    found = torch.where(mine, size, torch.inf).argmin(1)
    return torch.where(mine.any(1), found, -1)


def dense_loss(
    logits: Tensor, found: Tensor, centres: Tensor, stride: int, targets: Sequence[Mapping[str, Tensor]]
) -> Tensor:
    """Focal loss over all tokens, and 2 (1 - GIoU) + L1 / stride over those with an object, per token with one.

    Crowds are no targets, and tokens inside one are not taught that nothing is there.
    """
    truth = torch.zeros_like(logits)
    counted = torch.ones_like(logits[..., :1])
    boxes, places = [], []
    for place, target in enumerate(targets):
        crowd = target["iscrowd"]
        own, labels = target["boxes"][~crowd], target["labels"][~crowd]
        for x1, y1, x2, y2 in target["boxes"][crowd]:
            x, y = centres.unbind(1)
            counted[place, (x > x1) & (x < x2) & (y > y1) & (y < y2)] = 0
        which = assign(centres, own, stride)
        tokens = (which >= 0).nonzero()[:, 0]
        truth[place, tokens, labels[which[tokens]]] = 1
        counted[place, tokens] = 1
        boxes.append(own[which[tokens]])
        places.append(torch.stack((torch.full_like(tokens, place), tokens)))
    rows, tokens = torch.cat(places, 1)
    count = max(1, len(rows))
    logits = logits.float().masked_fill(counted == 0, -30.0)
    loss = focal(logits, truth) / count
    if len(rows):
        given, true = found[rows, tokens], torch.cat(boxes)
        loss = loss + (2 * (1 - giou(given, true)).mean() + l1_loss(given, true) / stride)
    return loss
