"""The options of a training on handwriting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from polymix.train.option_effects import Beside
from polymix.train.recipe import (
    BatchSize,
    CheckpointEvery,
    Count,
    EvaluateEvery,
    HostInit,
    LearningRate,
    NotNegative,
    Place,
    Positive,
    Recipe,
    Share,
    Steps,
    wrong,
)

STRIDE = 4  # pixels of width per token


class HandwritingRecipe(Recipe):
    """HTR-VT, which reads lines of handwriting and is trained with CTC.

    The data are a folder or a tsv file; without one they are synthetic cheques, whose amount stands twice and is
    blotted once. The paper's hybrid, in which every second layer keeps attention, is plan="1:1".
    """

    task: ClassVar[str] = "polymix.domains.handwriting.task:HandwritingTask"
    takes_plan: ClassVar[bool] = True
    after_training: ClassVar[tuple[str, ...]] = ("beam", "language_model")
    fits_source: ClassVar[tuple[str, ...]] = ("layout", "lists")
    reading: ClassVar[tuple[str, ...]] = ("err",)
    only_beside: ClassVar[tuple[Beside, ...]] = (
        *Recipe.only_beside,
        ("beam", (), ("language_model",)),
        ("mask_ratio", (), ("span",)),
        ("schedule", ("cosine",), ("cosine_from",)),
        ("data", (), ("err", "lists")),
    )
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tiny": {"dim": 32, "depth": 2, "steps": 4, "evaluate_every": 4, "batch_size": 8, "synthetic_train": 32,
                 "synthetic_test": 8},
        "paper": {
            "height": 64, "width": 512, "dim": 768, "depth": 4, "heads": 6, "mlp_ratio": 4.0, "mask_ratio": 0.4,
            "span": 8, "positions": "grid", "host_init": "published",
            "interpolation": "bicubic", "loss_per": "line", "schedule": "htr_vt", "augment": True, "sam": 0.05,
            "learning_rate": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.5,
            "decay": "all", "warmup": 0.01, "final": 1e-4, "clip": None, "steps": 100_000, "batch_size": 128,
            "ema": 0.9999, "ema_rise": "half_steps", "ema_buffers": True,
            "keep": "best", "evaluate_every": 1000, "checkpoint_every": 1000, "log_every": 100,
        },
    }  # fmt: skip

    batch_size: BatchSize = 16
    steps: Steps = 1800
    learning_rate: LearningRate = 2e-3
    evaluate_every: EvaluateEvery = 200
    checkpoint_every: CheckpointEvery = 200
    height: Literal[32, 64] = Field(32, description="of a line in pixels, to which it is scaled")
    width: int = Field(
        256, ge=STRIDE, multiple_of=STRIDE,
        description="of a line in pixels, a multiple of 4; shorter ones are padded with white, longer ones squeezed",
    )  # fmt: skip
    lines: Count = Field(1, description="the most lines of a page that are put side by side; 1: every line alone")
    dim: int = Field(64, ge=4, multiple_of=4, description="channels of HTR-VT, a multiple of 4")
    depth: Count = Field(4, description="blocks")
    heads: Count | None = Field(
        None, description="heads of mixers that leave them open; None: one for every 64 channels"
    )
    mlp_ratio: Positive = Field(4.0, description="hidden units of the MLPs per channel")
    match_parameters: bool = Field(False, description="size the MLPs so that every mixer has attention's parameters")
    mask_ratio: Share = Field(0.0, description="share of the tokens that training masks")
    span: Count = Field(8, description="length of a masked span in tokens")
    positions: Literal["line", "grid"] = Field(
        "line", description="what of a token is encoded: its place in the line, or as published in a grid of 16 rows"
    )
    host_init: HostInit = "own"
    interpolation: Literal["bilinear", "bicubic"] = Field("bilinear", description="of scaled lines")
    loss_per: Literal["character", "line"] = Field(
        "character", description="divide each line's loss by its characters, or as published leave it whole"
    )
    schedule: Literal["cosine", "htr_vt"] = Field(
        "cosine", description="htr_vt: as published, a cosine over the steps without the warm-up, from the first step"
    )
    augment: bool = Field(False, description="warp, thicken or thin, and fade half of the batches each")
    sam: NotNegative = Field(
        0.0, description="radius of sharpness-aware minimisation, which takes two passes a step; 0: plain AdamW"
    )
    beam: int = Field(0, ge=0, le=10_000, description="prefixes of a beam search; 0: greedy decoding")
    language_model: Place | None = Field(None, description="ARPA file over characters, for the beam search")
    synthetic_train: Count = Field(4000, description="training lines of the default data")
    synthetic_test: Count = Field(400, description="its test lines, and as many to choose by")
    err: bool = Field(False, description="of IAM, take the lines whose segmentation is marked err, too")
    lists: str | None = Field(
        None, description="of LAM, the folder in data with the json lists, such as split/basic; None: the only one"
    )

    @model_validator(mode="after")
    def _options_fit(self) -> HandwritingRecipe:
        if self.sam and self.precision == "float16":
            cure = "Pass precision=bfloat16, or sam=0."
            raise wrong("sam", f"{self.sam} with precision=float16", "gradients that are not scaled", cure)
        return self

    @property
    def tokens(self) -> int:
        """Tokens of a line, or of a page's lines side by side."""
        return self.lines * self.width // STRIDE
