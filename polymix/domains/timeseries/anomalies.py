"""Anomalies as a task: a model that forecasts, and steps that are far from what it forecasts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from polymix.domains.timeseries.data import form_of
from polymix.domains.timeseries.metrics import DRAWN, forecast
from polymix.domains.timeseries.task import TimeseriesTask
from polymix.files import output_names
from polymix.numbers import plural
from polymix.train.data.series import controls
from polymix.train.data.series.anomalies import apart, by_chance, quality, run_of, runs, scored
from polymix.train.data.series.drawing import draw_anomalies, middle
from polymix.train.data.series.files import read_file
from polymix.train.data.series.parts import SeriesData, to_score
from polymix.train.data.series.tables import with_labels
from polymix.train.data.series.windows import Windows
from polymix.train.data.splits import spread
from polymix.train.task import Metric, Process


class AnomalyTask(TimeseriesTask):
    """The forecaster of TimeseriesTask with a buffer `threshold`: the score above which a step is an anomaly.

    The score of a step is |y − forecast|, in standard deviations of the training part, averaged over the series'
    variables and over `smooth` steps around it. Windows follow each other, so that each step is forecast once.
    """

    metrics = (Metric("auc", "higher"), Metric("f1", "higher"), Metric("mae", "lower"))
    chosen_by = "mae"  # the validation part need not have anomalies

    def _build(self, variables: int) -> nn.Module:
        model = super()._build(variables)
        model.register_buffer("threshold", torch.zeros(()))
        return model

    def prepare(self, model: nn.Module, data: SeriesData, step: int) -> None:
        """Set the threshold: above it are `alarm` of the validation part's steps, whatever their labels are."""
        errors = self._errors(model, data.validation, Process(next(model.parameters()).device))
        scores = torch.cat([scores for scores, _ in scored(data.validation, errors, self.recipe.smooth)])
        threshold: Any = model.threshold
        if scores.isfinite().any():
            threshold.fill_(float(numpy.nanquantile(scores.numpy(), 1 - self.recipe.alarm)))

    def _errors(self, model: nn.Module, windows: Windows, process: Process) -> Tensor:
        """|y − forecast| (n, V, H) of windows, NaN where nothing was observed."""
        window = windows.batch(range(len(windows)))
        output = middle(forecast(model, window, windows.context, process, 4 * self.recipe.batch_size))
        return apart(window, output)

    def measure(self, model: nn.Module, data: SeriesData, process: Process) -> dict[str, float]:
        """`anomalies.quality` of the model, auc of the controls' forecasts and of |y|, and f1_adjusted_chance.

        mae: of the forecasts, in standard deviations. Controls: auc_naive, auc_seasonal, auc_smoothing, auc_linear, and
        auc_level, whose score is the distance from the mean. f1_adjusted_chance is of random scores.
        """
        windows = data.test
        errors = self._errors(model, windows, process)
        threshold: Any = model.threshold
        result = quality(scored(windows, errors, self.recipe.smooth), float(threshold))
        if result and windows.references is None:
            window = windows.batch(range(len(windows)))
            others = controls.forecasts(data.train, data.validation, windows, window) if len(data.train) else {}
            others["level"] = torch.zeros_like(errors)
            theirs = {name: scored(windows, apart(window, one), self.recipe.smooth) for name, one in others.items()}
            windows.references = {f"auc_{name}": quality(one)["auc"] for name, one in theirs.items()}
            chance = quality(by_chance(labels for _, labels in theirs["level"]))
            windows.references["f1_adjusted_chance"] = chance["f1_adjusted"]
        references = windows.references if result and windows.references else {}
        return {**result, "mae": float(errors.nanmean()), **references}

    def draw(self, model: nn.Module, data: SeriesData, folder: Path) -> list[Path]:
        """anomalies.png: series of the test, what was forecast, what is labelled and what was found."""
        names, panels = list(dict.fromkeys(which for which, _ in data.test.places)), []
        for which in (names[place] for place in spread(len(names), DRAWN)):
            places = [place for place in data.test.places if place[0] == which]
            windows = Windows(data.test.series, places, data.test.context, data.test.horizon, data.test.targets)
            panels.append(self._panel(model, windows, Process())[0])
        path = folder / "anomalies.png"
        draw_anomalies(path, panels)
        return [path]

    def _panel(self, model: nn.Module, windows: Windows, process: Process) -> tuple[Any, list[tuple[int, int]]]:
        """What a picture shows of a series' first variable, and the runs of steps that were found."""
        window, (which, first) = windows.batch(range(len(windows))), windows.places[0]
        one, threshold = windows.series[which], float(model.threshold)  # type: ignore[arg-type]
        output = middle(forecast(model, window, windows.context, process, 4 * self.recipe.batch_size))
        (scores, labels), *_ = scored(windows, apart(window, output), self.recipe.smooth)
        length = len(scores)
        truth = window.values[:, 0, windows.context :].where(window.observed[:, 0, windows.context :], torch.nan)
        seen, expected = (part.flatten()[:length].double() * float(one.spread[0]) + float(one.centre[0])
                          for part in (truth, output[:, 0]))  # fmt: skip
        found = runs(scores > threshold)
        return (one.series.name, seen, expected, found, runs(labels > 0), first), found

    def predict(
        self, model: nn.Module, data: SeriesData, files: Sequence[Path], folder: Path, process: Process
    ) -> list[dict[str, Any]]:
        """For each file the runs of steps that are not as forecast, and a picture.

        "anomalies" has for each series a list of "first" and "last", steps counted from 0, with "times" of both where
        they are known. The first steps of a file, at most a context, are only read. Its own standard deviation is the
        unit of the scores.
        """
        rows = []
        for file, name in zip(files, output_names(files), strict=True):
            panels, answers = [], {}
            for one in map(with_labels, read_file(file)):
                windows = to_score(form_of(self.recipe), one, data.variables)
                panel, found = self._panel(model, windows, process)
                panels.append(panel)
                title = one.name + (f" ({len(panels)})" if one.name in answers else "")
                answers[title] = [run_of(one, panel[-1] + first, panel[-1] + last - 1) for first, last in found]
            path = folder / f"{name}-anomalies.png"
            draw_anomalies(path, panels[:DRAWN])
            count = sum(map(len, answers.values()))
            answer = f"{plural(count, 'run')} of steps that are not as forecast"
            rows.append({"file": str(file), "picture": path.name, "answer": answer, "anomalies": answers})
        return rows

    def describe(self, data: SeriesData) -> str:
        return f"{super().describe(data)[:-1]}; what is far from its forecast is an anomaly."
