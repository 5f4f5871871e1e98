"""Video as a task: cross-entropy of a clip's class, or the squared error of its next frame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from polymix.domains.video import data as reading
from polymix.domains.video import metrics as measuring
from polymix.domains.video.data import VideoData
from polymix.domains.video.hosts import VideoTransformer
from polymix.domains.video.recipe import VideoRecipe
from polymix.limits import check_memory
from polymix.numbers import plural
from polymix.train.task import Metric, Process, Say, Task, silent


class VideoTask(Task[VideoRecipe, VideoData]):
    """A model of clips (B, T, C, S, S) -> (B, T or 1, classes), or next frames (B, T or 1, C, S, S)."""

    name = "video"
    metrics = (
        Metric("accuracy", "higher", "%"), Metric("top_5", "higher", "%"), Metric("val_loss", "lower"),
        Metric("loss", "lower"), Metric("majority", "higher", "%"),
    )  # fmt: skip
    unit = "clips"
    fresh = ("head",)
    predicts: ClassVar[bool] = True
    answers: ClassVar[bool] = True

    def __init__(self, recipe: VideoRecipe, say: Say = silent) -> None:
        super().__init__(recipe, say)
        if recipe.target == "next_frame":  # has no classes: this instance measures and answers otherwise
            vars(self).update(metrics=(Metric("psnr", "higher"),), answers=False)

    def check(self) -> None:
        recipe = self.recipe
        tokens = recipe.frames * (recipe.image_size // recipe.patch) ** 2
        what = f"{recipe.batch_size:,} clips of {tokens:,} tokens and {recipe.dim:,} channels"
        check_memory("frames, image_size, dim", what, 8 * recipe.batch_size * tokens * recipe.dim)
        with torch.device("meta"):
            self._build(1, 2)

    def problems(self, source: str) -> list[str]:
        return reading.list_problems(self.recipe, source)

    def load(self, folder: Path) -> VideoData:
        return reading.load(self.recipe, folder, self.say)

    def build(self, data: VideoData) -> VideoTransformer:
        return self._build(data.channels, len(data.classes))

    def _build(self, channels: int, classes: int) -> VideoTransformer:
        recipe = self.recipe
        mixers = recipe.mixers_for(recipe.block_names(), recipe.dim if recipe.match_parameters else None)
        outputs = classes if recipe.target == "class" else None
        return VideoTransformer(recipe, list(mixers.values()), channels, outputs)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        clips, labels = batch
        output = model(clips[:, : self.recipe.frames])
        if self.recipe.target == "class":
            return cross_entropy(output[:, -1], labels)
        return mse_loss(output, clips[:, -output.shape[1] :])

    def infer(self, model: nn.Module, batch: Any) -> Any:
        return model(batch[0][:, : self.recipe.frames])

    def measure(self, model: nn.Module, data: VideoData, process: Process) -> dict[str, float]:
        return measuring.measure(model, data, self.recipe, process)

    def details(self, model: nn.Module, data: VideoData, process: Process) -> dict[str, Any]:
        return measuring.details(model, data, self.recipe, process)

    def draw(self, model: nn.Module, data: VideoData, folder: Path) -> list[Path]:
        return measuring.draw(model, data, self.recipe, folder)

    def describe(self, data: VideoData) -> str:
        recipe = self.recipe
        what = f"the class of {recipe.frames} frames" if recipe.target == "class" else "the next frame"
        classes = f" of {plural(len(data.classes), 'class')}" if recipe.target == "class" else ""
        return (
            f"{recipe.mixer_name} predicts {what}, on {data.name}: {len(data.train):,} training and {len(data.test):,} "
            f"test clips{classes}, {recipe.image_size} × {recipe.image_size} pixels."
        )

    def host_name(self, model: nn.Module) -> str:
        recipe = self.recipe
        order = ", block-causal" if recipe.causal else ""
        return f"transformer over {recipe.frames} frames of {recipe.patch} × {recipe.patch} patches{order}"

    def usage(self, data: VideoData, folder: Path) -> list[str]:
        what = "classes" if self.recipe.target == "class" else "C, S, S"
        shapes = f"clips (B, T, C, S, S) -> (B, {'T' if self.recipe.causal else '1'}, {what})"
        lines = ["from polymix.train.saved import SavedRun", ""]
        lines.append(f"model = SavedRun.of({str(folder)!r}).load()  # {shapes}")
        if self.recipe.causal:
            lines.append("output, state = model.step(frame, state)  # of a stream; state=None at its start")
        return lines

    def from_summary(self, summary: Mapping[str, Any]) -> VideoData:
        return reading.from_summary(self.recipe, summary)

    def for_evaluation(self, summary: Mapping[str, Any], whole: bool, limit: int | None) -> VideoData | None:
        """The test part, or all clips, as the trained model knows them; of a run on synthetic data those of `load`."""
        if self.recipe.data is None:
            return None
        data = reading.load(self.recipe, Path(), self.say)
        return reading.restricted(reading.known_as(data, summary, self.recipe), whole, limit)

    def predict(
        self, model: nn.Module, data: VideoData, files: Sequence[Path], folder: Path, process: Process
    ) -> list[dict[str, Any]]:
        return measuring.predict(model, data, self.recipe, files, folder, process)
