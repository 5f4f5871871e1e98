"""How good an image classifier is: its accuracy, its loss, and which classes it confuses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from polymix._io import write_whole
from polymix.numbers import percent
from polymix.tasks.classify.data import ImageSets
from polymix.tasks.classify.recipe import ImageRecipe
from polymix.tasks.processes import Process


def measure(model: nn.Module, data: ImageSets, recipe: ImageRecipe, process: Process) -> dict[str, float]:
    """Accuracy and mean cross-entropy on the test images."""
    logits, labels = (torch.cat(parts) for parts in zip(*_answers(model, data, recipe, process), strict=True))
    hits = (logits.argmax(1) == labels).double().mean()
    return {"accuracy": hits.item(), "val_loss": cross_entropy(logits, labels).item()}


def details(model: nn.Module, data: ImageSets, recipe: ImageRecipe, process: Process) -> dict[str, Any]:
    """`scores` on the test images."""
    logits, labels = (torch.cat(parts) for parts in zip(*_answers(model, data, recipe, process), strict=True))
    return scores(logits, labels, data.images.classes)


def scores(logits: Tensor, labels: Tensor, classes: Sequence[str]) -> dict[str, Any]:
    """How well logits (n, classes) fit labels (n).

    Returns "metrics": accuracy and its 95 % interval (Wilson's), top_5 from six classes on, the mean cross-entropy, and
    `majority`, the accuracy of always naming the commonest class. And "classes": images and accuracy of each.
    """
    hits, count = logits.argmax(1) == labels, len(labels)
    low, high = wilson(int(hits.sum()), count)
    metrics = {"accuracy": hits.double().mean().item(), "accuracy_low": low, "accuracy_high": high}
    if logits.shape[1] > 5:
        top = logits.topk(5, 1).indices == labels[:, None]
        metrics["top_5"] = top.any(1).double().mean().item()
    metrics["loss"] = cross_entropy(logits.double(), labels).item()
    metrics["majority"] = labels.bincount().max().item() / count
    rows = [
        {"name": name, "images": int((labels == place).sum()),
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


def draw(model: nn.Module, data: ImageSets, recipe: ImageRecipe, folder: Path) -> list[Path]:
    """samples.png, and confusion.png: how many test images of each class (rows) were taken for each class (columns)."""
    from matplotlib.figure import Figure

    classes = data.images.classes
    counts = torch.zeros(len(classes), len(classes))
    answers = []
    for logits, labels in _answers(model, data, recipe, Process()):
        answers.append(logits.argmax(1))
        counts.index_put_((labels, logits.argmax(1)), torch.ones(len(labels)), accumulate=True)
    figure = Figure(figsize=(5, 4.4), layout="constrained")
    axes = figure.subplots()
    shares = (counts / counts.sum(1, keepdim=True).clamp_min(1)).tolist()
    figure.colorbar(axes.imshow(shares, cmap="Blues", vmin=0, vmax=1))
    axes.set(xlabel="predicted", ylabel="true", title="Share of each class")
    if len(classes) <= 30:
        axes.set_xticks(range(len(classes)), classes, rotation=90)
        axes.set_yticks(range(len(classes)), classes)
    path = folder / "confusion.png"
    write_whole(path, lambda part: figure.savefig(part, dpi=130, format="png"))
    return [path, _draw_samples(data, torch.cat(answers), folder)]


def _draw_samples(data: ImageSets, answers: Tensor, folder: Path) -> Path:
    """samples.png: twelve test images, evenly spaced, with their class and the model's answer where that is wrong."""
    from matplotlib.figure import Figure

    images, (pixels, labels) = data.images, data.images.test
    figure = Figure(figsize=(5, 4.6), layout="constrained")
    for i, axes in enumerate(figure.subplots(3, 4).flat):
        axes.set_axis_off()
        if i < len(labels):
            place = i * len(labels) // min(12, len(labels))
            shown = pixels[place].float() - pixels[place].min()
            axes.imshow((shown / shown.max().clamp_min(1e-9)).permute(1, 2, 0).tolist(), cmap="grey")
            true, answer = images.classes[labels[place]], images.classes[answers[place]]
            axes.set_title(true if true == answer else f"{true}, not {answer}", fontsize=9,
                           color="#1c1c1c" if true == answer else "#b03000")  # fmt: skip
    path = folder / "samples.png"
    write_whole(path, lambda part: figure.savefig(part, dpi=130, format="png"))
    return path


def describe(recipe: ImageRecipe, data: ImageSets) -> str:
    """What the model was trained on, for the report."""
    images = data.images
    names = ", ".join(images.classes[:12]) + " …" * (len(images.classes) > 12)
    largest, share = images.majority
    skipped = f" {len(images.skipped)} unreadable files were skipped." if images.skipped else ""
    return (
        f"{recipe.mixer} in a vision transformer, on {images.name}: {len(images.train[0]):,} training images and "
        f"{len(images.test[0]):,} test images of {len(images.classes)} classes ({names}), {images.image_size} × "
        f"{images.image_size} pixels. Always answering with the largest class, {largest}, would be right for "
        f"{percent(share)} of the test images.{skipped}"
    )


def _answers(
    model: nn.Module, data: ImageSets, recipe: ImageRecipe, process: Process
) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits and labels of the test images, a batch at a time, on the CPU."""
    images, labels = data.images.test
    for start in range(0, len(labels), 4 * recipe.batch_size):
        part = slice(start, start + 4 * recipe.batch_size)
        yield model(data.images.normalise(images[part].to(process.device))).float().cpu(), labels[part]
