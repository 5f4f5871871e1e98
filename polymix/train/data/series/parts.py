"""Series as windows, split in time: to train on, to choose the weights by, and the test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polymix.errors import DataError, OptionError
from polymix.train.data.series.times import Series
from polymix.train.data.series.windows import Prepared, Windows, prepare
from polymix.train.data.splits import spread
from polymix.train.task import Data


class Form(NamedTuple):
    """How series are cut.

    Attributes:
        shares: of the validation part and of the test. season: its steps; None: the series' own. windows: measured at
            most. targets: variables that are forecast; empty: all. alone: each variable is a series of its own. once:
            windows to be measured follow each other, so that each step is forecast once, as anomalies need it.
    """

    context: int
    horizon: int
    shares: tuple[float, float]
    season: int | None
    windows: int | None
    targets: tuple[str, ...]
    alone: bool
    once: bool


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


def cut(form: Form, series: Sequence[Series], source: str, whole_series: bool = False) -> SeriesData:
    """The windows of series. whole_series: the test part has those of whole series.

    Raises:
        DataError: there are no series, they are too short or do not fit each other, or nothing marks an anomaly.
        OptionError: a target is no variable.
    """
    variables, targets, prepared = prepare_all(form, series, source)
    context, horizon = form.context, form.horizon
    stride, over = (horizon, 0) if form.once else (1, horizon - 1)
    train, validation, test = [], [], []
    for which, one in enumerate(prepared):
        length, (first, second) = one.values.shape[1], one.ends
        whole = min(context, (first - horizon + 1) // 2) if first > horizon else first  # of short series, half is past
        train += [(which, start) for start in range(max(1, whole), first - horizon + 1)]
        validation += [(which, start) for start in range(first, second - horizon + 1, stride)]
        test += [(which, start) for start in range(max(1, whole) if whole_series else second, length - over, stride)]
    if not train:
        longest = max(len(one.values[0]) for one in prepared)
        got = f"{source}, whose series of at most {longest:,} steps are too short: more than {3 * horizon} are needed"
        allowed = f"three horizons and more: the horizon {horizon} for the training, to choose and for the test"
        raise DataError("data", got, allowed, "Pass a smaller horizon or longer series.")
    if form.once and not validation and not whole_series:
        got = f"{source}, whose validation part, before the test, is shorter than a horizon of {horizon}"
        raise DataError("data", got, "a part that gives the threshold", "Pass a smaller horizon.")
    limit = form.windows
    if limit is not None and form.once:  # whole series, so that anomalies are whole
        marks = [id(one.series.labels) for one in prepared]  # variables of a series share them
        names = list(dict.fromkeys(marks))
        kept = {names[place] for place in spread(len(names), max(1, limit * len(names) // max(1, len(test))))}
        validation, test = ([place for place in places if marks[place[0]] in kept] for places in (validation, test))
        limit = None
    if form.once:
        labels: list[Any] = [(prepared[which].series.labels, start) for which, start in test]
        if len({bool(mark) for own, start in labels for mark in own[start : start + stride]}) < 2:
            got = f"{source}, in whose test, the end of each series, every step or none is an anomaly"
            raise DataError("data", got, "both kinds of steps", "Set test_share so that it has both.")
    few = [places if limit is None else [places[place] for place in spread(len(places), limit)]
           for places in (validation, test)]  # fmt: skip
    learnt, chosen, tested = (Windows(prepared, places, context, horizon, targets) for places in (train, *few))
    return SeriesData(learnt, chosen, tested, variables, source, len(series))


def prepare_all(
    form: Form, series: Sequence[Series], source: str, future: bool = False
) -> tuple[tuple[str, ...], Tensor, list[Prepared]]:
    """The variables of a window, which of them are forecast, and all series, or one a variable where each is alone.

    future: as of `prepare`.
    """
    if not series:
        raise DataError("data", f"{source} without series", "at least one", "Add some.")
    known = {name for one in series for name in one.variables}
    missing = next((name for name in form.targets if name not in known), None)
    if missing is not None:
        raise OptionError("targets", repr(missing), f"among {', '.join(sorted(known)[:9])}", "Check the spelling.")
    options: Any = (form.horizon, form.shares, form.season, future)
    if form.alone:
        alone = [replace(one, values=one.values[:, [place]], variables=(name,))
                 for one in series for place, name in enumerate(one.variables)
                 if not form.targets or name in form.targets]  # fmt: skip
        return ("value",), torch.ones(1, dtype=torch.bool), [prepare(one, *options) for one in alone]
    variables = series[0].variables
    other = next((one for one in series if one.variables != variables), None)
    if other is not None:
        got = f"{source}, whose series {series[0].name} and {other.name} have different variables"
        raise DataError("data", got, "the same variables in all, for the host inverted", "Pass host=patch.")
    targets = torch.tensor([not form.targets or name in form.targets for name in variables])
    return variables, targets, [prepare(one, *options) for one in series]


def without_series(form: Form, summary: Mapping[str, Any]) -> SeriesData:
    """Data without series, for a trained model: `predict` brings its own."""
    variables = tuple(summary["variables"])
    none = Windows([], [], form.context, form.horizon, torch.ones(len(variables), dtype=torch.bool))
    return SeriesData(none, none, none, variables, str(summary["name"]), 0)


def to_forecast(form: Form, series: Sequence[Series], variables: tuple[str, ...]) -> Windows:
    """For each series, or where each is alone for each of its variables, the window whose future begins at its end."""
    _, targets, whole = prepare_all(form._replace(targets=()), series, "the file", future=True)
    check_variables(form, whole[0].series.variables, variables)
    places = [(which, one.values.shape[1]) for which, one in enumerate(whole)]
    return Windows(whole, places, form.context, form.horizon, targets)


def to_score(form: Form, series: Series, variables: tuple[str, ...]) -> Windows:
    """Windows one after another, so that after a context, or half of a shorter series, each step is forecast once."""
    _, targets, whole = prepare_all(form._replace(targets=()), [series], "the file", future=True)
    check_variables(form, whole[0].series.variables, variables)
    first = max(1, min(form.context, len(series) // 2))
    places = [(which, start) for which in range(len(whole)) for start in range(first, len(series), form.horizon)]
    return Windows(whole, places, form.context, form.horizon, targets)


def check_variables(form: Form, variables: tuple[str, ...], own: tuple[str, ...]) -> None:
    """Raise DataError where a model that sees variables together, and knows its own, is used on others."""
    if not form.alone and variables != own:
        got = f"the variables {', '.join(variables[:9])}"
        raise DataError("data", got, f"those of the training, {', '.join(own[:9])}", "Use such data.")
