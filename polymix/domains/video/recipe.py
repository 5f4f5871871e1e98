"""The options of a training on video."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from polymix.errors import divisors
from polymix.train.recipe import (
    BatchSize,
    Count,
    EvaluateEvery,
    Final,
    LearningRate,
    Mixer,
    Positive,
    Recipe,
    Share,
    Steps,
    wrong,
)


class VideoRecipe(Recipe):
    """A transformer over frames of patches: the class of a clip, or its next frame.

    The data are a folder of clips for each class: videos, folders of frames, or arrays. Without any they are synthetic,
    and a clip's last frame does not show its class. With causal=frame the model can read a stream, frame after frame.
    """

    task: ClassVar[str] = "polymix.domains.video.task:VideoTask"
    takes_plan: ClassVar[bool] = True
    reading: ClassVar[tuple[str, ...]] = ("stride",)
    of_default: ClassVar[tuple[str, ...]] = ("synthetic",)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tiny": {"steps": 4, "evaluate_every": 4, "batch_size": 8, "frames": 3, "image_size": 16, "patch": 8, "dim": 16,
                 "depth": 1, "synthetic_train": 16, "synthetic_test": 8, "dropout": 0.0},
    }  # fmt: skip

    batch_size: BatchSize = 32
    steps: Steps = 800
    learning_rate: LearningRate = 2e-3
    final: Final = 0.0
    evaluate_every: EvaluateEvery = 200
    mixer: Mixer = "pom:rotary=1d"  # without rotations it does not find the sign of a motion
    target: Literal["class", "next_frame"] = Field("class", description="what is predicted of a clip")
    causal: Literal["frame"] | None = Field(
        None,
        description="frame: the tokens of a frame see it and the frames before it, so that a stream can be read frame"
        " after frame; None: they see the whole clip",
    )
    frames: int = Field(8, ge=2, le=100_000, description="frames of a clip that the model sees")
    stride: Count = Field(1, description="frames of the video from one frame of a clip to the next")
    image_size: Count = Field(32, description="side in pixels to which the middle square of each frame is resized")
    patch: Count = Field(16, description="side of a token in pixels, a divisor of the image size")
    dim: Count = Field(64, description="channels")
    depth: int = Field(2, ge=1, le=10_000, description="blocks")
    mlp_ratio: Positive = Field(2.0, description="hidden units of the MLP per channel")
    dropout: Share = Field(0.0, description="of the MLPs")
    match_parameters: bool = Field(False, description="size the mixer so that it has as many parameters as attention")
    synthetic: Literal["direction", "collision", "hidden"] = Field(
        "direction",
        description="the default data: where a disc heads; whether disc and square bounce or pass; which one hides",
    )
    synthetic_train: Count = Field(4000, description="training clips of the default data")
    synthetic_test: Count = Field(1000, description="its test clips")

    @model_validator(mode="after")
    def _sizes_fit(self) -> VideoRecipe:
        if self.image_size % self.patch:
            fits = max(side for side in divisors(self.image_size) if side <= self.patch)
            got = f"{self.patch} with image_size={self.image_size}"
            raise wrong("patch", got, "a divisor of the image size", f"For example, pass patch={fits}.")
        return self

    @property
    def seen(self) -> int:
        """Frames of a clip, with the one that is to be predicted."""
        return self.frames + (self.target == "next_frame")

    @property
    def span(self) -> int:
        """Frames of a video that a clip stretches over."""
        return (self.seen - 1) * self.stride + 1
