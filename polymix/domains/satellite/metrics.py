"""How good a crop map is: mIoU and overall accuracy by one confusion matrix, and pictures of truth and prediction."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from polymix.domains.satellite.data import SatelliteData, Windows
from polymix.domains.satellite.pastis import VOID, Patch, read_patches
from polymix.domains.satellite.recipe import SatelliteRecipe
from polymix.errors import DataError
from polymix.files import output_names
from polymix.train.data.label_maps import Confusion, draw_label_maps, save_classes, shares_of
from polymix.train.data.problems import Problems
from polymix.train.data.splits import spread
from polymix.train.published import published as published_figures
from polymix.train.task import Process

PATCHES_DRAWN = 4
PATCHES = 2433  # of PASTIS
SIZES = ("patch", "dim", "heads", "temporal_depth", "spatial_depth")  # of the published TSViT


def published(recipe: SatelliteRecipe) -> dict[str, Any] | None:
    """What the PoM paper reports for this mixer in TSViT on PASTIS; None for other data and sizes."""
    its_host = all(getattr(recipe, name) == recipe.presets["paper"][name] for name in SIZES)
    if not its_host or not is_pastis(recipe.data):
        return None
    split = f"fold {recipe.fold}"
    return published_figures("satellite", data="PASTIS", split=split, host="TSViT", mixer=recipe.mixer_name)


def is_pastis(folder: str | None) -> bool:
    """Whether a folder is PASTIS itself, by the number of its patches, or PASTIS24, which is cut from it."""
    if folder is None:
        return False
    patches = sum(1 for _ in (Path(folder) / "DATA_S2").glob("S2_*.npy"))
    return patches == PATCHES if patches else next(Path(folder).rglob("*.pickle"), None) is not None


def confusion(model: nn.Module, data: SatelliteData, recipe: SatelliteRecipe, process: Process) -> Confusion:
    """Counts of (true, predicted) classes over the whole test patches."""
    counts = Confusion(len(data.classes), VOID)
    for patch, predicted in predict_patches(model, data, recipe, process):
        counts.update(predicted, torch.from_numpy(numpy.asarray(patch.arrays()[1]).astype(numpy.int64)))
    return counts


def predict_patches(
    model: nn.Module, data: SatelliteData, recipe: SatelliteRecipe, process: Process
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


def draw(model: nn.Module, data: SatelliteData, recipe: SatelliteRecipe, folder: Path) -> list[Path]:
    """predictions.png: for some test patches the clearest image, the true classes and the predicted ones."""
    few = spread(len(data.test.patches), PATCHES_DRAWN)
    drawn = replace(data, test=Windows([data.test.patches[i] for i in few], data.test.size, data.test.dates,
                                       data.mean, data.std, data.test.legacy))  # fmt: skip
    rows = []
    for patch, predicted in predict_patches(model, drawn, recipe, Process()):
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


def predict(
    model: nn.Module,
    data: SatelliteData,
    recipe: SatelliteRecipe,
    files: Sequence[Path],
    folder: Path,
    process: Process,
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
        problems = Problems()
        patches = read_patches(root, "pastis", problems)
        mine = [patch for patch in patches if Path(patch.name).resolve() == path.resolve()]
        if not mine:
            about = next(
                (text for text in problems.lines if path.stem.removeprefix("S2_") in text), "it is not in the metadata"
            )
            raise DataError("files", f"{path}: {about}", "a sound patch of the metadata", "")
        size = min(recipe.window, *mine[0].shape[2:])
        test = Windows(mine, size, recipe.dates, data.mean, data.std, recipe.legacy_series)
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
