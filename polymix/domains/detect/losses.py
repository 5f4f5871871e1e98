"""Targets and losses of the dense head: focal loss and GIoU of torchvision, and L1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import l1_loss

from polymix.train.data.vision import torchvision


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
    smallest = torch.where(mine, size, torch.inf).argmin(1)
    return torch.where(mine.any(1), smallest, -1)


def responsible(centres: Tensor, stride: int, targets: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
    """`assign` for each picture. Crowds are no targets."""
    return [assign(centres, target["boxes"][~target["iscrowd"]], stride) for target in targets]


def dense_losses(
    logits: Tensor, predicted: Tensor, centres: Tensor, stride: int, targets: Sequence[Mapping[str, Tensor]]
) -> Tensor:
    """The sum of the focal loss over all tokens, and of 2 (1 - GIoU) + L1 / stride over those with an object.

    Tokens inside a crowd are not taught that nothing is there.
    """
    ops = torchvision("ops")
    truth = torch.zeros_like(logits)
    counted = torch.ones_like(logits[..., :1])
    boxes, places = [], []
    for place, (target, which) in enumerate(zip(targets, responsible(centres, stride, targets), strict=True)):
        crowd = target["iscrowd"]
        own, labels = target["boxes"][~crowd], target["labels"][~crowd]
        for x1, y1, x2, y2 in target["boxes"][crowd]:
            x, y = centres.unbind(1)
            counted[place, (x > x1) & (x < x2) & (y > y1) & (y < y2)] = 0
        tokens = (which >= 0).nonzero()[:, 0]
        truth[place, tokens, labels[which[tokens]]] = 1
        counted[place, tokens] = 1
        boxes.append(own[which[tokens]])
        places.append(torch.stack((torch.full_like(tokens, place), tokens)))
    rows, tokens = torch.cat(places, 1)
    logits = logits.float().masked_fill(counted == 0, -30.0)
    loss: Tensor = ops.sigmoid_focal_loss(logits, truth, reduction="sum")
    # Without objects this is 0, but touches the weights: with several processes each of them needs a gradient.
    answers, true = predicted[rows, tokens], torch.cat(boxes)
    overlap = ops.generalized_box_iou_loss(answers, true, reduction="sum")
    return loss + 2 * overlap + l1_loss(answers, true, reduction="sum") / (4 * stride)
