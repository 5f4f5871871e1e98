"""How good an image classifier is: accuracy, loss, which classes it confuses, and what it says of a picture."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from polymix._io import write_whole
from polymix.errors import DataError
from polymix.mixers.spec import parse_mixer
from polymix.numbers import percent
from polymix.tasks.classify.data import ImageSets
from polymix.tasks.classify.pictures import UNREADABLE, as_tensor, read_picture
from polymix.tasks.classify.published import accuracy
from polymix.tasks.classify.recipe import ImageRecipe
from polymix.tasks.classify.stream import transforms
from polymix.tasks.processes import Process

DIRECTIONS = {"accuracy": "up", "top_5": "up", "val_loss": "down"}
TOP = 5
SHOWN = 320  # longest side of a picture with its answer, in pixels


def measure(model: nn.Module, data: ImageSets, recipe: ImageRecipe, process: Process) -> dict[str, float]:
    """Accuracy (top-1), top_5 from six classes on, and mean cross-entropy on the test images."""
    logits, labels = (torch.cat(parts) for parts in zip(*_answers(model, data, recipe, process), strict=True))
    figures = {"accuracy": (logits.argmax(1) == labels).double().mean().item()}
    if logits.shape[1] > TOP:
        figures["top_5"] = _top_5(logits, labels)
    return figures | {"val_loss": cross_entropy(logits, labels).item()}


def _top_5(logits: Tensor, labels: Tensor) -> float:
    return (logits.topk(TOP, 1).indices == labels[:, None]).any(1).double().mean().item()


def paper(recipe: ImageRecipe) -> dict[str, Any] | None:
    """The top-1 accuracy that a paper reports for this host and mixer; None where no paper has it.

    The paper's data are ImageNet, but for XCiT with host_depth=6, which is on CIFAR-100.
    """
    if recipe.host is None or recipe.data is None or recipe.match_parameters or recipe.plan:
        return None
    config = None if recipe.mixer == "keep" else parse_mixer(recipe.mixer)[1]
    name = "keep" if config is None else config.name
    degree = config.to_dict().get("degree") if config is not None else None
    classes = 100 if recipe.host_depth == 6 else 1000
    found = accuracy(recipe.host, name, degree, classes, recipe.host_depth)
    return None if found is None else {"accuracy": found[0], "source": found[1]}


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

    classes = data.images.classes
    count, shown = len(answers), list[tuple[Tensor, int, int]]()
    wanted, seen = {i * count // min(12, count) for i in range(min(12, count))}, 0
    for pixels, labels in data.images.test_batches(256):
        shown += [(pixels[place - seen], int(labels[place - seen]), int(answers[place]))
                  for place in sorted(wanted) if seen <= place < seen + len(labels)]  # fmt: skip
        seen += len(labels)
    figure = Figure(figsize=(5, 4.6), layout="constrained")
    for axes in figure.subplots(3, 4).flat:
        axes.set_axis_off()
        if shown:
            image, truth, guess = shown.pop(0)
            values = image.float() - image.min()
            axes.imshow((values / values.max().clamp_min(1e-9)).permute(1, 2, 0).tolist(), cmap="grey")
            true, answer = classes[truth], classes[guess]
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
    host, (training, test) = recipe.host or "a vision transformer", images.counts
    return (
        f"{recipe.mixer} in {host}, on {images.name}: {training:,} training images and "
        f"{test:,} test images of {len(images.classes)} classes ({names}), {images.image_size} × "
        f"{images.image_size} pixels. Always answering with the largest class, {largest}, would be right for "
        f"{percent(share)} of the test images.{skipped}"
    )


def _answers(
    model: nn.Module, data: ImageSets, recipe: ImageRecipe, process: Process
) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits and labels of the test images, a batch at a time, on the CPU."""
    images = data.images
    for pixels, labels in images.test_batches(4 * recipe.batch_size):
        yield model(images.normalise(pixels.to(process.device))).float().cpu(), labels


def prepare(picture: Any, recipe: ImageRecipe, data: ImageSets) -> Tensor:
    """An RGB picture of Pillow as the model's input (1, C, S, S), prepared as in the training."""
    pixels = transforms(recipe)[1](picture)
    if data.images.channels == 1:
        pixels = pixels.float().mean(0, keepdim=True)
    return data.images.normalise(pixels[None])


def predict(
    model: nn.Module, data: ImageSets, recipe: ImageRecipe, files: Sequence[Path], folder: Path, process: Process
) -> list[dict[str, Any]]:
    """The class of each picture file and its probability, the likeliest five, and the picture with the answer on it.

    Raises DataError before anything is computed: a file is no picture, or the model was trained on digits in memory.
    """
    if not data.images.is_bytes:
        got = f"a model trained on {data.images.name}, which are no files"
        raise DataError("folder", got, "a model trained on picture files", "Train one with --data FOLDER.")
    pictures = []
    for file in files:
        try:
            pictures.append(read_picture(file))
        except UNREADABLE as error:
            raise DataError("files", f"{file} ({error})", "a picture that Pillow can read", "") from error
    rows = []
    for number, (file, picture) in enumerate(zip(files, pictures, strict=True)):
        shares = model(prepare(picture, recipe, data).to(process.device)).softmax(1)[0].cpu()
        best = shares.topk(min(TOP, len(shares)))
        top = [{"label": data.images.classes[place], "probability": share}
               for share, place in zip(best.values.tolist(), best.indices.tolist(), strict=True)]  # fmt: skip
        name = f"{number:03}-{file.stem}.png"
        _label(picture, f"{top[0]['label']}  {percent(top[0]['probability'])}", folder / name)
        rows.append({"file": str(file), "picture": name, **top[0], "top": top})
    return rows


def _label(picture: Any, text: str, path: Path) -> None:
    """A picture with a line of text below it, as a PNG file."""
    from matplotlib.figure import Figure

    picture = picture.copy()
    picture.thumbnail((SHOWN, SHOWN))
    width, height = (side / 100 for side in picture.size)
    figure = Figure(figsize=(max(width, 2.4), height + 0.35))
    axes = figure.add_axes((0, 0.35 / (height + 0.35), 1, height / (height + 0.35)))
    axes.set_axis_off()
    axes.imshow(as_tensor(picture).permute(1, 2, 0).numpy())
    figure.text(0.5, 0.12 / (height + 0.35), text, ha="center", fontsize=10)
    write_whole(path, lambda part: figure.savefig(part, dpi=100, format="png"))
