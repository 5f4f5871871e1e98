"""The options of a training on satellite time series."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from polymix.errors import divisors
from polymix.train.option_effects import Beside
from polymix.train.recipe import (
    BatchSize,
    Count,
    Final,
    HostInit,
    LearningRate,
    Mixer,
    Natural,
    Recipe,
    Steps,
    Warmup,
    WeightDecay,
    wrong,
)


class SatelliteRecipe(Recipe):
    """TSViT, which names the crop of every pixel of a series of satellite images.

    The data are a folder of PASTIS, or with allow_pickle of PASTIS24; without one they are synthetic fields.
    """

    task: ClassVar[str] = "polymix.domains.satellite.task:SatelliteTask"
    reading: ClassVar[tuple[str, ...]] = ("fold", "allow_pickle")
    only_beside: ClassVar[tuple[Beside, ...]] = (*Recipe.only_beside, ("data", (), ("allow_pickle",)))
    takes_plan: ClassVar[bool] = True
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tiny": {"steps": 4, "batch_size": 4, "dim": 8, "heads": 2, "temporal_depth": 1, "spatial_depth": 1,
                 "synthetic_train": 12, "synthetic_test": 4, "evaluate_every": 4},
        # An epoch of fold 1 is 3,274 steps: 1,455 patches, each of 36 windows that cover its 128 × 128 pixels.
        "paper": {"mixer": "pom", "fold": 1, "window": 24, "patch": 2, "dates": 60, "dim": 128, "heads": 4,
                  "temporal_depth": 4, "spatial_depth": 4, "match_parameters": False, "host_init": "published",
                  "days": "random", "mask_padding": False, "legacy_series": True, "legacy_layout": True,
                  "batch_size": 16, "epochs": 100.0, "learning_rate": 1e-3, "weight_decay": 0.0, "decay": "all",
                  "warmup": 0.1, "final": 0.005, "cosine_from": "start", "betas": (0.9, 0.999), "clip": None,
                  "ema": 0.0, "keep": "best", "evaluate_every": 2000, "checkpoint_every": 2000},
    }  # fmt: skip

    batch_size: BatchSize = 8
    steps: Steps = 400
    learning_rate: LearningRate = 3e-3
    warmup: Warmup = 0.2
    final: Final = 0.0
    weight_decay: WeightDecay = 0.01
    # At 32 channels PoM needs more features than by default to read the dates as well as attention.
    mixer: Mixer = "pom:degree=3:expand=4"
    fold: int = Field(1, ge=1, le=5, description="which folds train, choose and test; fold 1 tests on fold 5")
    allow_pickle: bool = Field(False, description="read PASTIS24's pickles, which can run code: trusted files alone")
    window: Count = Field(24, description="side in pixels of the squares that the model sees; 128: whole patches")
    patch: Count = Field(3, description="side of a token in pixels, a divisor of the window")
    dates: Count = Field(60, description="the most dates of a series, evenly spaced where it has more")
    classes: int | None = Field(
        None, ge=2, le=255, description="crops and background; None: as the default data have, or 19 for PASTIS"
    )
    dim: Count = Field(32, description="channels of TSViT")
    heads: Count = Field(4, description="heads of mixers that leave them open")
    temporal_depth: Natural = Field(2, description="blocks over dates")
    spatial_depth: Natural = Field(2, description="blocks over places")
    match_parameters: bool = Field(False, description="size the MLPs so that every mixer has attention's parameters")
    host_init: HostInit = "own"
    days: Literal["sines", "random"] = Field(
        "sines", description="how the embedding of the day of the year starts; random, as published"
    )
    mask_padding: bool = Field(True, description="dates that pad a series take no part; False, as published: they do")
    legacy_series: bool = Field(
        False, description="series as the authors prepare them: by day of the year, cut, by the statistics of fold 1"
    )
    legacy_layout: bool = Field(
        False, description="the order of pixels in the authors' code before June 2026, as published"
    )
    synthetic_train: Count = Field(600, description="training patches of the default data")
    synthetic_test: Count = Field(80, description="its test patches, and as many to choose by")

    @model_validator(mode="after")
    def _patches_fill_windows(self) -> SatelliteRecipe:
        if self.window % self.patch:
            fits = max(side for side in divisors(self.window) if side <= self.patch)
            cure = f"For example, pass patch={fits}."
            raise wrong("patch", f"{self.patch} with window={self.window}", "a divisor of the window", cure)
        return self

    def block_names(self) -> Sequence[str]:
        """The names of the blocks, for plans."""
        temporal = [f"temporal.{place}" for place in range(self.temporal_depth)]
        return [*temporal, *(f"spatial.{place}" for place in range(self.spatial_depth))]
