"""The options of a training on satellite time series."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from polymix.errors import OptionError, check_choice, check_int
from polymix.models.tsvit import EMBEDDINGS
from polymix.tasks.recipe import TaskRecipe


@dataclass(frozen=True)
class FieldsRecipe(TaskRecipe):
    """TSViT, which names the crop of every pixel. `TaskRecipe` has the options that all tasks share.

    Args:
        data: a folder of PASTIS, or with allow_pickle of PASTIS24; None: made fields.
        mixer: of every block, as on the command line: "pom", "padre:degree=3". At 32 channels PoM needs more features
            than by default to read the dates as well as attention.
        fold: 1 to 5: which folds train (three), choose (one) and test (one). Fold 1 tests on fold 5.
        allow_pickle: read the pickles of PASTIS24, which can run code: only files that you trust.
        window: side in pixels of the squares that the model sees at once; 128: whole patches of PASTIS.
        patch: side of a token, in pixels. dates: the most dates of a series, evenly spaced where it has more.
        classes: crops and background; None: as many as the default data has, or 19 for PASTIS.
        dim, heads, temporal_depth, spatial_depth: sizes of TSViT. heads is for mixers that leave it open.
        match_parameters: narrow or widen the MLPs so that every mixer has the parameters of attention.
        days: how the embedding of the day starts: "sines", or "random", as published.
        mask_padding: dates that pad a series take no part. False: they do, as published.
        legacy_layout: the order of pixels in the authors' code before June 2026, for its checkpoints.
        made_train, made_test: patches of the default data.
    """

    batch_size: int = 8
    steps: int = 400
    learning_rate: float = 3e-3
    warmup: float = 0.2
    final: float = 0.0
    weight_decay: float = 0.01
    evaluate_every: int = 100
    mixer: str = "pom:degree=3:expand=4"
    fold: int = 1
    allow_pickle: bool = False
    window: int = 24
    patch: int = 3
    dates: int = 60
    classes: int | None = None
    dim: int = 32
    heads: int = 4
    temporal_depth: int = 2
    spatial_depth: int = 2
    match_parameters: bool = False
    days: str = "sines"
    mask_padding: bool = True
    legacy_layout: bool = False
    made_train: int = 600
    made_test: int = 80

    takes_plan: ClassVar[bool] = True
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tiny": {"steps": 4, "batch_size": 4, "dim": 8, "heads": 2, "temporal_depth": 1, "spatial_depth": 1,
                 "made_train": 12, "made_test": 4, "evaluate_every": 4},
        # An epoch of fold 1 is 3,274 steps: 1,455 patches, each of 36 windows that cover its 128 × 128 pixels.
        "paper": {"mixer": "pom", "patch": 2, "dim": 128, "heads": 4, "temporal_depth": 4, "spatial_depth": 4,
                  "batch_size": 16, "epochs": 100.0, "learning_rate": 1e-3, "weight_decay": 0.0, "warmup": 0.1,
                  "final": 0.005, "betas": (0.9, 0.999), "days": "random", "mask_padding": False,
                  "keep": "best", "evaluate_every": 3274, "checkpoint_every": 3274},
    }  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("window", "patch", "dates", "dim", "heads", "made_train", "made_test"):
            check_int(name, getattr(self, name), 1)
        for name in ("temporal_depth", "spatial_depth"):
            check_int(name, getattr(self, name), 0)
        check_int("fold", self.fold, 1, 5)
        check_choice("days", self.days, EMBEDDINGS)
        for name in ("allow_pickle", "match_parameters", "mask_padding", "legacy_layout"):
            check_choice(name, getattr(self, name), (True, False))
        if self.classes is not None:
            check_int("classes", self.classes, 2, 255)
        if self.window % self.patch:
            fits = next(side for side in range(self.patch, 0, -1) if self.window % side == 0)
            got, cure = f"{self.patch} with window={self.window}", f"For example, pass --set patch={fits}."
            raise OptionError("patch", got, "a divisor of the window", cure)

    def check_options(self) -> dict[str, Any]:
        return {"allow_pickle": self.allow_pickle}

    def layers(self) -> Sequence[str]:
        """The names of the blocks, for plans."""
        temporal = [f"temporal.{place}" for place in range(self.temporal_depth)]
        return [*temporal, *(f"spatial.{place}" for place in range(self.spatial_depth))]
