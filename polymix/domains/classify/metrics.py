"""How good an image classifier is: accuracy, loss, which classes it confuses, and what it says of a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from polymix.domains.classify.augment import transforms
from polymix.domains.classify.recipe import ClassifyRecipe
from polymix.errors import DataError, shortened
from polymix.files import output_names
from polymix.numbers import percent
from polymix.train.data.drawing import INK, WRONG, save_figure
from polymix.train.data.images import ImageData
from polymix.train.data.pictures import as_tensor, open_picture
from polymix.train.data.splits import spread
from polymix.train.task import Process

TOP = 5
DRAWN_IMAGES = 12
MAX_LETTERS = 24  # of a class in a picture
MAX_NAMED_CLASSES = 30  # beside the rows and columns of the picture of confusions
LABELLED_SIDE = 320  # longest side of a picture with its answer, in pixels


def answers(model: nn.Module, data: ImageData, recipe: ClassifyRecipe, process: Process) -> tuple[Tensor, Tensor]:
    """Logits (n, classes) and labels (n) of the test images that can be read, on the CPU."""
    parts = [(model(data.normalise(images.to(process.device))).float().cpu(), labels)
             for images, labels in data.test.batches(4 * recipe.batch_size)]  # fmt: skip
    if not parts:
        raise DataError("--data", f"{data.name} without a test image that can be read", "one or more", "")
    logits, labels = (torch.cat(part) for part in zip(*parts, strict=True))
    return logits, labels


def measure(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracy (top-1), top_5 from six classes on, and mean cross-entropy."""
    figures = {"accuracy": (logits.argmax(1) == labels).double().mean().item()}
    if logits.shape[1] > TOP:
        figures["top_5"] = _top_5(logits, labels)
    return figures | {"val_loss": cross_entropy(logits, labels).item()}


def _top_5(logits: Tensor, labels: Tensor) -> float:
    return (logits.topk(TOP, 1).indices == labels[:, None]).any(1).double().mean().item()


def scores(logits: Tensor, labels: Tensor, classes: Sequence[str]) -> dict[str, Any]:
    """How well logits (n, classes) fit labels (n).

    Returns "metrics": accuracy and its 95 % interval (Wilson's), top_5 from six classes on, the mean cross-entropy, and
    `majority`, the accuracy of always naming the commonest class. And "classes": images and accuracy of each.
    """
    hits, count = logits.argmax(1) == labels, len(labels)
    low, high = wilson(int(hits.sum()), count)
    metrics = {"accuracy": hits.double().mean().item(), "accuracy_low": low, "accuracy_high": high}
    if logits.shape[1] > TOP:
        metrics["top_5"] = _top_5(logits, labels)
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


def draw(logits: Tensor, labels: Tensor, data: ImageData, folder: Path) -> list[Path]:
    """samples.png, and confusion.png: how many test images of each class (rows) were taken for each class (columns)."""
    from matplotlib.figure import Figure

    classes = data.classes
    pairs = torch.bincount(labels * len(classes) + logits.argmax(1), minlength=len(classes) ** 2)
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
    return [path, _draw_samples(data, logits.argmax(1), folder)]


def _draw_samples(data: ImageData, predictions: Tensor, folder: Path) -> Path:
    """samples.png: twelve test images, evenly spaced, with their class and the model's answer where that is wrong."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 4.6), layout="constrained")
    grid = figure.subplots(3, DRAWN_IMAGES // 3)
    for axes in grid.flat:
        axes.set_axis_off()
    chosen, place = spread(len(predictions), DRAWN_IMAGES), 0
    names = [shortened(name, MAX_LETTERS) for name in data.classes]
    cells = iter(grid.flat)
    for images, labels in data.test.batches(256):
        for image, label in zip(images, labels, strict=True):
            if place in chosen:
                _draw_sample(next(cells), image, names[label], names[predictions[place]])
            place += 1
    path = folder / "samples.png"
    save_figure(path, figure)
    return path


def _draw_sample(axes: Any, image: Tensor, true: str, answer: str) -> None:
    values = image.float() - image.min()
    axes.imshow((values / values.max().clamp_min(1e-9)).permute(1, 2, 0).tolist(), cmap="grey")
    axes.set_title(true if true == answer else f"{true}, not {answer}", fontsize=9,
                   color=INK if true == answer else WRONG)  # fmt: skip


def prepare(picture: Any, recipe: ClassifyRecipe, data: ImageData) -> Tensor:
    """An RGB picture of Pillow as the model's input (1, C, S, S), prepared as in the training."""
    pixels = transforms(recipe)[1](picture)
    if data.channels == 1:
        pixels = pixels.float().mean(0, keepdim=True)
    return data.normalise(pixels[None])


def predict(
    model: nn.Module, data: ImageData, recipe: ClassifyRecipe, files: Sequence[Path], folder: Path, process: Process
) -> list[dict[str, Any]]:
    """The class of each picture file and its probability, the likeliest five, and the picture with the answer on it.

    Raises DataError before anything is computed: a file is no picture, or the model was trained on digits in memory.
    """
    if not data.is_bytes:
        got = f"a model trained on {data.name}, which are no files"
        raise DataError("folder", got, "a model trained on picture files", "Train one with --data FOLDER.")
    pictures = [open_picture(file) for file in files]
    rows = []
    for file, name, picture in zip(files, output_names(files), pictures, strict=True):
        shares = model(prepare(picture, recipe, data).to(process.device)).softmax(1)[0].cpu()
        best = shares.topk(min(TOP, len(shares)))
        top = [{"label": data.classes[place], "probability": share}
               for share, place in zip(best.values.tolist(), best.indices.tolist(), strict=True)]  # fmt: skip
        path = folder / f"{name}-labelled.png"  # never the name of the picture itself
        _label(picture, f"{top[0]['label']}  {percent(top[0]['probability'])}", path)
        rows.append({"file": str(file), "picture": path.name, **top[0], "top": top})
    return rows


def _label(picture: Any, text: str, path: Path) -> None:
    """A picture with a line of text below it, as a PNG file."""
    from matplotlib.figure import Figure

    picture = picture.copy()
    picture.thumbnail((LABELLED_SIDE, LABELLED_SIDE))
    width, height = (side / 100 for side in picture.size)
    figure = Figure(figsize=(max(width, 2.4), height + 0.35))
    axes = figure.add_axes((0, 0.35 / (height + 0.35), 1, height / (height + 0.35)))
    axes.set_axis_off()
    axes.imshow(as_tensor(picture).permute(1, 2, 0).numpy())
    figure.text(0.5, 0.12 / (height + 0.35), text, ha="center", fontsize=10)
    save_figure(path, figure, dpi=100)
