"""Forecasts as a task: quantiles by the pinball loss on the normed future, measured by MASE against the controls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from polymix.domains.timeseries import data as reading
from polymix.domains.timeseries import metrics as measuring
from polymix.domains.timeseries.hosts import DLinear, InvertedForecaster, PatchForecaster
from polymix.domains.timeseries.recipe import DLINEAR, TimeseriesRecipe
from polymix.limits import check_memory
from polymix.numbers import plural
from polymix.train.counted import CountedTask
from polymix.train.data.series.files import LAYOUTS
from polymix.train.data.series.parts import SeriesData, check_variables, without_series
from polymix.train.data.series.scores import LEVELS, pinball
from polymix.train.data.series.times import COVARIATES
from polymix.train.data.series.windows import Window, level_and_width
from polymix.train.task import Metric, Process


class TimeseriesTask(CountedTask[TimeseriesRecipe, SeriesData]):
    """A model of past, observed (B, V, C) and calendar (B, C + H, 6) -> quantiles (B, V, H, Q)."""

    name = "timeseries"
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("mase", "lower"), Metric("crps", "lower"), Metric("mae", "lower"), Metric("mse", "lower"),
        Metric("coverage_error", "lower", "%"),
    )  # fmt: skip
    layouts = LAYOUTS
    unit = "windows"
    fresh = ("head",)
    predicts: ClassVar[bool] = True

    def check(self) -> None:
        recipe = self.recipe
        width = (2 if recipe.mixer == DLINEAR or recipe.host == "inverted" else 1 + COVARIATES) * recipe.context
        size = recipe.horizon * len(LEVELS) * max(recipe.dim, width if recipe.mixer == DLINEAR else 0)
        check_memory("context", "a window and the layers that read and write it", 16 * (width * recipe.dim + size))
        self._build(2)

    def problems(self, source: str) -> list[str]:
        return reading.list_problems(self.recipe, source)

    def load(self, folder: Path) -> SeriesData:
        return reading.load(self.recipe, folder, self.say)

    def build(self, data: SeriesData) -> nn.Module:
        return self._build(len(data.variables))

    def _build(self, variables: int) -> nn.Module:
        recipe = self.recipe
        if recipe.mixer == DLINEAR:
            return DLinear(recipe)
        mixers = recipe.mixers_for(recipe.block_names(), recipe.dim if recipe.match_parameters else None)
        if recipe.host == "inverted":
            return InvertedForecaster(recipe, list(mixers.values()), variables)
        return PatchForecaster(recipe, list(mixers.values()))

    def counts(self, model: nn.Module, batch: Any) -> Tensor:
        """Of future values that were observed."""
        return Window(*batch).observed[..., self.recipe.context :].sum()[None]

    def sums(self, model: nn.Module, batch: Any) -> Tensor:
        """The recipe's criterion over the future that was observed, in units of the past's standard deviation."""
        window, context = Window(*batch), self.recipe.context
        past, observed = window.values[..., :context], window.observed[..., :context]
        seen, truth = window.observed[..., context:, None], window.values[..., context:]
        output = model(past, observed, window.calendar)
        width = level_and_width(past, observed)[1][..., None]
        if self.recipe.criterion == "quantiles":
            errors = pinball(output, truth) / width
        else:
            errors = (output - truth[..., None]) / width
            errors = errors.abs() if self.recipe.criterion == "absolute" else errors**2
        return (errors * seen).mean(-1).sum()[None]

    def infer(self, model: nn.Module, batch: Any) -> Any:
        values, observed, calendar, _ = batch
        context = self.recipe.context
        return model(values[..., :context], observed[..., :context], calendar)

    def validation(self, data: SeriesData) -> SeriesData:
        return replace(data, test=data.validation)

    def measure(self, model: nn.Module, data: SeriesData, process: Process) -> dict[str, float]:
        """`metrics.scores`, and mase_naive, mase_seasonal, mase_smoothing and mase_linear of the controls."""
        return measuring.measure(model, data, data.test, self.recipe, process)

    def details(self, model: nn.Module, data: SeriesData, process: Process) -> dict[str, Any]:
        return {"metrics": self.measure(model, data, process), "count": len(data.test), "unit": "windows"}

    def draw(self, model: nn.Module, data: SeriesData, folder: Path) -> list[Path]:
        return measuring.draw(model, data, self.recipe, folder)

    def describe(self, data: SeriesData) -> str:
        recipe = self.recipe
        return (
            f"{recipe.mixer_name} forecasts {recipe.horizon} steps from {recipe.context} of {data.name}: "
            f"{plural(data.series, 'series', 'series')}, {len(data.train):,} windows for training, "
            f"{len(data.test):,} for the test, at the end of each series."
        )

    def host_name(self, model: nn.Module) -> str:
        recipe = self.recipe
        if recipe.mixer == DLINEAR:
            return "DLinear"
        what = f"patches of {recipe.patch} steps, head {recipe.head}" if recipe.host == "patch" else "variables"
        return f"transformer over {what}, {recipe.depth} blocks of {recipe.dim} channels"

    def usage(self, data: SeriesData, folder: Path) -> list[str]:
        shapes = "past, observed (B, V, C), calendar (B, C + H, 6) -> quantiles (B, V, H, 9)"
        load = f"model = SavedRun.of({str(folder)!r}).load()  # {shapes}"
        return ["from polymix.train.saved import SavedRun", "", load]

    def from_summary(self, summary: Mapping[str, Any]) -> SeriesData:
        return without_series(reading.form_of(self.recipe), summary)

    def for_evaluation(self, summary: Mapping[str, Any], whole: bool, limit: int | None) -> SeriesData | None:
        """The test part or, with `whole`, windows of whole series; of a run on synthetic data those of `load`."""
        if self.recipe.data is None:
            return None
        recipe = self.recipe if limit is None else self.recipe.changed(windows=limit)
        data = reading.load(recipe, Path(), self.say, whole)
        check_variables(reading.form_of(self.recipe), data.variables, tuple(summary["variables"]))
        return data

    def predict(
        self, model: nn.Module, data: SeriesData, files: Sequence[Path], folder: Path, process: Process
    ) -> list[dict[str, Any]]:
        return measuring.predict(model, data, self.recipe, files, folder, process)
