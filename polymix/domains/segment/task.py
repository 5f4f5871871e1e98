"""Segmentation as a task: cross-entropy over the pixels that count, AdamW with a faster head, mIoU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from polymix.domains.segment import data as reading
from polymix.domains.segment import hosts
from polymix.domains.segment import metrics as measuring
from polymix.domains.segment.data import SegmentData
from polymix.domains.segment.layouts import IGNORED, LAYOUTS
from polymix.domains.segment.recipe import SegmentRecipe
from polymix.domains.segment.synthetic import MIN_SIDE
from polymix.errors import OptionError
from polymix.numbers import plural
from polymix.train.counted import CountedTask
from polymix.train.data.label_maps import pixel_losses
from polymix.train.optimizers import rated_groups
from polymix.train.task import Metric, Process

HEADS = ("head.", "decode_head.")  # prefixes of the weights whose learning rate is `head_rate` times higher


def polynomial(step: int, steps: int, warmup: float, final: float, power: float) -> float:
    """The learning rate of a step as a share of the highest: linear × (1 - step / steps) ** power, down to `final`."""
    rising = max(1, round(warmup * steps))
    falling = final + (1 - final) * (1 - min(step / max(1, steps), 1.0)) ** power
    return falling * min(1.0, (step + 1) / rising)


class SegmentTask(CountedTask[SegmentRecipe, SegmentData]):
    """A model of images from -1 to 1 -> logits (B, K, H, W)."""

    name = "segment"
    metrics = (Metric("miou", "higher"), Metric("accuracy", "higher", "%"), Metric("iou", "higher"))
    layouts = LAYOUTS
    unit = "images"
    fresh = hosts.HEAD_PREFIXES
    predicts: ClassVar[bool] = True

    def check(self) -> None:
        recipe = self.recipe
        if recipe.data is None and recipe.crop < MIN_SIDE:
            allowed = f"at least {MIN_SIDE} for the default data"
            raise OptionError("crop", recipe.crop, allowed, "Its scenes have this size.")
        hosts.check(recipe)

    def problems(self, source: str) -> list[str]:
        return reading.list_problems(source, self.recipe.layout, self.recipe.classes, self.say)

    def load(self, folder: Path) -> SegmentData:
        return reading.load(self.recipe, folder, self.say)

    def build(self, data: SegmentData) -> nn.Module:
        return hosts.build(self.recipe, len(data.classes))

    def counts(self, model: nn.Module, batch: Any) -> Tensor:
        """Of pixels with a class."""
        return (batch[1] != IGNORED).sum()[None]

    def sums(self, model: nn.Module, batch: Any) -> Tensor:
        """Their cross-entropy."""
        return pixel_losses(self.infer(model, batch), batch[1].long(), IGNORED)[None]

    def infer(self, model: nn.Module, batch: Any) -> Tensor:
        logits: Tensor = model(batch[0].float() / 127.5 - 1)
        return logits

    def optimizer(self, model: nn.Module) -> Optimizer:
        recipe = self.recipe
        groups = rated_groups(model, recipe, HEADS, recipe.head_rate)
        return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=recipe.betas)

    def schedule(self, optimizer: Optimizer) -> LRScheduler:
        recipe = self.recipe
        if recipe.schedule == "cosine":
            return super().schedule(optimizer)
        return LambdaLR(
            optimizer, lambda step: polynomial(step, recipe.steps, recipe.warmup, recipe.final, recipe.power)
        )

    def measure(self, model: nn.Module, data: SegmentData, process: Process) -> dict[str, float]:
        """mIoU by `Confusion` and the share of pixels that are right, over all test pictures."""
        return measuring.confusion_of(model, data, self.recipe, process).compute()

    def details(self, model: nn.Module, data: SegmentData, process: Process) -> dict[str, Any]:
        """The metrics, and the IoU of each class that occurs."""
        confusion = measuring.confusion_of(model, data, self.recipe, process)
        return {"metrics": confusion.named(data.classes), "count": len(data.test), "unit": "pictures"}

    def draw(self, model: nn.Module, data: SegmentData, folder: Path) -> list[Path]:
        return measuring.draw(model, data, self.recipe, folder)

    def describe(self, data: SegmentData) -> str:
        names = ", ".join(data.classes[:12]) + " …" * (len(data.classes) > 12)
        return (
            f"{self.recipe.mixer_name} in the host {self.recipe.host}, on {data.name}: {len(data.train):,} training "
            f"pictures and {len(data.test):,} test pictures, {plural(len(data.classes), 'class')} ({names})."
        )

    def host_name(self, model: nn.Module) -> str:
        recipe = self.recipe
        if recipe.host == "patches":
            return f"encoder over 8 × 8 pixels, {recipe.depth} layers of {recipe.dim} channels"
        return f"EfficientViT-Seg on {recipe.backbone}" if recipe.host == "efficientvit" else f"SegFormer {recipe.size}"

    def usage(self, data: SegmentData, folder: Path) -> list[str]:
        side = self.recipe.crop
        load = f"model = SavedRun.of({str(folder)!r}).load()  # images (B, 3, {side}, {side}) from -1 to 1"
        return ["from polymix.train.saved import SavedRun", "", load]

    def from_summary(self, summary: Mapping[str, Any]) -> SegmentData:
        return reading.from_summary(self.recipe, summary)

    def for_evaluation(self, summary: Mapping[str, Any], whole: bool, limit: int | None) -> SegmentData:
        return reading.for_evaluation(self.recipe, summary, whole, limit, self.say)

    def predict(
        self, model: nn.Module, data: SegmentData, files: Sequence[Path], folder: Path, process: Process
    ) -> list[dict[str, Any]]:
        return measuring.predict(model, data, self.recipe, files, folder, process)
