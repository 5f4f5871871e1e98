"""Depth as a task: the scale-invariant log loss over the pixels with a truth, and the metrics of Eigen et al."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from polymix.domains.depth import data as reading
from polymix.domains.depth import hosts
from polymix.domains.depth import metrics as measuring
from polymix.domains.depth.data import DepthData, Scenes
from polymix.domains.depth.layouts import LAYOUTS
from polymix.domains.depth.recipe import DepthRecipe
from polymix.limits import check_memory
from polymix.numbers import plural
from polymix.train.data.scans.page import Pages
from polymix.train.task import Metric, Process, Task


def scale_invariant(log_depth: Tensor, truth: Tensor, share: float) -> Tensor:
    """The mean over views of mean d² − λ (mean d)², d = log p − log t, over the pixels whose truth t is above 0.

    log_depth, truth: (B, K, H, W). share: λ. Views without a truth count as 0. Source: Eigen et al. 2014, Equation 4.
    """
    known = truth > 0
    d = (log_depth.float() - truth.where(known, 1.0).log()).where(known, 0.0).flatten(2)
    count = known.flatten(2).sum(2).clamp_min(1)
    return (d.square().sum(2) / count - share * (d.sum(2) / count).square()).mean()


class DepthTask(Task[DepthRecipe, DepthData]):
    """A model of views (B, K, 3, H, W) from -1 to 1 and rays (B, K, N, 6) -> log depth (B, K, H, W)."""

    name = "depth"
    metrics = (Metric("abs_rel", "lower"), Metric("delta_1", "higher", "%"), Metric("rmse", "lower"),
               Metric("si_log", "lower"))  # fmt: skip
    layouts = LAYOUTS
    unit = "scenes"
    predicts: ClassVar[bool] = True

    def check(self) -> None:
        recipe = self.recipe
        tokens = recipe.cameras * recipe.height * recipe.width // recipe.patch_size**2
        what = f"{recipe.batch_size:,} samples of {tokens:,} tokens and {recipe.dim:,} channels"
        check_memory("height, width, dim", what, 8 * recipe.batch_size * tokens * recipe.dim)
        with torch.device("meta") if recipe.host == "small" else nullcontext():
            hosts.build(recipe, 0.0)

    def problems(self, source: str) -> list[str]:
        return reading.list_problems(self.recipe, source)

    def load(self, folder: Path) -> DepthData:
        return reading.load(self.recipe, folder, self.say)

    def build(self, data: DepthData) -> nn.Module:
        return hosts.build(self.recipe, data.centre)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return scale_invariant(self.infer(model, batch), batch[1], self.recipe.scale_invariance)

    def infer(self, model: nn.Module, batch: Any) -> Any:
        return model(batch[0].float() / 127.5 - 1, batch[2])

    def measure(self, model: nn.Module, data: DepthData, process: Process) -> dict[str, float]:
        return measuring.measure(model, data, self.recipe, process)

    def draw(self, model: nn.Module, data: DepthData, folder: Path) -> list[Path]:
        return measuring.draw(model, data, self.recipe, folder, Pages(self.say))

    def describe(self, data: DepthData) -> str:
        counts = f"{len(data.train):,} training and {len(data.test):,} test scenes"
        return f"{self.recipe.mixer_name}, on {data.name}: {counts} of {plural(self.recipe.cameras, 'view')}."

    def host_name(self, model: nn.Module) -> str:
        recipe = self.recipe
        return recipe.host.upper() if recipe.host != "small" else f"transformer over {recipe.patch_size}-pixel patches"

    def usage(self, data: DepthData, folder: Path) -> list[str]:
        shape = f"(B, {self.recipe.cameras}, 3, {self.recipe.height}, {self.recipe.width})"
        load = f"model = SavedRun.of({str(folder)!r}).load()  # views {shape} from -1 to 1 -> log depth"
        return ["from polymix.train.saved import SavedRun", "", load]

    def from_summary(self, summary: Mapping[str, Any]) -> DepthData:
        none = Scenes((), self.recipe)
        return DepthData(str(summary["name"]), float(summary["centre"]), none, none)

    def for_evaluation(self, summary: Mapping[str, Any], whole: bool, limit: int | None) -> DepthData | None:
        if self.recipe.data is None:
            return None
        data = self.load(Path())
        scenes = [*data.train.scenes, *data.test.scenes] if whole else data.test.scenes
        return replace(data, centre=float(summary["centre"]), test=Scenes(scenes[:limit], self.recipe))

    def predict(
        self, model: nn.Module, data: DepthData, files: Sequence[Path], folder: Path, process: Process
    ) -> list[dict[str, Any]]:
        return measuring.predict(model, self.recipe, files, folder, process, Pages(self.say))
