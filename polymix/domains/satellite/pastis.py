"""Readers of satellite time series on disk: PASTIS as it is published, and the pickles of PASTIS24."""

from __future__ import annotations

import csv
import datetime
import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from polymix.errors import DataError, OptionError, one_line, reason_of
from polymix.files import is_file, read_json, regular
from polymix.train.data.arrays import KINDS, read_array
from polymix.train.data.problems import Problems
from polymix.train.data.texts import named_file, read_names

BANDS, VOID = 10, 19
LAST_DAY = 365  # of the year
LAYOUTS = ("pastis", "pastis24")
FOLDS = {
    fold: tuple((fold + k - 1) % 5 + 1 for k in range(5)) for fold in range(1, 6)
}  # train, train, train, val, test


@dataclass(frozen=True)
class Patch:
    """One patch on disk: its name, and what reads the series (T, bands, H, W), labels (H, W) and days (T)."""

    name: str
    fold: int
    days: Tensor
    shape: tuple[int, ...]  # of the series
    read: Callable[[], tuple[Any, Any]]
    target: str = ""  # the file of the labels; "": the same

    def arrays(self) -> tuple[Any, Any]:
        """Series and labels. Raises DataError if a file cannot be read."""
        return self.read()


def layout_of(folder: Path, layout: str | None) -> str:
    """The layout of a folder. Raises DataError if it has none of them."""
    if not folder.is_dir():
        raise DataError("data", f"{folder}, which is no folder", "a folder of PASTIS", "Check the path.")
    if layout is None:
        if (folder / "metadata.geojson").is_file():
            return "pastis"
        if next(folder.rglob("*.pickle"), None) is not None:
            return "pastis24"
        allowed = "metadata.geojson, or the pickles of PASTIS24"
        raise DataError("data", f"{folder}, which has neither", allowed, "docs/domains/satellite.md has the layouts.")
    return layout


def read_patches(
    folder: Path,
    layout: str | None,
    problems: Problems,
    *,
    allow_pickle: bool = False,
) -> list[Patch]:
    """The sound patches of a folder; what is wrong with the others is added to `problems`.

    Reads the metadata and the headers of the arrays; `check_values` reads the numbers.
    """
    if layout_of(folder, layout) == "pastis24":
        if not allow_pickle:
            cure = "Pass --set allow_pickle=True for files that you trust: a pickle can run code."
            raise OptionError("allow_pickle", f"False for the pickles in {folder}", "True", cure)
        return _pastis24(folder, problems)
    content = read_json(folder / "metadata.geojson", DataError, "data", "the metadata of PASTIS")
    features = content.get("features") if isinstance(content, dict) else None
    if not isinstance(features, list) or not features:
        raise DataError("data", f"{folder / 'metadata.geojson'} without patches", "features with ID_PATCH", "")
    patches, names = list[Patch](), set[str]()
    for place, feature in enumerate(features):
        about = feature.get("properties") if isinstance(feature, dict) else None
        about = about if isinstance(about, dict) else {}
        name = str(about.get("ID_PATCH", f"feature {place}"))
        patch = _patch(folder, name, about, name in names)
        names.add(name)
        if isinstance(patch, str):
            problems.add(folder / "metadata.geojson", f"patch {name}", patch)
        else:
            patches.append(patch)
    return patches


def _patch(folder: Path, name: str, about: Mapping[str, Any], again: bool) -> Patch | str:
    """A patch, or what is wrong with it."""
    if again:
        return "the id occurs twice"
    fold = about.get("Fold")
    if type(fold) is not int or not 1 <= fold <= 5:
        return f"Fold is {fold!r} instead of a number from 1 to 5"
    days = days_of(about.get("dates-S2"))
    if isinstance(days, str):
        return days
    series, labels = folder / "DATA_S2" / f"S2_{name}.npy", folder / "ANNOTATIONS" / f"TARGET_{name}.npy"
    try:
        shape, target = (tuple(read_array(path, mapped=True).shape) for path in (series, labels))
    except DataError as error:
        return str(error.got).replace(", which ", " ", 1)
    if len(shape) != 4 or shape[1] != BANDS:
        return f"{series} has shape {shape} instead of (dates, {BANDS} bands, height, width)"
    if shape[0] != len(days):
        return f"{series} has {shape[0]} images for {len(days)} dates"
    if target[-2:] != shape[-2:] or len(target) != 3:
        return f"{labels} has shape {target} for images of {shape[-2]} × {shape[-1]} pixels"

    def read() -> tuple[Any, Any]:
        return read_array(series, mapped=True), read_array(labels, mapped=True)[0]

    return Patch(str(series), fold, torch.tensor(days), shape, read, str(labels))


def days_of(dates: Any) -> list[int] | str:
    """Days of the year from 1 to 365, of dates such as {"0": 20180915}; what is wrong with them as text.

    31 December of a leap year is day 365 too, so that padded dates have 0 for themselves.
    """
    if isinstance(dates, (str, list)):
        return f'dates-S2 is {"text" if isinstance(dates, str) else "a list"} instead of {{"0": 20180915, …}}'
    if not isinstance(dates, dict) or not dates:
        return "dates-S2 is missing"
    try:
        ordered = [dates[key] for key in sorted(dates, key=int)]
    except ValueError:
        odd = next((key for key in dates if not str(key).isdecimal()), "of thousands of digits")
        return f"dates-S2 has the key {odd!r} instead of a number"
    wrong = [value for value in ordered if type(value) is not int]
    if wrong:
        return f"dates-S2 has {wrong[0]!r} instead of a number such as 20180915"
    try:
        days = [datetime.date(value // 10000, value // 100 % 100, value % 100) for value in ordered]
    except (ValueError, OverflowError):
        return "dates-S2 has a number that is no date such as 20180915"
    if days != sorted(days):
        late = next(place for place in range(1, len(days)) if days[place] < days[place - 1])
        return f"dates-S2 is not in order: {ordered[late]} follows {ordered[late - 1]}"
    return [min(day.timetuple().tm_yday, LAST_DAY) for day in days]


def check_values(patch: Patch, classes: int, problems: Problems) -> None:
    """Add what is wrong with a patch's numbers to `problems`, one sentence at most."""
    with problems.noting():
        _check_values(patch, classes, problems)


def _check_values(patch: Patch, classes: int, problems: Problems) -> None:
    series, labels = patch.arrays()
    if series.dtype.kind == "f" and not (finite := numpy.isfinite(series)).all():
        date, band, row, column = numpy.argwhere(~finite)[0].tolist()
        entry = f"date {date}, band {band}, row {row}, column {column}, from 0"
        problems.add(patch.name, entry, "the first pixel that is not finite")
    elif series.dtype.kind not in "iuf":
        problems.add(patch.name, "", f"it holds {series.dtype} instead of numbers")
    elif odd := sorted({*numpy.unique(labels).tolist()} - {*range(classes), VOID}):
        text = f"the labels have {odd[0]}: no class from 0 to {classes - 1}, and not {VOID}"
        problems.add(patch.target or patch.name, "", text)


def statistics(folder: Path, folds: tuple[int, ...], patches: list[Patch]) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each band over the training folds: of NORM_S2_patch.json, or else measured."""
    path = folder / "NORM_S2_patch.json"
    if is_file(path):
        content = read_json(path, DataError, "data", "the statistics of PASTIS")
        try:
            parts = [content[f"Fold_{fold}"] for fold in folds]
            mean, std = (torch.tensor([part[key] for part in parts]).float().mean(0) for key in ("mean", "std"))
            if mean.shape != (BANDS,) or std.shape != (BANDS,) or not (std > 0).all():
                raise ValueError(f"not {BANDS} means and positive deviations")
            return mean, std
        except (LookupError, TypeError, ValueError, OverflowError, RuntimeError) as error:
            got = f"{path}, which cannot be used ({type(error).__name__}: {error})"
            raise DataError("data", got, "Fold_1 to Fold_5 with mean and std", "Delete it to measure them.") from error
    count, total, squares = 0, numpy.zeros(BANDS), numpy.zeros(BANDS)
    for patch in patches:
        series = numpy.asarray(patch.arrays()[0], dtype=numpy.float64)
        count += series.size // BANDS
        total += series.sum((0, 2, 3))
        squares += (series**2).sum((0, 2, 3))
    middle = total / max(count, 1)
    deviation = numpy.sqrt(numpy.maximum(squares / max(count, 1) - middle**2, 1e-6))
    return torch.from_numpy(middle).float(), torch.from_numpy(deviation).float()


class _Arrays(pickle.Unpickler):
    """Unpickles arrays of numpy in plain containers, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "numpy" and name in ("_reconstruct", "ndarray", "dtype", "scalar", "_frombuffer"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not an array")


def _pastis24(folder: Path, problems: Problems) -> list[Patch]:
    """Windows of 24 pixels, {"img": (T, 10, 24, 24), "labels": (24, 24), "doy": (T,)}, by csv lists of their paths.

    The list's name says what it is for: train, val (or eval), test; they stand for folds 1 to 3, 4 and 5.
    """
    lists = sorted(folder.rglob("*.csv"))
    patches = []
    for name, fold in (("train", 1), ("val", 4), ("eval", 4), ("test", 5)):
        for file in (path for path in lists if name in path.stem):
            try:
                rows = [row[0].strip() for row in csv.reader(read_names(file).splitlines()) if row and row[0].strip()]
            except (DataError, csv.Error) as error:
                problems.add(file, "", f"it cannot be read ({reason_of(error)})")
                continue
            for row in rows:
                places = (named_file(root, row) for root in (folder, file.parent))
                path = next((place for place in places if is_file(place)), None)
                if path is None:
                    problems.add(file, row, "it does not exist")
                    continue
                content = _unpickled(path)
                if isinstance(content, str):
                    problems.add(path, "", content)
                    continue
                images, _, days = content
                patches.append(Patch(str(path), fold, days, images.shape, partial(_series_and_labels, path)))
    if not lists:
        problems.add(folder, "", "no csv lists of train, val and test")
    return patches


def _series_and_labels(path: Path) -> tuple[Any, Any]:
    content = _unpickled(path)
    if isinstance(content, str):
        raise DataError("data", f"{path}: {content}", "a pickle of PASTIS24", "Remove or write it again.")
    return content[0], content[1]


def _unpickled(path: Path) -> Any:
    """Series, labels and days of a pickle, or what is wrong with it."""
    try:
        with regular(path).open("rb") as file:
            content = _Arrays(file).load()
        images, labels, days = (numpy.asarray(content[key]) for key in ("img", "labels", "doy"))
        if any(array.dtype.kind not in KINDS for array in (images, labels, days)):
            raise TypeError("img, labels and doy are not all numbers")
    except Exception as error:  # whatever a damaged pickle raises
        return f"it cannot be read ({one_line(error)})"
    labels = labels[..., 0] if labels.ndim == 3 else labels
    if (
        images.ndim != 4
        or images.shape[1] != BANDS
        or labels.shape != images.shape[2:]
        or days.shape != images.shape[:1]
    ):
        return f"shapes {images.shape}, {labels.shape} and {days.shape} of img, labels and doy do not fit together"
    if not ((days >= 1) & (days <= LAST_DAY + 1)).all():
        return "doy has a number that is no day of the year from 1 to 366"
    return images, labels, torch.from_numpy(days.astype(numpy.int64)).clamp_max(LAST_DAY)


def write_patch(folder: Path, name: str, series: Tensor, labels: Tensor, parcels: Tensor) -> None:
    """The arrays of one patch as PASTIS has them; int16, and uint8 labels in the first of three channels."""
    target = torch.stack((labels, torch.zeros_like(labels), torch.zeros_like(labels))).to(torch.uint8)
    numpy.save(folder / "DATA_S2" / f"S2_{name}.npy", series.round().clamp(-32768, 32767).short().numpy())
    numpy.save(folder / "ANNOTATIONS" / f"TARGET_{name}.npy", target.numpy())
    numpy.save(folder / "ANNOTATIONS" / f"ParcelIDs_{name}.npy", parcels.int().numpy())


def write_metadata(folder: Path, patches: list[dict[str, Any]], norms: Mapping[str, Any]) -> None:
    """metadata.geojson and NORM_S2_patch.json. patches: the properties of each feature."""
    features = [{"type": "Feature", "id": str(row["ID_PATCH"]), "properties": row, "geometry": None} for row in patches]
    (folder / "NORM_S2_patch.json").write_text(json.dumps(norms))
    (folder / "metadata.geojson").write_text(json.dumps({"type": "FeatureCollection", "features": features}))
