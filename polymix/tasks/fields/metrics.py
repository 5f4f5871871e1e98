"""How good a crop map is: mIoU and overall accuracy by one confusion matrix, and pictures of truth and prediction."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from polymix._io import output_names
from polymix.errors import DataError
from polymix.mixers.spec import parse_mixer
from polymix.tasks.fields.data import FieldData, Windows
from polymix.tasks.fields.pastis import VOID, Patch, read_patches
from polymix.tasks.fields.recipe import FieldsRecipe
from polymix.tasks.label_maps import Confusion, draw_label_maps, save_classes, shares_of, some_of
from polymix.tasks.processes import Process

DIRECTIONS = {"miou": "up", "accuracy": "up"}
SHOWN = 4  # patches in the picture
# PoM, Section 4.3, Table 3: PASTIS, fold 1. Attention is the row that the authors of PoM trained themselves.
PAPER: Mapping[str, Mapping[str, Any]] = {
    "softmax": {"miou": 0.646, "accuracy": 0.828, "km2_per_second": 7.2, "source": "PoM, Table 3: PASTIS fold 1"},
    "pom": {"miou": 0.646, "accuracy": 0.827, "km2_per_second": 26.3, "source": "PoM, Table 3: PASTIS fold 1"},
}


def paper(recipe: FieldsRecipe) -> dict[str, Any] | None:
    """What the PoM paper reports for this mixer on PASTIS; None for other mixers, plans and folds."""
    row = PAPER.get(parse_mixer(recipe.mixer)[1].name) if recipe.plan is None and recipe.fold == 1 else None
    return None if row is None else dict(row)


def measure(model: nn.Module, data: FieldData, recipe: FieldsRecipe, process: Process) -> dict[str, float]:
    """mIoU over the classes that occur and the share of pixels that are right, on whole test patches."""
    return _confusion(model, data, recipe, process).compute()


def details(model: nn.Module, data: FieldData, recipe: FieldsRecipe, process: Process) -> dict[str, Any]:
    """The metrics, and the IoU of each class."""
    confusion = _confusion(model, data, recipe, process)
    return {"metrics": confusion.named(data.classes), "count": len(data.test.patches), "unit": "patches"}


def _confusion(model: nn.Module, data: FieldData, recipe: FieldsRecipe, process: Process) -> Confusion:
    confusion = Confusion(len(data.classes), VOID)
    for patch, predicted in predict_patches(model, data, recipe, process):
        confusion.update(predicted, torch.from_numpy(numpy.asarray(patch.arrays()[1]).astype(numpy.int64)))
    return confusion


def predict_patches(
    model: nn.Module, data: FieldData, recipe: FieldsRecipe, process: Process
) -> Iterator[tuple[Patch, Tensor]]:
    """Each test patch with its map of classes (H, W). Where windows overlap, their probabilities are added."""
    loader = DataLoader(data.test, recipe.part_size, collate_fn=data.collate)
    waiting: dict[int, list[Any]] = {}
    each: dict[int, int] = {}
    for which, _, _ in data.test.places:
        each[which] = each.get(which, 0) + 1
    for series, days, present, _, places in loader:
        inputs = (series.to(process.device), days.to(process.device), present.to(process.device))
        shares = model(*inputs).float().softmax(1).cpu()
        for share, (which, top, left) in zip(shares, places, strict=True):
            patch = data.test.patches[which]
            total = waiting.setdefault(which, [torch.zeros(len(data.classes), *patch.shape[2:]), 0])
            total[0][:, top : top + share.shape[1], left : left + share.shape[2]] += share
            total[1] += 1
            if total[1] == each[which]:
                yield patch, waiting.pop(which)[0].argmax(0)


def draw(model: nn.Module, data: FieldData, recipe: FieldsRecipe, folder: Path) -> list[Path]:
    """predictions.png: for some test patches the clearest image, the true classes and the predicted ones."""
    few = some_of(len(data.test.patches), SHOWN)
    shown = replace(data, test=Windows([data.test.patches[i] for i in few], data.test.size, data.test.dates,
                                       data.mean, data.std))  # fmt: skip
    rows = []
    for patch, predicted in predict_patches(model, shown, recipe, Process()):
        series, labels = patch.arrays()
        rows.append((clearest(series), numpy.asarray(labels), predicted.numpy()))
    path = folder / "predictions.png"
    draw_label_maps(path, rows, data.classes, ("image", "truth", "prediction"), VOID)
    return [path]


def clearest(series: Any) -> Any:
    """The image of the darkest date, which has the fewest clouds, as red, green and blue in [0, 1]."""
    dark = int(numpy.asarray(series[:, :3]).reshape(len(series), -1).mean(1).argmin())
    colours = numpy.asarray(series[dark, [2, 1, 0]], dtype=numpy.float32).transpose(1, 2, 0)
    low, high = numpy.percentile(colours, 2), numpy.percentile(colours, 98)
    return ((colours - low) / max(high - low, 1e-6)).clip(0, 1)


def describe(recipe: FieldsRecipe, data: FieldData) -> str:
    """What the model was trained on, for the report."""
    counts = data.counts
    return (
        f"{recipe.mixer_name} in TSViT, on {data.name}: {counts.get('train_windows', 0):,} windows of {recipe.window} "
        f"× {recipe.window} pixels of {counts.get('train_patches', 0):,} training patches, "
        f"{counts.get('test_patches', 0):,} test patches, {len(data.classes)} classes. Fold {recipe.fold}."
    )


def predict(
    model: nn.Module, data: FieldData, recipe: FieldsRecipe, files: Sequence[Path], folder: Path, process: Process
) -> list[dict[str, Any]]:
    """Maps of series DATA_S2/S2_….npy of PASTIS, whose dates are in metadata.geojson one folder above.

    Each result has the file, the share of each class, a picture, and the map as an array of classes.
    """
    rows = []
    for path, name in zip(files, output_names(files), strict=True):
        root = path.resolve().parent.parent
        if not (root / "metadata.geojson").is_file():
            got = f"{path}, without metadata.geojson in {root}"
            raise DataError("files", got, "DATA_S2/S2_….npy of a folder of PASTIS", "The dates are in the metadata.")
        problems: list[str] = []
        patches = read_patches(root, "pastis", problems.append)
        mine = [patch for patch in patches if Path(patch.name).resolve() == path.resolve()]
        if not mine:
            about = next(
                (text for text in problems if path.stem.removeprefix("S2_") in text), "it is not in the metadata"
            )
            raise DataError("files", f"{path}: {about}", "a sound patch of the metadata", "")
        size = min(recipe.window, *mine[0].shape[2:])
        test = Windows(mine, size, recipe.dates, data.mean, data.std)
        (patch, predicted), = predict_patches(model, replace(data, test=test), recipe, process)  # fmt: skip
        picture, array = folder / f"{name}.png", folder / f"{name}-classes.npy"
        row = (clearest(patch.arrays()[0]), predicted.numpy())
        draw_label_maps(picture, [row], data.classes, ("image", "prediction"), VOID)
        save_classes(array, predicted)
        shares = shares_of(predicted, data.classes)
        largest = max(shares, key=lambda name: shares[name])
        rows.append({"file": str(path), "largest": largest, "picture": picture.name, "map": array.name,
                     "shares": shares, "km2": round(math.prod(patch.shape[2:]) * 1e-4, 4)})  # fmt: skip
    return rows
