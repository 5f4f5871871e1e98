"""How good a classifier is, of whatever: accuracy, loss, and which classes it takes for which."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from polymix.errors import shortened
from polymix.train.data.drawing import save_figure

TOP = 5
MAX_LETTERS = 24  # of a class in a picture
MAX_NAMED_CLASSES = 30  # beside the rows and columns of the picture of confusions


def measure(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracy (top-1), top_5 from six classes on, and mean cross-entropy."""
    figures = {"accuracy": (logits.argmax(1) == labels).double().mean().item()}
    if logits.shape[1] > TOP:
        figures["top_5"] = _top_5(logits, labels)
    return figures | {"val_loss": cross_entropy(logits, labels).item()}


def _top_5(logits: Tensor, labels: Tensor) -> float:
    return (logits.topk(TOP, 1).indices == labels[:, None]).any(1).double().mean().item()


def scores(logits: Tensor, labels: Tensor, classes: Sequence[str], samples: str = "images") -> dict[str, Any]:
    """How well logits (n, classes) fit labels (n).

    Returns "metrics": accuracy and its 95 % interval (Wilson's), top_5 from six classes on, the mean cross-entropy, and
    `majority`, the accuracy of always naming the commonest class. And "classes": how many `samples` each has, and
    its accuracy.
    """
    hits, count = logits.argmax(1) == labels, len(labels)
    low, high = wilson(int(hits.sum()), count)
    metrics = {"accuracy": hits.double().mean().item(), "accuracy_low": low, "accuracy_high": high}
    if logits.shape[1] > TOP:
        metrics["top_5"] = _top_5(logits, labels)
    metrics["loss"] = cross_entropy(logits.double(), labels).item()
    metrics["majority"] = labels.bincount().max().item() / count
    rows = [
        {"name": name, samples: int((labels == place).sum()),
         "accuracy": hits[labels == place].double().mean().item() if (labels == place).any() else None}
        for place, name in enumerate(classes)
    ]  # fmt: skip
    return {"metrics": metrics, "classes": rows}


def wilson(hits: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a share, by default of 95 %."""
    share, weight = hits / count, z * z / count
    centre = (share + weight / 2) / (1 + weight)
    half = math.sqrt(weight * (share * (1 - share) + weight / 4)) / (1 + weight)
    return max(0.0, centre - half), min(1.0, centre + half)


def likeliest(shares: Tensor, classes: Sequence[str]) -> dict[str, Any]:
    """Of probabilities (classes): the "label" of the highest and its "probability", and in "top" those of five."""
    best = shares.topk(min(TOP, len(shares)))
    top = [{"label": classes[place], "probability": share}
           for share, place in zip(best.values.tolist(), best.indices.tolist(), strict=True)]  # fmt: skip
    return {**top[0], "top": top}


def draw_confusion(answers: Tensor, labels: Tensor, classes: Sequence[str], folder: Path) -> Path:
    """confusion.png: how many samples of each class (rows) were taken for each class (columns).

    answers, labels: (n), by number.
    """
    from matplotlib.figure import Figure

    pairs = torch.bincount(labels * len(classes) + answers, minlength=len(classes) ** 2)
    counts = pairs.reshape(len(classes), len(classes)).float()
    figure = Figure(figsize=(5, 4.4), layout="constrained")
    axes = figure.subplots()
    shares = (counts / counts.sum(1, keepdim=True).clamp_min(1)).tolist()
    figure.colorbar(axes.imshow(shares, cmap="Blues", vmin=0, vmax=1))
    axes.set(xlabel="predicted", ylabel="true", title="Share of each class")
    if len(classes) <= MAX_NAMED_CLASSES:
        names = [shortened(name, MAX_LETTERS) for name in classes]
        axes.set_xticks(range(len(classes)), names, rotation=90)
        axes.set_yticks(range(len(classes)), names)
    path = folder / "confusion.png"
    save_figure(path, figure)
    return path
