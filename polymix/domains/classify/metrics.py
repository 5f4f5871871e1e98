"""How good an image classifier is: accuracy, loss, which classes it confuses, and what it says of a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polymix.domains.classify.augment import transforms
from polymix.domains.classify.recipe import ClassifyRecipe
from polymix.errors import DataError, shortened
from polymix.files import output_names
from polymix.numbers import percent
from polymix.train.data.classified import MAX_LETTERS, draw_confusion, likeliest
from polymix.train.data.drawing import INK, WRONG, save_figure
from polymix.train.data.images import ImageData
from polymix.train.data.pictures import as_tensor, open_picture
from polymix.train.data.splits import spread
from polymix.train.task import Process

DRAWN_IMAGES = 12
LABELLED_SIDE = 320  # longest side of a picture with its answer, in pixels


def answers(model: nn.Module, data: ImageData, recipe: ClassifyRecipe, process: Process) -> tuple[Tensor, Tensor]:
    """Logits (n, classes) and labels (n) of the test images that can be read, on the CPU."""
    parts = [(model(data.normalise(images.to(process.device))).float().cpu(), labels)
             for images, labels in data.test.batches(4 * recipe.batch_size)]  # fmt: skip
    if not parts:
        raise DataError("--data", f"{data.name} without a test image that can be read", "one or more", "")
    logits, labels = (torch.cat(part) for part in zip(*parts, strict=True))
    return logits, labels


def draw(logits: Tensor, labels: Tensor, data: ImageData, folder: Path) -> list[Path]:
    """samples.png, and confusion.png: how many test images of each class (rows) were taken for each class (columns)."""
    answers = logits.argmax(1)
    return [draw_confusion(answers, labels, data.classes, folder), _draw_samples(data, answers, folder)]


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
        answer = likeliest(shares, data.classes)
        path = folder / f"{name}-labelled.png"  # never the name of the picture itself
        _label(picture, f"{answer['label']}  {percent(answer['probability'])}", path)
        rows.append({"file": str(file), "picture": path.name, **answer})
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
