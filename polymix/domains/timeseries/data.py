"""The data of forecasts and anomalies: synthetic ones or files, as windows of the recipe's sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from polymix.domains.timeseries.recipe import TimeseriesRecipe
from polymix.errors import DataError
from polymix.train.data.problems import Problems
from polymix.train.data.series import synthetic
from polymix.train.data.series.files import read
from polymix.train.data.series.parts import Form, SeriesData, cut
from polymix.train.data.series.tables import LABELS, with_labels
from polymix.train.data.series.times import Series
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
        ways: dict[str, tuple[Callable[..., None], tuple[int, ...]]] = {
            "period": (synthetic.write_period, (recipe.synthetic_series, shortest)),
            "mirrored": (synthetic.write_mirrored, (recipe.synthetic_series, shortest)),
            "lead": (synthetic.write_lead, ()),
        }
        write, sizes = ways[kind]
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
