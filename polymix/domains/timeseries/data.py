"""The data of forecasts and anomalies: synthetic ones or files, as windows of the recipe's sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from polymix.domains.timeseries.recipe import TimeseriesRecipe
from polymix.errors import DataError
from polymix.train.data.problems import Problems
from polymix.train.data.series import synthetic
from polymix.train.data.series.files import read
from polymix.train.data.series.parts import Form, SeriesData, cut, prepare_all
from polymix.train.data.series.tables import LABELS, with_labels
from polymix.train.data.series.times import Series
from polymix.train.data.series.windows import Windows
from polymix.train.data.synthetic import cached


def form_of(recipe: TimeseriesRecipe) -> Form:
    """How the recipe cuts series."""
    return Form(recipe.context, recipe.horizon, (recipe.validation_share, recipe.test_share), recipe.season,
                recipe.windows, recipe.targets, recipe.host == "patch", recipe.goal == "anomalies")  # fmt: skip


def list_problems(recipe: TimeseriesRecipe, source: str) -> list[str]:
    """Everything in the data that training would refuse."""
    problems = Problems()
    with problems.noting():
        series = _read(recipe, source, problems)
        if not problems:
            cut(form_of(recipe), series, source)
    return problems.lines


def load(recipe: TimeseriesRecipe, folder: Path, say: Callable[[str], None], whole: bool = False) -> SeriesData:
    """The windows of a recipe's data. whole: the test has those of whole series."""
    source, problems = recipe.data, Problems()
    if source is None:
        shortest = 2 * recipe.context + 3 * recipe.horizon
        kind = "mirrored" if recipe.goal == "anomalies" else recipe.synthetic
        write, sizes = {
            "period": (synthetic.write_period, (recipe.synthetic_series, shortest)),
            "mirrored": (synthetic.write_mirrored, (recipe.synthetic_series, shortest)),
            "lead": (synthetic.write_lead, ()),
        }[kind]
        settings = {"seed": recipe.seed} | dict(zip(("count", "shortest"), sizes, strict=False))
        source = str(cached(folder, kind, settings, lambda place: write(place, recipe.seed, *sizes)))
        if kind == "lead" and not recipe.targets:
            recipe = recipe.changed(targets=tuple(f"follower_{place}" for place in range(synthetic.LEADERS)))
    series = _read(recipe, source, problems)
    problems.settle(say=say)
    return cut(form_of(recipe), series, "synthetic" if recipe.data is None else source, whole)


def _read(recipe: TimeseriesRecipe, source: str, problems: Problems) -> list[Series]:
    """The series of a source; for anomalies those of it that say which steps are ones. Raises DataError: none does."""
    series = read(source, recipe.layout, problems)
    if recipe.goal != "anomalies" or not series:
        return series
    series = [one for one in map(with_labels, series) if one.labels is not None]
    if not series:
        allowed = f"a column {', '.join(LABELS[:3])} … of 0 and 1, or the names of the UCR Anomaly Archive"
        raise DataError("data", f"{source}, which does not say which steps are anomalies", allowed, "Add the column.")
    return series


def from_summary(recipe: TimeseriesRecipe, summary: Any) -> SeriesData:
    """Data without series, for a trained model: `predict` brings its own."""
    variables = tuple(summary["variables"])
    none = Windows([], [], recipe.context, recipe.horizon, torch.ones(len(variables), dtype=torch.bool))
    return SeriesData(none, none, none, variables, str(summary["name"]), 0)


def to_forecast(recipe: TimeseriesRecipe, series: Sequence[Series], variables: tuple[str, ...]) -> Windows:
    """For each series, or with the host patch for each of its variables, the window whose future begins at its end."""
    _, targets, whole = prepare_all(form_of(recipe.changed(targets=())), series, "the file", future=True)
    check_variables(recipe, whole[0].series.variables, variables)
    places = [(which, one.values.shape[1]) for which, one in enumerate(whole)]
    return Windows(whole, places, recipe.context, recipe.horizon, targets)


def to_score(recipe: TimeseriesRecipe, series: Series, variables: tuple[str, ...]) -> Windows:
    """Windows one after another, so that after a context, or half of a shorter series, each step is forecast once."""
    _, targets, whole = prepare_all(form_of(recipe.changed(targets=())), [series], "the file", future=True)
    check_variables(recipe, whole[0].series.variables, variables)
    first = max(1, min(recipe.context, len(series) // 2))
    places = [(which, start) for which in range(len(whole)) for start in range(first, len(series), recipe.horizon)]
    return Windows(whole, places, recipe.context, recipe.horizon, targets)


def check_variables(recipe: TimeseriesRecipe, variables: tuple[str, ...], own: tuple[str, ...]) -> None:
    """Raise DataError where a model of the host inverted, which knows its own variables, is used on others."""
    if recipe.host == "inverted" and variables != own:
        got = f"the variables {', '.join(variables[:9])}"
        raise DataError("data", got, f"those of the training, {', '.join(own[:9])}", "Use such data.")
