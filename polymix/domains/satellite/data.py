"""Satellite time series for training: windows of patches that are read from disk one at a time, and their collation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset

from polymix.domains.satellite.pastis import (
    FOLDS,
    VOID,
    Patch,
    check_values,
    layout_of,
    read_patches,
    statistics,
)
from polymix.domains.satellite.recipe import SatelliteRecipe
from polymix.domains.satellite.synthetic import LAND_COVERS, SIDE, synthetic
from polymix.errors import DataError
from polymix.train.data.class_names import own_names
from polymix.train.data.label_maps import windows
from polymix.train.data.problems import Problems
from polymix.train.data.synthetic import cached
from polymix.train.task import Data

CROPS = (
    "background", "meadow", "soft winter wheat", "corn", "winter barley", "winter rapeseed", "spring barley",
    "sunflower", "grapevine", "beet", "winter triticale", "winter durum wheat", "fruits, vegetables, flowers",
    "potatoes", "leguminous fodder", "soybeans", "orchard", "mixed cereal", "sorghum",
)  # fmt: skip


def legacy_days(days: Tensor) -> Tensor:
    """Days of the year as the authors' code reads them back from shares of a year in float32: 18 of 365 a day early."""
    return (days.float() / 365.0001 * 365.0001).long()


class Windows(Dataset[Any]):
    """Squares of `size` pixels that cover every pixel of some patches: (series, days, labels, place).

    Series of more than `dates` images are thinned evenly. With `legacy`, as the authors' code prepares them, images go
    by their day of the year, the first `dates` are taken, and days are `legacy_days`.
    """

    def __init__(
        self, patches: Sequence[Patch], size: int, dates: int, mean: Tensor, std: Tensor, legacy: bool = False
    ) -> None:
        self.patches, self.size, self.dates, self.mean, self.std = patches, size, dates, mean, std
        self.legacy = legacy
        self.places = [(i, y, x) for i, patch in enumerate(patches)
                       for y in windows(patch.shape[2], size) for x in windows(patch.shape[3], size)]  # fmt: skip

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor, tuple[int, int, int]]:
        which, top, left = self.places[index]
        patch = self.patches[which]
        series, labels = patch.arrays()
        chosen = torch.arange(patch.shape[0])
        if self.legacy:
            chosen = patch.days.argsort(stable=True)[: self.dates]
        elif len(chosen) > self.dates:
            chosen = torch.linspace(0, patch.shape[0] - 1, self.dates).round().long()
        days = legacy_days(patch.days[chosen]) if self.legacy else patch.days[chosen]
        square = (slice(top, top + self.size), slice(left, left + self.size))
        part = numpy.asarray(series[chosen.numpy(), :, square[0], square[1]], dtype=numpy.float32)
        values = torch.from_numpy(part)
        if not values.isfinite().all():
            raise DataError("data", f"{patch.name} with pixels that are not finite", "numbers", "Mend or remove it.")
        values = (values - self.mean[:, None, None]) / self.std[:, None, None]
        return values, days, torch.from_numpy(numpy.asarray(labels[square]).astype(numpy.int64)), (
            which, top, left)  # fmt: skip


@dataclass(frozen=True)
class SatelliteData(Data):
    """Windows to train on and to test on, the classes, and the bands' statistics."""

    name: str
    classes: tuple[str, ...]
    train: Any
    test: Any
    mean: Tensor
    std: Tensor
    valid: Any = ()  # windows to choose by
    pad_to: int | None = None  # dates of every series; None: as many as the longest of a batch has
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def padded(self) -> bool:
        """Whether batches have padded dates, because series have different lengths."""
        parts = [part for part in (self.train, self.test) if isinstance(part, Windows)]
        lengths = {min(patch.shape[0], part.dates) for part in parts for patch in part.patches}
        return len(lengths) > 1

    def collate(self, samples: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor, Tensor, list[tuple[int, int, int]]]:
        """Series (B, T, bands, w, w), days (B, T), which dates are real (B, T), labels (B, w, w), places."""
        longest = max(max(len(sample[1]) for sample in samples), self.pad_to or 0)
        series = samples[0][0].new_zeros(len(samples), longest, *samples[0][0].shape[1:])
        days = torch.zeros(len(samples), longest, dtype=torch.int64)
        present = torch.zeros(len(samples), longest, dtype=torch.bool)
        for row, (values, dates, _, _) in enumerate(samples):
            series[row, : len(dates)], days[row, : len(dates)], present[row, : len(dates)] = values, dates, True
        labels = torch.stack([sample[2] for sample in samples])
        return series, days, present, labels, [sample[3] for sample in samples]

    def summary(self) -> dict[str, Any]:
        """What results.json keeps: enough to build the model and to normalise new series."""
        return {"name": self.name, "classes": list(self.classes), "mean": self.mean.tolist(), "std": self.std.tolist(),
                **self.counts}  # fmt: skip


def load(recipe: SatelliteRecipe, folder: Path, say: Callable[[str], None]) -> SatelliteData:
    """The windows of a fold; without recipe.data, of synthetic fields, which are written to `folder` as PASTIS.

    Raises:
        DataError: the folder is none, a file is missing or does not fit, a fold is empty, or a window is larger than a
            patch: the first problem, by file and entry. OptionError: pickles without allow_pickle.
    """
    if recipe.data is None:
        settings = {"seed": recipe.seed, "train": recipe.synthetic_train, "test": recipe.synthetic_test,
                    "side": max(SIDE, recipe.window)}  # fmt: skip
        source = cached(folder, "satellite", settings, lambda place: synthetic(place, **settings))
        say(f"Synthetic fields, in the layout of PASTIS: {source}")
    else:
        source = Path(recipe.data)
    classes = _classes(recipe, source)
    problems = Problems()
    patches = read_patches(source, recipe.layout, problems, allow_pickle=recipe.allow_pickle)
    for patch in patches:
        check_values(patch, len(classes), problems)
    problems.settle()
    folds = FOLDS[recipe.fold]
    parts = [[patch for patch in patches if patch.fold in part] for part in (folds[:3], folds[3:4], folds[4:])]
    for part, numbers in ((parts[0], folds[:3]), (parts[2], folds[4:])):
        if not part:
            got = f"{source} without patches in fold {', '.join(map(str, numbers))}"
            raise DataError("data", got, "patches to train and to test on", "Choose another fold.")
    small = next((patch for patch in patches if min(patch.shape[2:]) < recipe.window), None)
    if small is not None:
        got = f"{recipe.window} for {small.name} of {small.shape[2]} × {small.shape[3]} pixels"
        raise DataError("window", got, "a window that fits into every patch", "Pass a smaller --set window=.")
    known = (1,) if recipe.legacy_series else folds[:3]
    mean, std = statistics(source, known, [patch for patch in patches if patch.fold in known])
    options = (recipe.window, recipe.dates, mean, std, recipe.legacy_series)
    train, valid, test = (Windows(part, *options) for part in parts)
    counts = {"train_patches": len(parts[0]), "test_patches": len(parts[2]), "train_windows": len(train)}
    name = "synthetic fields" if recipe.data is None else str(recipe.data)
    pad_to = None if recipe.mask_padding else recipe.dates
    return SatelliteData(name, classes, train, test, mean, std, valid, pad_to, counts)


def validation(recipe: SatelliteRecipe, data: SatelliteData) -> SatelliteData:
    """The data with the fold to choose by in place of the test's. Raises DataError if the fold has no patches."""
    if not len(data.valid):
        got = f"{data.name} without patches in fold {FOLDS[recipe.fold][3]}"
        raise DataError("data", got, "patches to choose by with keep='best'", "Pass --set keep=last.")
    return replace(data, test=data.valid)


def check(folder: str | Path, layout: str | None = None, allow_pickle: bool = False) -> list[str]:
    """All problems of a folder, in sentences that name file and entry; reads all labels, and pixels that are floats.

    Raises OptionError for pickles without allow_pickle.
    """
    problems, folder = Problems(), Path(folder)
    try:
        patches = read_patches(folder, layout, problems, allow_pickle=allow_pickle)
        pickles = layout_of(folder, layout) == "pastis24"
    except DataError as error:
        return [str(error.got)]
    for patch in patches:
        check_values(patch, VOID, problems)
    empty = (
        {1: "no patches for training", 5: "no patches for the test"}
        if pickles
        else {fold: f"fold {fold} has no patches" for fold in range(1, 6)}
    )
    for fold, text in empty.items():
        if all(patch.fold != fold for patch in patches):
            problems.add(folder if pickles else folder / "metadata.geojson", "", text)
    return problems.lines


def from_summary(recipe: SatelliteRecipe, summary: Mapping[str, Any]) -> SatelliteData | None:
    """The data of a trained model without its windows; None where results.json does not have it."""
    if "mean" not in summary:
        return None
    mean, std = (torch.tensor(summary[key]) for key in ("mean", "std"))
    pad_to = None if recipe.mask_padding else recipe.dates
    return SatelliteData(str(summary["name"]), tuple(summary["classes"]), (), (), mean, std, (), pad_to)


def _classes(recipe: SatelliteRecipe, source: Path) -> tuple[str, ...]:
    """The names of the data set's own file, else PASTIS's crops; as many as the recipe says."""
    own = own_names(source)
    names = LAND_COVERS if recipe.data is None else own.names if own else CROPS
    count = recipe.classes or len(names)
    return tuple(names[place] if place < len(names) else f"class {place}" for place in range(count))
