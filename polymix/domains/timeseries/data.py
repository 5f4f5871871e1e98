"""Windows of series: the past that a model sees and the future that it forecasts, split in time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset

from polymix.domains.timeseries import synthetic
from polymix.domains.timeseries.recipe import TimeseriesRecipe
from polymix.errors import DataError, OptionError
from polymix.train.data.problems import Problems
from polymix.train.data.series.archives import read_tsf
from polymix.train.data.series.installed import INSTALLED, read_installed
from polymix.train.data.series.tables import is_m4, read_m4, read_table
from polymix.train.data.series.times import Array, Series, calendar
from polymix.train.data.splits import spread
from polymix.train.data.synthetic import cached
from polymix.train.task import Data

LAYOUTS = ("tables", "m4", "tsf")
TABLES = (".csv", ".tsv", ".txt", ".parquet", ".pq")
SMALLEST_SPREAD = 1e-6  # of a series; less is the rounding of a constant


class Window(NamedTuple):
    """A batch (B, …) of windows, or one: values (V, C + H), observed, a bool for each, and the calendar (C + H, 6).

    Values are standardised by their series' training part; what is not observed is 0. scale (V): the mean absolute
    error of the seasonal naive forecast on the training part, by which MASE divides; NaN where it is 0.
    """

    values: Tensor
    observed: Tensor
    calendar: Tensor
    scale: Tensor


@dataclass(frozen=True)
class Prepared:
    """A series as windows are cut from it: values and observed (V, T), and what they were before."""

    series: Series
    values: Tensor
    observed: Tensor
    calendar: Tensor
    centre: Array
    spread: Array
    scale: Tensor
    ends: tuple[int, int]
    season: int


class Windows(Dataset[Window]):
    """Windows by place: (series, first step of the future).

    targets: of the variables, which are forecast; the future of the others counts as not observed.
    """

    def __init__(
        self, series: Sequence[Prepared], places: Sequence[tuple[int, int]], context: int, horizon: int, targets: Tensor
    ) -> None:
        self.series, self.places, self.context, self.horizon = series, places, context, horizon
        self.targets = targets
        self.references: dict[str, float] | None = None  # the controls' errors, once they are computed

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Window:
        which, start = self.places[index]
        one = self.series[which]
        first, last = start - self.context, start + self.horizon
        here = slice(max(0, first), min(last, one.values.shape[1]))
        around = (max(0, -first), max(0, last - one.values.shape[1]))  # before the series, and after it
        values, observed = (torch.nn.functional.pad(part[:, here], around) for part in (one.values, one.observed))
        observed[~self.targets, self.context :] = False
        dates = one.calendar[here]
        if any(around):
            dates = torch.from_numpy(calendar(one.series, first, last))
        return Window(values, observed, dates, one.scale)

    def batch(self, places: Sequence[int]) -> Window:
        """Some windows as a batch."""
        return Window(*(torch.stack(part) for part in zip(*(self[place] for place in places), strict=True)))

    def season(self, index: int) -> int:
        """Steps of a season of a window's series."""
        return self.series[self.places[index][0]].season


@dataclass(frozen=True)
class SeriesData(Data):
    """The windows of the three parts. variables: their names in each window. series: how many there are."""

    train: Windows
    validation: Windows
    test: Windows
    variables: tuple[str, ...]
    name: str
    series: int

    def summary(self) -> dict[str, Any]:
        """What `predict` needs: the variables of a window."""
        return {"name": self.name, "variables": list(self.variables)}


def read(source: str, layout: str | None, problems: Problems) -> list[Series]:
    """The series of a file or folder. What cannot be used is noted. Raises DataError: there is nothing to read."""
    if source in INSTALLED and not Path(source).exists():
        return read_installed(source)
    path = Path(source)
    if path.is_dir() and layout in (None, "m4") and is_m4(path):
        return read_m4(path, problems)
    if layout == "m4":
        allowed = "a folder with Train/*-train.csv and Test/*-test.csv"
        raise DataError(
            "data", f"{source}, which is no folder of M4's layout", allowed, "Check the path or the layout."
        )
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    endings = (".tsf",) if layout == "tsf" else TABLES if layout == "tables" else (*TABLES, ".tsf")
    files = [file for file in files if file.suffix.lower() in endings]
    if not files or not path.exists():
        what = f"with no file {', '.join(endings)}" if path.is_dir() else "which is no such file"
        got = f"{source}, {what if path.exists() else 'which does not exist'}"
        raise DataError("data", got, f"files {', '.join(endings)}, or a folder of M4's layout", "Check the path.")
    series: list[Series] = []
    for file in files:
        with problems.noting():
            if file.suffix.lower() == ".tsf":
                series += read_tsf(file, problems)
            elif (one := read_table(file, problems)) is not None:
                series.append(one)
    return series


def list_problems(recipe: TimeseriesRecipe, source: str) -> list[str]:
    """Everything in the data that training would refuse."""
    problems = Problems()
    with problems.noting():
        series = read(source, recipe.layout, problems)
        if not problems:
            _cut(recipe, series, source)
    return problems.lines


def load(recipe: TimeseriesRecipe, folder: Path, say: Callable[[str], None], part: str = "held-out") -> SeriesData:
    """The windows of a recipe's data. part: of the test; "all": windows of the whole series."""
    source, problems = recipe.data, Problems()
    if source is None:
        shortest = 2 * recipe.context + 3 * recipe.horizon
        kind, count = recipe.synthetic, recipe.synthetic_series
        settings = {"seed": recipe.seed} | ({"count": count, "shortest": shortest} if kind == "period" else {})

        def write(place: Path) -> None:
            if kind == "period":
                synthetic.write_period(place, recipe.seed, count, shortest)
            else:
                synthetic.write_lead(place, recipe.seed)

        source = str(cached(folder, kind, settings, write))
        if kind == "lead" and not recipe.targets:
            recipe = recipe.changed(targets=tuple(f"follower_{place}" for place in range(synthetic.LEADERS)))
    series = read(source, recipe.layout, problems)
    problems.settle(say=say)
    return _cut(recipe, series, "synthetic" if recipe.data is None else source, part)


def _cut(recipe: TimeseriesRecipe, series: Sequence[Series], source: str, part: str = "held-out") -> SeriesData:
    variables, targets, prepared = _prepared(recipe, series, source)
    context, horizon = recipe.context, recipe.horizon
    train, validation, test = [], [], []
    for which, one in enumerate(prepared):
        length, (first, second) = one.values.shape[1], one.ends
        whole = min(context, (first - horizon + 1) // 2) if first > horizon else first  # of short series, half is past
        train += [(which, start) for start in range(max(1, whole), first - horizon + 1)]
        validation += [(which, start) for start in range(first, second - horizon + 1)]
        test += [(which, start) for start in range(1 if part == "all" else second, length - horizon + 1)]
    if not train:
        longest = max(len(one.values[0]) for one in prepared)
        got = f"{source}, whose series of at most {longest:,} steps are too short: more than {3 * horizon} are needed"
        allowed = f"three horizons and more: the horizon {horizon} for the training, to choose and for the test"
        raise DataError("data", got, allowed, "Pass a smaller horizon or longer series.")
    limit = recipe.windows
    few = [places if limit is None else [places[place] for place in spread(len(places), limit)]
           for places in (validation, test)]  # fmt: skip
    learnt, chosen, tested = (Windows(prepared, places, context, horizon, targets) for places in (train, *few))
    return SeriesData(learnt, chosen, tested, variables, source, len(series))


def _prepared(
    recipe: TimeseriesRecipe, series: Sequence[Series], source: str, future: bool = False
) -> tuple[tuple[str, ...], Tensor, list[Prepared]]:
    """The variables of a window, which of them are forecast, and all series, those of the host patch one a variable.

    future: as of `prepare`.
    """
    if not series:
        raise DataError("data", f"{source} without series", "at least one", "Add some.")
    known = {name for one in series for name in one.variables}
    missing = next((name for name in recipe.targets if name not in known), None)
    if missing is not None:
        raise OptionError("targets", repr(missing), f"among {', '.join(sorted(known)[:9])}", "Check the spelling.")
    if recipe.host == "patch":
        alone = [replace(one, values=one.values[:, [place]], variables=(name,))
                 for one in series for place, name in enumerate(one.variables)
                 if not recipe.targets or name in recipe.targets]  # fmt: skip
        return ("value",), torch.ones(1, dtype=torch.bool), [prepare(recipe, one, future) for one in alone]
    variables = series[0].variables
    other = next((one for one in series if one.variables != variables), None)
    if other is not None:
        got = f"{source}, whose series {series[0].name} and {other.name} have different variables"
        raise DataError("data", got, "the same variables in all, for the host inverted", "Pass host=patch.")
    targets = torch.tensor([not recipe.targets or name in recipe.targets for name in variables])
    return variables, targets, [prepare(recipe, one, future) for one in series]


def prepare(recipe: TimeseriesRecipe, series: Series, future: bool = False) -> Prepared:
    """A series, standardised by its training part, or with `future` by all of it, where nothing of it is tested."""
    length, horizon = len(series), recipe.horizon
    last = length - max(horizon, int(recipe.test_share * length))
    ends = series.ends or (last - max(horizon, int(recipe.validation_share * length)), last)
    past = series.values[: length if future else max(ends[0], 1)]
    seen = numpy.isfinite(past)
    count = numpy.maximum(seen.sum(0), 1)
    centre = numpy.where(seen, past, 0).sum(0) / count
    wide = (numpy.where(seen, past - centre, 0) ** 2).sum(0) / count
    width = numpy.sqrt(wide)
    width = numpy.where(width > SMALLEST_SPREAD * (1 + numpy.abs(centre)), width, 1.0)
    season = recipe.season or series.own_season()
    values = (series.values - centre) / width
    observed = numpy.isfinite(values)
    ago = min(season, max(1, len(past) - 1))
    errors = numpy.abs(values[ago : len(past)] - values[: len(past) - ago])
    known = numpy.isfinite(errors)
    scale = numpy.where(known, errors, 0).sum(0) / numpy.maximum(known.sum(0), 1)
    scale = numpy.where(scale > SMALLEST_SPREAD, scale, numpy.nan)
    tensors = (torch.from_numpy(numpy.ascontiguousarray(part.T)) for part in (numpy.nan_to_num(values), observed))
    dates = torch.from_numpy(calendar(series, 0, length))
    return Prepared(series, next(tensors).float(), next(tensors), dates, centre, width,
                    torch.from_numpy(scale).float(), ends, season)  # fmt: skip


def from_summary(recipe: TimeseriesRecipe, summary: Any) -> SeriesData:
    """Data without series, for a trained model: `predict` brings its own."""
    variables = tuple(summary["variables"])
    none = Windows([], [], recipe.context, recipe.horizon, torch.ones(len(variables), dtype=torch.bool))
    return SeriesData(none, none, none, variables, str(summary["name"]), 0)


def to_forecast(recipe: TimeseriesRecipe, series: Sequence[Series], variables: tuple[str, ...]) -> Windows:
    """For each series, or with the host patch for each of its variables, the window whose future begins at its end."""
    _, targets, whole = _prepared(recipe.changed(targets=()), series, "the file", future=True)
    check_variables(recipe, whole[0].series.variables, variables)
    places = [(which, one.values.shape[1]) for which, one in enumerate(whole)]
    return Windows(whole, places, recipe.context, recipe.horizon, targets)


def check_variables(recipe: TimeseriesRecipe, variables: tuple[str, ...], own: tuple[str, ...]) -> None:
    """Raise DataError where a model of the host inverted, which knows its own variables, is used on others."""
    if recipe.host == "inverted" and variables != own:
        got = f"the variables {', '.join(variables[:9])}"
        raise DataError("data", got, f"those of the training, {', '.join(own[:9])}", "Use such data.")
