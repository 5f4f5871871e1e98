"""Segmentation of scans as a task: cross-entropy and Lovász-softmax, a learning rate of the blocks, mIoU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from polymix.domains.segment3d import data as reading
from polymix.domains.segment3d import metrics as measuring
from polymix.domains.segment3d.along import AlongCurve
from polymix.domains.segment3d.data import Segment3dData
from polymix.domains.segment3d.layouts import LAYOUTS, VOID
from polymix.domains.segment3d.losses import lovasz_softmax
from polymix.domains.segment3d.ptv3 import PTv3
from polymix.domains.segment3d.recipe import Segment3dRecipe
from polymix.numbers import plural
from polymix.train.counted import CountedTask
from polymix.train.initial import start_as_pytorch
from polymix.train.optimizers import one_cycle, rated_groups
from polymix.train.task import Metric, Process

BLOCKS = ("encoder.", "decoder.")  # whose learning rate is `block_rate` times the others'
FEATURES = 4  # of a LiDAR's points: coordinates and remission


class Segment3dTask(CountedTask[Segment3dRecipe, Segment3dData]):
    """A model (features (V, C), voxels (V, 3), offsets (B + 1,)) -> logits (V, K)."""

    name = "segment3d"
    metrics = (Metric("miou", "higher"), Metric("accuracy", "higher", "%"), Metric("iou", "higher"))
    layouts = LAYOUTS
    unit = "points"
    splits = "blocks"
    fresh = ("head",)
    predicts: ClassVar[bool] = True

    def check(self) -> None:
        self.check_shared(self._build(FEATURES, 2))

    def problems(self, source: str) -> list[str]:
        return reading.check(source, self.recipe.layout, self.recipe.smallest_voxel)

    def load(self, folder: Path) -> Segment3dData:
        return reading.load(self.recipe, folder, self.say)

    def validation(self, data: Segment3dData) -> Segment3dData:
        """The held-out scans themselves, the benchmarks' validation part, by which Pointcept keeps the best weights."""
        return data

    def build(self, data: Segment3dData) -> PTv3:
        """Raises OptionError where coordinates="none" leaves a point without features."""
        model = self._build(data.features, len(data.classes))
        if self.recipe.host_init == "published":
            start_as_pytorch(model)
        return model

    def _build(self, inputs: int, classes: int) -> PTv3:
        recipe = self.recipe
        return PTv3(
            list(recipe.mixers_for(recipe.block_names()).values()), inputs=inputs, classes=classes,
            depths=recipe.depths, channels=recipe.channels, heads=recipe.heads, decoder_depths=recipe.decoder_depths,
            decoder_channels=recipe.decoder_channels, decoder_heads=recipe.decoder_heads, window=recipe.windows(),
            orders=recipe.orders, shuffle=recipe.shuffle, cpe=recipe.cpe, drop_path=recipe.drop_path,
            legacy_unpooling=recipe.legacy_unpooling, fit_curves=recipe.fit_curves,
            match_parameters=recipe.match_parameters,
        )  # fmt: skip

    def counts(self, model: nn.Module, batch: Any) -> Tensor:
        """Of voxels whose label counts; Lovász-softmax has one value in every slice."""
        voxels = (batch[3] != VOID).sum()
        return torch.stack((voxels, torch.ones_like(voxels)))

    def sums(self, model: nn.Module, batch: Any) -> Tensor:
        """Cross-entropy of the voxels whose label counts, and their weighted Lovász-softmax; 0 where there are none."""
        labels = batch[3]
        logits = self.infer(model, batch).float()
        counted = labels != VOID
        logits, labels = logits[counted], labels[counted]
        loss, weight = cross_entropy(logits, labels, reduction="sum"), self.recipe.lovasz
        return torch.stack((loss, weight * lovasz_softmax(logits.softmax(1), labels) if weight else loss * 0))

    def shared_blocks(self, model: nn.Module) -> list[list[nn.Module]]:
        """Each mixer alone: the convolutions between them need the points beside a point, whoever has them."""
        return [[part.mixer] for part in model.modules() if isinstance(part, AlongCurve)]

    def infer(self, model: nn.Module, batch: Any) -> Tensor:
        logits: Tensor = model(*batch[:3])
        return logits

    def size(self, batch: Any) -> float:
        return float(batch[4])

    def optimizer(self, model: nn.Module) -> Optimizer:
        recipe = self.recipe
        groups = rated_groups(model, recipe, BLOCKS, recipe.block_rate)
        return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=recipe.betas)

    def schedule(self, optimizer: Optimizer) -> LRScheduler:
        recipe = self.recipe
        if recipe.one_cycle:
            return one_cycle(optimizer, recipe.steps, recipe.warmup, 0.1, recipe.final)
        return super().schedule(optimizer)

    def measure(self, model: nn.Module, data: Segment3dData, process: Process) -> dict[str, float]:
        """mIoU by `Confusion` and the share of points that are right, over all test scans."""
        return measuring.confusion(model, data, process).compute()

    def details(self, model: nn.Module, data: Segment3dData, process: Process) -> dict[str, Any]:
        """The metrics, and the IoU of each class that occurs."""
        confusion = measuring.confusion(model, data, process)
        return {"metrics": confusion.named(data.classes), "count": len(data.test), "unit": "scans"}

    def draw(self, model: nn.Module, data: Segment3dData, folder: Path) -> list[Path]:
        return measuring.draw(model, data, folder, self.say)

    def describe(self, data: Segment3dData) -> str:
        recipe = self.recipe
        sizes = dict.fromkeys("whole clouds" if size is None else f"windows of {size}" for size in recipe.windows())
        return (
            f"{recipe.mixer_name} in PTv3, on {data.name}: {len(data.train):,} training scans, {len(data.test):,} test "
            f"scans, {plural(len(data.classes), 'class')}, voxels of {recipe.voxel} m, {' and '.join(sizes)}."
        )

    def host_name(self, model: nn.Module) -> str:
        return "PTv3" if self.recipe.cpe else "PTv3 without convolutional position encodings"

    def published(self) -> dict[str, Any] | None:
        return measuring.published(self.recipe)

    def usage(self, data: Segment3dData, folder: Path) -> list[str]:
        shapes = f"features (V, {data.features}), voxels (V, 3), offsets -> (V, K)"
        load = f"model = SavedRun.of({str(folder)!r}).load()  # {shapes}"
        return ["from polymix.train.saved import SavedRun", "", load]

    def from_summary(self, summary: Mapping[str, Any]) -> Segment3dData:
        return reading.from_summary(self.recipe, summary)

    def for_evaluation(self, summary: Mapping[str, Any], whole: bool, limit: int | None) -> Segment3dData:
        return reading.for_evaluation(self.recipe, summary, whole, limit, self.say)

    def predict(
        self, model: nn.Module, data: Segment3dData, files: Sequence[Path], folder: Path, process: Process
    ) -> list[dict[str, Any]]:
        return measuring.predict(model, data, self.recipe, files, folder, process, self.say)
