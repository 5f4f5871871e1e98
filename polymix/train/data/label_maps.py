"""Label maps, a class for every pixel: the loss, one confusion matrix over a whole set, and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from polymix.errors import ShapeError
from polymix.train.data.arrays import write_array
from polymix.train.data.drawing import save_figure

PALETTE = (
    *(f"C{place}" for place in range(10)), "#1b9e77", "#d95f02", "#7570b3", "#e7298a", "#66a61e", "#e6ab02", "#a6761d",
    "#222266", "#99ccff",
)  # fmt: skip
VOID_COLOUR = "#eeeeee"
MAX_LEGEND = 24  # classes in a legend at most


def pixel_losses(logits: Tensor, labels: Tensor, ignore: int) -> Tensor:
    """The summed cross-entropy of the pixels whose label is not `ignore`; 0 where there are none.

    Args:
        logits: (B, K, H, W). labels: int64 (B, H, W).
    """
    return cross_entropy(logits.float(), labels, ignore_index=ignore, reduction="sum")


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
        counted = torch.ones_like(true, dtype=torch.bool) if self.ignore is None else true != self.ignore
        predicted, true = predicted[counted], true[counted]
        for name, value in (("predicted", predicted), ("true", true)):
            if value.numel() and not 0 <= int(value.min()) <= int(value.max()) < self.classes:
                got = f"classes from {int(value.min())} to {int(value.max())}"
                raise ShapeError(name, got, f"classes from 0 to {self.classes - 1}", "")
        pairs = torch.bincount(true * self.classes + predicted, minlength=self.classes**2)
        self.counts += pairs.reshape(self.classes, self.classes)

    def compute(self) -> dict[str, float]:
        """ "miou", the mean of `per_class` over the classes that are true or predicted somewhere, and "accuracy".

        So do the authors of TSViT and of SegFormer; Pointcept also counts a class that is neither, as 0.
        """
        shares = [share for share in self.per_class() if share is not None]
        right, total = int(self.counts.trace()), max(int(self.counts.sum()), 1)
        return {"miou": sum(shares) / max(len(shares), 1), "accuracy": right / total}

    def per_class(self) -> list[float | None]:
        """TP / (TP + FP + FN) of each class: 0 where it is predicted and never true, None where it is neither."""
        right = self.counts.diag()
        union = (self.counts.sum(0) + self.counts.sum(1) - right).tolist()
        return [hits / size if size else None for hits, size in zip(right.tolist(), union, strict=True)]

    def named(self, classes: Sequence[str]) -> dict[str, float]:
        """`compute`, and the IoU of each class that is true or predicted as "iou_NAME"."""
        shares = zip(classes, self.per_class(), strict=True)
        return {**self.compute(), **{f"iou_{name}": share for name, share in shares if share is not None}}


def shares_of(predicted: Tensor, classes: Sequence[str]) -> dict[str, float]:
    """The share of each class that occurs among predicted classes, rounded to four digits, in the order of classes."""
    counts = torch.bincount(predicted.flatten().long(), minlength=len(classes)).double() / predicted.numel()
    return {name: round(float(share), 4) for name, share in zip(classes, counts, strict=True) if share > 0}


def save_classes(path: Path, predicted: Tensor) -> None:
    """Write classes as an array of bytes (.npy), whole or not at all."""
    write_array(path, predicted.to(torch.uint8).numpy())


def windows(size: int, window: int, step: int | None = None) -> list[int]:
    """First places of windows that cover 0 … size - 1, `step` apart (default: `window`); the last one ends there."""
    return [*range(0, max(size - window, 0), window if step is None else step), max(size - window, 0)]


def colour_of(place: int) -> str:
    """The colour of a class: one of `PALETTE`, then others, evenly spread over the hues."""
    if place < len(PALETTE):
        return PALETTE[place]
    from matplotlib.colors import hsv_to_rgb, to_hex

    return to_hex(hsv_to_rgb((place * 0.618 % 1, 0.55 + 0.4 * (place % 2), 0.6 + 0.35 * (place % 3) / 2)))


def draw_label_maps(
    path: Path, rows: Sequence[Sequence[Any]], classes: Sequence[str], titles: Sequence[str], void: int
) -> None:
    """A picture with a row for each sample, image first and then maps of classes, and a legend, as a PNG file.

    void: the label that does not count, which is grey. The legend has the classes that occur, the first 24 of them.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch as Swatch

    grey = [VOID_COLOUR] * (void + 1 - len(classes))
    colours = ListedColormap([*(colour_of(place) for place in range(len(classes))), *grey])
    figure = Figure(figsize=(2.1 * len(titles) + 2, 2.1 * len(rows) + 0.3), layout="constrained")
    grid = figure.subplots(len(rows), len(titles), squeeze=False)
    for axes, row in zip(grid, rows, strict=True):
        axes[0].imshow(row[0])
        axes[0].set_title(titles[0], fontsize=9)
        axes[0].set_axis_off()
        for place, labels, title in zip(axes[1:], row[1:], titles[1:], strict=True):
            draw_maps(place, labels, title, colours, void + 1)
    named = list(range(len(classes)))
    if len(named) > MAX_LEGEND:
        there = {int(label) for row in rows for labels in row[1:] for label in torch.as_tensor(labels).unique()}
        named = [place for place in named if place in there][:MAX_LEGEND]
    figure.legend(handles=[Swatch(color=colour_of(k), label=classes[k]) for k in named],
                  loc="outside right center", frameon=False, fontsize=8)  # fmt: skip
    save_figure(path, figure)


def draw_maps(axes: Any, labels: Any, title: str, colours: Any, classes: int) -> None:
    """A map of classes in an axes of matplotlib; the classes' colours are the same in every picture."""
    axes.imshow(labels, cmap=colours, vmin=-0.5, vmax=classes - 0.5, interpolation="nearest")
    axes.set_title(title, fontsize=9)
    axes.set_axis_off()
