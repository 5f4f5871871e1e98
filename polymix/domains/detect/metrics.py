"""What the detector finds, its average precision, and what PADRe's paper reports."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from polymix.domains.detect.detr import MAX_BOXES, find_objects
from polymix.domains.detect.recipe import DetectRecipe
from polymix.train.data.boxes.data import DetectionData
from polymix.train.data.boxes.detectors import Objects
from polymix.train.data.boxes.precision import average_precision
from polymix.train.data.vision import torchvision
from polymix.train.task import Process

MAX_OVERLAP = 0.6  # IoU above which the box of a lower score is dropped
CANDIDATES = 4 * MAX_BOXES  # the best boxes of a picture, before overlapping ones are dropped


def details(model: nn.Module, data: DetectionData, recipe: DetectRecipe, process: Process) -> dict[str, Any]:
    """All of COCO's figures, and AP by class."""
    predictions, targets = [], []
    for rows, truths in predict_all(model, data, recipe, process):
        predictions += rows
        targets += truths
    figures = average_precision(predictions, targets)
    by_class = figures.pop("classes")
    rows_by_class = [{"name": data.classes[place], "AP": value} for place, value in by_class.items() if place >= 0]
    return {"metrics": figures, "classes": rows_by_class}


def predict_all(
    model: nn.Module, data: DetectionData, recipe: DetectRecipe, process: Process
) -> Iterator[tuple[list[Objects], list[Objects]]]:
    """Predictions and targets of the test pictures in the pixels of the files, a batch at a time, on the CPU."""
    for start in range(0, len(data.test), recipe.batch_size):
        samples = [data.test[place] for place in range(start, min(start + recipe.batch_size, len(data.test)))]
        images, targets = data.collate(samples)
        rows = find(model, images.to(process.device), torch.stack([target["size"] for target in targets]), recipe)
        for row, target in zip(rows, targets, strict=True):
            row["boxes"] = row["boxes"] / target["scale"]
        yield (
            rows,
            [{**t, "boxes": t["boxes"] / t["scale"], "area": t["area"] / t["scale"][:2].prod()} for t in targets],
        )


def find(model: nn.Module, images: Tensor, sizes: Tensor, recipe: DetectRecipe) -> list[Objects]:
    """The best boxes of each of the fitted pictures (B, 3, S, S) of bytes, whose sizes without padding are (B, 2)."""
    if recipe.host != "dense":
        return find_objects(model, images, sizes)
    logits, boxes = model(images.float() / 127.5 - 1)
    return [choose(*pair) for pair in zip(logits.float().cpu(), boxes.float().cpu(), strict=True)]


def choose(logits: Tensor, boxes: Tensor) -> Objects:
    """The best boxes of one picture, without those that overlap a better one of the same class."""
    scores = logits.sigmoid().flatten()
    best = scores.topk(min(CANDIDATES, len(scores))).indices
    tokens, labels = best // logits.shape[1], best % logits.shape[1]
    apart = torchvision("ops").batched_nms(boxes[tokens], scores[best], labels, MAX_OVERLAP)[:MAX_BOXES]
    return {"boxes": boxes[tokens][apart], "scores": scores[best][apart], "labels": labels[apart]}
