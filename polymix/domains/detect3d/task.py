"""Detection in scans as a task: focal loss of heat maps and L1 of boxes, measured by nuScenes' detection score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from polymix.domains.detect3d import data as reading
from polymix.domains.detect3d import metrics as measuring
from polymix.domains.detect3d.center_head import center_counts, center_losses, center_targets
from polymix.domains.detect3d.center_point import CenterPoint
from polymix.domains.detect3d.data import LAYOUTS, Detect3dData
from polymix.domains.detect3d.frames import INPUTS
from polymix.domains.detect3d.recipe import Detect3dRecipe
from polymix.domains.detect3d.score import ERRORS
from polymix.errors import OptionError
from polymix.train.counted import CountedTask
from polymix.train.optimizers import one_cycle
from polymix.train.published import published
from polymix.train.task import Metric, Process

HOST = "DSVT with CenterPoint's head"


class Detect3dTask(CountedTask[Detect3dRecipe, Detect3dData]):
    """A model (points (n, 5), offsets (B + 1,)) -> heat and boxes."""

    name = "detect3d"
    # Without velocities, as in KITTI, there is no NDS, and mAP is the first.
    metrics = (Metric("NDS", "higher"), Metric("mAP", "higher"), *(Metric(error, "lower") for error in ERRORS))
    layouts = LAYOUTS
    unit = "scans"
    fresh = ("head",)
    predicts: ClassVar[bool] = True

    def check(self) -> None:
        self._build((1, 1))

    def problems(self, source: str) -> list[str]:
        return reading.check(source, self.recipe.layout, self.recipe.sweeps)

    def load(self, folder: Path) -> Detect3dData:
        return reading.load(self.recipe, folder, self.say)

    def build(self, data: Detect3dData) -> CenterPoint:
        recipe, groups = self.recipe, data.groups()
        if recipe.nms == "circle" and len(recipe.radius) not in (1, len(groups)):
            allowed = f"one, or one for each of {len(groups)} groups of {', '.join(data.classes)}"
            raise OptionError("radius", repr(recipe.radius), allowed, "Change it, or nms.")
        model = self._build(groups)
        if recipe.host_init == "published":
            model.dsvt.start_as_published()
        return model

    def _build(self, groups: Sequence[int]) -> CenterPoint:
        recipe = self.recipe
        x, y = recipe.window
        window = (x, y, recipe.height)
        dsvt = {"heads": recipe.heads, "hidden": recipe.hidden, "set_size": recipe.set_size, "blocks": (recipe.blocks,),
                "windows": ((window, window),), "shift": (x // 2, y // 2),
                "legacy_positions": recipe.legacy_positions, "match_parameters": recipe.match_parameters}  # fmt: skip
        return CenterPoint(
            list(recipe.mixers_for(recipe.block_names()).values()), inputs=INPUTS,
            groups=groups, space=recipe.space, voxel=recipe.voxel, encoder=recipe.encoder, dsvt=dsvt,
            depths=recipe.depths, strides=recipe.strides, channels=recipe.channels, out=recipe.level_dim,
            stride=recipe.stride, head_dim=recipe.head_dim, convolutions=recipe.convolutions,
        )  # fmt: skip

    def counts(self, model: Any, batch: Any) -> Tensor:
        """`center_counts`."""
        return center_counts(batch[2], model.extent, model.stride, model.head.group_of)

    def sums(self, model: Any, batch: Any) -> Tensor:
        """`center_losses`."""
        output = self.infer(model, batch)
        classes = output["heat"].shape[1]
        place = (classes, model.extent, model.stride, self.recipe.legacy_radius)
        targets = [center_targets(boxes, labels, *place) for boxes, labels in batch[2]]
        return center_losses(output, targets, model.head.group_of)

    def infer(self, model: nn.Module, batch: Any) -> Any:
        return model(batch[0], batch[1])

    def schedule(self, optimizer: Optimizer) -> LRScheduler:
        recipe = self.recipe
        if recipe.one_cycle:
            return one_cycle(optimizer, recipe.steps, recipe.warmup, 0.1, recipe.final)
        return super().schedule(optimizer)

    def measure(self, model: nn.Module, data: Detect3dData, process: Process) -> dict[str, float]:
        """NDS, mAP and the five errors on the test scans; without velocities mAP and the errors that there are."""
        return measuring.score(model, data, self.recipe, process)[0]

    def details(self, model: nn.Module, data: Detect3dData, process: Process) -> dict[str, Any]:
        """The metrics, and AP by distance and the errors of each class."""
        metrics, rows = measuring.score(model, data, self.recipe, process)
        return {"metrics": metrics, "classes": rows, "count": len(data.test), "unit": "scans"}

    def draw(self, model: nn.Module, data: Detect3dData, folder: Path) -> list[Path]:
        return measuring.draw(model, data, self.recipe, folder, self.say)

    def describe(self, data: Detect3dData) -> str:
        recipe = self.recipe
        sides = " × ".join(f"{side:g}" for side in recipe.voxel)
        return (
            f"{recipe.mixer_name} in {HOST}, on {data.name}: {len(data.train):,} training scans, {len(data.test):,} "
            f"test scans, {', '.join(data.classes)}, voxels of {sides} m."
        )

    def host_name(self, model: nn.Module) -> str:
        return HOST

    def published(self) -> dict[str, Any] | None:
        """None: PADRe's figures on nuScenes are of TransFusion's head."""
        return published("detect3d", data="nuScenes", split="validation", host=HOST, mixer=self.recipe.mixer_name)

    def usage(self, data: Detect3dData, folder: Path) -> list[str]:
        shapes = f"points (n, {INPUTS}), offsets (B + 1,) -> heat and boxes"
        load = f"model = SavedRun.of({str(folder)!r}).load()  # {shapes}"
        return ["from polymix.train.saved import SavedRun", "", load]

    def from_summary(self, summary: Mapping[str, Any]) -> Detect3dData:
        return reading.from_summary(self.recipe, summary)

    def for_evaluation(self, summary: Mapping[str, Any], whole: bool, limit: int | None) -> Detect3dData:
        return reading.for_evaluation(self.recipe, summary, whole, limit, self.say)

    def predict(
        self, model: nn.Module, data: Detect3dData, files: Sequence[Path], folder: Path, process: Process
    ) -> list[dict[str, Any]]:
        return measuring.predict(model, data, self.recipe, files, folder, process, self.say)
