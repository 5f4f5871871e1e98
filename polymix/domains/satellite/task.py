"""Satellite time series as a task: TSViT learns the crop of every pixel by cross-entropy, and is measured by mIoU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from polymix.domains.satellite import data as reading
from polymix.domains.satellite import metrics as measuring
from polymix.domains.satellite.data import SatelliteData
from polymix.domains.satellite.pastis import BANDS, LAYOUTS, VOID
from polymix.domains.satellite.recipe import SatelliteRecipe
from polymix.domains.satellite.tsvit import TSViT
from polymix.errors import OptionError
from polymix.numbers import plural
from polymix.train.counted import CountedTask
from polymix.train.data.label_maps import pixel_losses
from polymix.train.initial import start_as_pytorch
from polymix.train.task import Metric, Process

KM2 = 1e-4  # of a pixel of 10 × 10 m


class SatelliteTask(CountedTask[SatelliteRecipe, SatelliteData]):
    """A model (images, days, present) -> logits (B, K, H, W)."""

    name = "satellite"
    metrics = (Metric("miou", "higher"), Metric("accuracy", "higher", "%"), Metric("iou", "higher"))
    layouts = LAYOUTS
    unit = "km2"
    splits = "blocks"
    fresh = ("class_tokens",)
    predicts: ClassVar[bool] = True

    def check(self) -> None:
        self.check_shared(self._build(self.recipe.classes or 6))

    def problems(self, source: str) -> list[str]:
        return reading.check(source, self.recipe.layout, allow_pickle=self.recipe.allow_pickle)

    def load(self, folder: Path) -> SatelliteData:
        return reading.load(self.recipe, folder, self.say)

    def build(self, data: SatelliteData) -> TSViT:
        """Raises OptionError for a mixer that cannot leave padded dates out, where series have different lengths."""
        model = self._build(len(data.classes))
        if self.recipe.host_init == "published":
            for encoder in (model.temporal, model.spatial):
                start_as_pytorch(encoder)
        for block in model.temporal if self.recipe.mask_padding and data.padded else ():
            mixer: Any = block.mixer
            if "padding" not in mixer.capabilities.masks:
                got = f"{mixer.name}, which takes no mask, for series of different lengths"
                cure = "Choose another, or pass mask_padding=False: padded dates are then tokens, as published."
                raise OptionError("mixer", got, "a mixer that takes a padding mask", cure)
        return model

    def _build(self, classes: int) -> TSViT:
        recipe = self.recipe
        return TSViT(
            list(recipe.mixers_for(recipe.block_names()).values()), classes=classes, bands=BANDS,
            image_size=recipe.window, patch=recipe.patch, dim=recipe.dim, temporal_depth=recipe.temporal_depth,
            spatial_depth=recipe.spatial_depth, heads=recipe.heads, match_parameters=recipe.match_parameters,
            days=recipe.days, mask_padding=recipe.mask_padding, legacy_layout=recipe.legacy_layout,
        )  # fmt: skip

    def counts(self, model: nn.Module, batch: Any) -> Tensor:
        """Of pixels with a class."""
        return (batch[3] != VOID).sum()[None]

    def sums(self, model: nn.Module, batch: Any) -> Tensor:
        """Their cross-entropy."""
        return pixel_losses(self.infer(model, batch), batch[3], VOID)[None]

    def shared_blocks(self, model: Any) -> list[list[nn.Module]]:
        """The spatial encoder's: the sequences in time are short, and every process computes them all."""
        return [list(model.spatial)]

    def infer(self, model: nn.Module, batch: Any) -> Any:
        return model(*batch[:3])

    def size(self, batch: Any) -> float:
        return batch[3].numel() * KM2

    def validation(self, data: SatelliteData) -> SatelliteData:
        return reading.validation(self.recipe, data)

    def measure(self, model: nn.Module, data: SatelliteData, process: Process) -> dict[str, float]:
        """mIoU by `Confusion` and the share of pixels that are right, on whole test patches."""
        return measuring.confusion(model, data, self.recipe, process).compute()

    def details(self, model: nn.Module, data: SatelliteData, process: Process) -> dict[str, Any]:
        """The metrics, and the IoU of each class."""
        confusion = measuring.confusion(model, data, self.recipe, process)
        return {"metrics": confusion.named(data.classes), "count": len(data.test.patches), "unit": "patches"}

    def draw(self, model: nn.Module, data: SatelliteData, folder: Path) -> list[Path]:
        return measuring.draw(model, data, self.recipe, folder)

    def describe(self, data: SatelliteData) -> str:
        recipe, counts = self.recipe, data.counts
        return (
            f"{recipe.mixer_name} in TSViT, on {data.name}: {counts.get('train_windows', 0):,} windows of "
            f"{recipe.window} × {recipe.window} pixels of {counts.get('train_patches', 0):,} training patches, "
            f"{counts.get('test_patches', 0):,} test patches, {plural(len(data.classes), 'class')}. Fold {recipe.fold}."
        )

    def published(self) -> dict[str, Any] | None:
        return measuring.published(self.recipe)

    def usage(self, data: SatelliteData, folder: Path) -> list[str]:
        shapes = "images (B, T, 10, H, W), days (B, T) -> logits (B, K, H, W)"
        load = f"model = SavedRun.of({str(folder)!r}).load()  # {shapes}"
        return ["from polymix.train.saved import SavedRun", "", load]

    def from_summary(self, summary: Mapping[str, Any]) -> SatelliteData | None:
        return reading.from_summary(self.recipe, summary)

    def for_evaluation(self, summary: Mapping[str, Any], whole: bool, limit: int | None) -> SatelliteData | None:
        """Normalised as the training data were: the test fold, or all folds."""
        trained = self.from_summary(summary)
        if trained is None or self.recipe.data is None:
            return None
        data = reading.load(self.recipe.changed(classes=len(trained.classes)), Path(), self.say)
        patches = [*data.train.patches, *data.test.patches] if whole else data.test.patches
        recipe = self.recipe
        options = (recipe.window, recipe.dates, trained.mean, trained.std, recipe.legacy_series)
        test = reading.Windows(patches[:limit], *options)
        return replace(trained, name=data.name, test=test)

    def predict(
        self, model: nn.Module, data: SatelliteData, files: Sequence[Path], folder: Path, process: Process
    ) -> list[dict[str, Any]]:
        return measuring.predict(model, data, self.recipe, files, folder, process)
