"""Forecasts of a model: measured beside the controls, drawn with their band, and of files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polymix.domains.timeseries.data import form_of
from polymix.domains.timeseries.recipe import TimeseriesRecipe
from polymix.errors import DataError
from polymix.files import output_names
from polymix.train.data.series import controls
from polymix.train.data.series.drawing import draw_forecasts, middle
from polymix.train.data.series.files import read_file
from polymix.train.data.series.parts import SeriesData, to_forecast
from polymix.train.data.series.scores import scores
from polymix.train.data.series.windows import Window, Windows
from polymix.train.data.splits import spread
from polymix.train.task import Process

DRAWN = 6  # panels of a picture


def forecast(model: nn.Module, window: Window, context: int, process: Process, size: int) -> Tensor:
    """Forecasts (B, V, H, Q) of a batch, `size` windows at once; a quantile is no lower than the one before."""
    parts = zip(*(part.split(size) for part in window[:3]), strict=True)
    outputs = [model(values[..., :context].to(process.device), observed[..., :context].to(process.device),
                     dates.to(process.device)).float().cpu() for values, observed, dates in parts]  # fmt: skip
    return torch.cat(outputs).sort(-1).values


def measure(
    model: nn.Module, data: SeriesData, windows: Windows, recipe: TimeseriesRecipe, process: Process
) -> dict[str, float]:
    """`scores` of the model, and the mase of each control."""
    if not len(windows):
        got = f"{data.name}, in which nothing is left to measure"
        raise DataError("data", got, f"series of more than 3 horizons of {recipe.horizon}", "Pass longer series.")
    window = windows.batch(range(len(windows)))
    result = scores(forecast(model, window, recipe.context, process, 4 * recipe.batch_size), window)
    if windows.references is None:
        references = controls.forecasts(data.train, data.validation, windows, window) if len(data.train) else {}
        windows.references = {
            f"mase_{name}": scores(one[..., None], window)["mase"] for name, one in references.items()
        }
    return {**result, **windows.references}


def draw(model: nn.Module, data: SeriesData, recipe: TimeseriesRecipe, folder: Path) -> list[Path]:
    """forecasts.png: the truth of some test windows, and the forecast with its band."""
    places = spread(len(data.test), DRAWN)
    window = data.test.batch(places)
    outputs = forecast(model, window, recipe.context, Process(), recipe.batch_size)
    panels = []
    for row, place in enumerate(places):
        variable = int(data.test.targets.nonzero()[row % int(data.test.targets.sum())])
        seen = window.values[row, variable].where(window.observed[row, variable], torch.tensor(float("nan")))
        one = data.test.series[data.test.places[place][0]].series
        panels.append((f"{one.name}, {one.variables[variable]}", seen, outputs[row, variable], None))
    path = folder / "forecasts.png"
    draw_forecasts(path, panels, recipe.context, recipe.horizon)
    return [path]


def predict(
    model: nn.Module, data: SeriesData, recipe: TimeseriesRecipe, files: Sequence[Path], folder: Path, process: Process
) -> list[dict[str, Any]]:
    """For each file the forecast of what follows its end: median and band, and a picture of the first series.

    "forecasts" has for each series and variable the lists "median", "low" and "high", and "times" where they are known.
    """
    rows = []
    for file, name in zip(files, output_names(files), strict=True):
        windows = to_forecast(form_of(recipe), read_file(file), data.variables)
        window = windows.batch(range(len(windows)))
        outputs = forecast(model, window, recipe.context, process, 4 * recipe.batch_size)
        panels, answers = [], {}
        for row, one in enumerate(windows.series):
            end = len(one.series)
            times = one.series.times(end - recipe.context, end + recipe.horizon)
            for place, variable in enumerate(one.series.variables):
                seen = window.values[row, place, : recipe.context]
                past, back = (part.double() * float(one.spread[place]) + float(one.centre[place])
                              for part in (seen, outputs[row, place]))  # fmt: skip
                past = past.where(window.observed[row, place, : recipe.context], torch.tensor(float("nan")).double())
                title = f"{one.series.name}, {variable}"
                title += f" ({row + 1})" if title in answers else ""  # as names of a .tsf file may come twice
                answers[title] = {
                    "median": middle(back).tolist(),
                    "low": back[:, 0].tolist(),
                    "high": back[:, -1].tolist(),
                }
                if times is not None:
                    answers[title]["times"] = [str(time) for time in times[recipe.context :]]
                panels.append((title, past, back, times))
        path = folder / f"{name}-forecast.png"
        draw_forecasts(path, panels[:DRAWN], recipe.context, recipe.horizon)
        first = next(iter(answers.values()))
        low, median, high = (first[key][0] for key in ("low", "median", "high"))
        answer = f"{recipe.horizon} steps ahead, the first {median:.4g} ({low:.4g} to {high:.4g})"
        rows.append({"file": str(file), "picture": path.name, "answer": answer, "forecasts": answers})
    return rows
