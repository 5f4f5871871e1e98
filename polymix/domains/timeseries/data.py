"""Series as windows, split in time: to train on, to choose the weights by, and the test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polymix.domains.timeseries.recipe import TimeseriesRecipe
from polymix.errors import DataError, OptionError
from polymix.train.data.problems import Problems
from polymix.train.data.series import synthetic
from polymix.train.data.series.files import read
from polymix.train.data.series.times import Series
from polymix.train.data.series.windows import Prepared, Windows, prepare
from polymix.train.data.splits import spread
from polymix.train.data.synthetic import cached
from polymix.train.task import Data


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
    options: Any = (recipe.horizon, (recipe.validation_share, recipe.test_share), recipe.season, future)
    if recipe.host == "patch":
        alone = [replace(one, values=one.values[:, [place]], variables=(name,))
                 for one in series for place, name in enumerate(one.variables)
                 if not recipe.targets or name in recipe.targets]  # fmt: skip
        return ("value",), torch.ones(1, dtype=torch.bool), [prepare(one, *options) for one in alone]
    variables = series[0].variables
    other = next((one for one in series if one.variables != variables), None)
    if other is not None:
        got = f"{source}, whose series {series[0].name} and {other.name} have different variables"
        raise DataError("data", got, "the same variables in all, for the host inverted", "Pass host=patch.")
    targets = torch.tensor([not recipe.targets or name in recipe.targets for name in variables])
    return variables, targets, [prepare(one, *options) for one in series]


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
