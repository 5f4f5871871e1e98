"""Label maps: how good a class for every pixel is, by one confusion matrix over a whole set."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polymix.errors import ShapeError


class Confusion:
    """Counts of (true, predicted) classes over all pixels that are not ignored.

    Args:
        classes: their number K. ignore: the label that does not count; None: all count.
    """

    def __init__(self, classes: int, ignore: int | None = None) -> None:
        self.classes, self.ignore = classes, ignore
        self.counts = torch.zeros(classes, classes, dtype=torch.int64)

    def update(self, predicted: Tensor, true: Tensor) -> None:
        """Add maps of classes of one shape. Raises ShapeError if a label is out of range or the shapes differ."""
        if predicted.shape != true.shape:
            raise ShapeError("predicted", tuple(predicted.shape), f"{tuple(true.shape)}, as the truth", "")
        predicted, true = predicted.detach().flatten().cpu().long(), true.detach().flatten().cpu().long()
        kept = torch.ones_like(true, dtype=torch.bool) if self.ignore is None else true != self.ignore
        predicted, true = predicted[kept], true[kept]
        for name, value in (("predicted", predicted), ("true", true)):
            if value.numel() and not 0 <= int(value.min()) <= int(value.max()) < self.classes:
                got = f"classes from {int(value.min())} to {int(value.max())}"
                raise ShapeError(name, got, f"classes from 0 to {self.classes - 1}", "")
        pairs = torch.bincount(true * self.classes + predicted, minlength=self.classes**2)
        self.counts += pairs.reshape(self.classes, self.classes)

    def compute(self) -> dict[str, float]:
        """ "miou", the mean of TP / (TP + FP + FN) over the classes that occur, and "accuracy", the share of pixels."""
        right, counts = self.counts.diag().double(), self.counts.double()
        union = counts.sum(0) + counts.sum(1) - right
        there = counts.sum(1) > 0
        miou = (right[there] / union[there]).mean().item() if there.any() else 0.0
        return {"miou": miou, "accuracy": (right.sum() / counts.sum().clamp_min(1)).item()}

    def per_class(self) -> list[float | None]:
        """TP / (TP + FP + FN) of each class; None for one that does not occur."""
        right, counts = self.counts.diag().double(), self.counts.double()
        union = counts.sum(0) + counts.sum(1) - right
        return [float(right[k] / union[k]) if counts[k].sum() > 0 else None for k in range(self.classes)]


def windows(size: int, window: int) -> list[int]:
    """First places of windows that cover 0 … size - 1; the last one overlaps where `window` does not divide `size`."""
    return [*range(0, max(size - window, 0), window), max(size - window, 0)]


def draw_maps(axes: Any, labels: Any, title: str, colours: Any, classes: int) -> None:
    """A map of classes in an axes of matplotlib; the classes' colours are the same in every picture."""
    axes.imshow(labels, cmap=colours, vmin=-0.5, vmax=classes - 0.5, interpolation="nearest")
    axes.set_title(title, fontsize=9)
    axes.set_axis_off()
