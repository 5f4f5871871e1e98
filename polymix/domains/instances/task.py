"""Instance segmentation as a task: Mask R-CNN, measured by COCO's average precision of masks and boxes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from polymix.domains.instances import nuclei
from polymix.domains.instances.mask_rcnn import TimmPyramid, build_mask_rcnn
from polymix.domains.instances.recipe import InstancesRecipe
from polymix.train.data.boxes import data as reading
from polymix.train.data.boxes.coco import is_coco_2017
from polymix.train.data.boxes.data import DetectionData
from polymix.train.data.boxes.detectors import INSERTED, DetectorTask, Objects, check_mixer
from polymix.train.data.boxes.options import LAST_OF_RES4, NO_BLOCK
from polymix.train.data.boxes.precision import NAMES, average_precision
from polymix.train.data.problems import Problems
from polymix.train.data.synthetic import cached
from polymix.train.optimizers import decay_groups, warmup_and_falls
from polymix.train.published import published
from polymix.train.task import Metric, Process

HEADLINES = ("mask_AP", "mask_AP50", "mask_AP75", "AP", "AP50", "AP75")
MASK_THRESHOLD = 0.5  # probability of a pixel that belongs to an object
MOMENTUM = 0.9


class InstancesTask(DetectorTask[InstancesRecipe, DetectionData]):
    """A model [images] -> [{boxes, scores, labels from 1, masks}]."""

    name = "instances"
    metrics = tuple(Metric(prefix + name, "higher") for prefix in ("mask_", "") for name in NAMES.values())
    layouts = ("coco", "voc", "nuclei")
    fresh = ("roi_heads.box_predictor.", "roi_heads.mask_predictor.mask_fcn_logits.", *INSERTED)
    detector = "Mask R-CNN"

    def check(self) -> None:
        recipe = self.recipe
        check_mixer(recipe.mixer)
        if recipe.backbone not in LAST_OF_RES4:
            TimmPyramid(recipe)  # which raises what the training would

    def problems(self, source: str) -> list[str]:
        if not self._has_nuclei(source):
            return reading.check(source, self.recipe.layout, self.recipe.images, masks=True, say=self.say)
        problems = Problems()
        with problems.noting():
            nuclei.read(Path(source))
        return problems.lines

    def load(self, folder: Path) -> DetectionData:
        """The recipe's pictures; or crops of the nuclei, which lie in COCO's layout in `folder`."""
        wheel = self._nuclei()
        if wheel is None:
            return reading.load(self.recipe, folder, self.say)
        settings = {"size": self.recipe.image_size, "wheel": nuclei.checksum(wheel)}
        source = cached(folder, "nuclei", settings, lambda place: nuclei.write(wheel, place, self.recipe.image_size))
        return replace(reading.load(self.recipe, folder, self.say, source), name=f"the nuclei of {wheel.name}")

    def build(self, data: DetectionData) -> nn.Module:
        return build_mask_rcnn(self.recipe, len(data.classes))

    def truths(self, targets: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Targets with labels from 1 and masks of bytes, without crowds."""
        return [
            {"boxes": t["boxes"][~t["iscrowd"]], "labels": t["labels"][~t["iscrowd"]] + 1,
             "masks": t["masks"][~t["iscrowd"]].to(torch.uint8)} for t in targets
        ]  # fmt: skip

    def optimizer(self, model: nn.Module) -> Optimizer:
        """AdamW, or SGD as torchvision's reference has it."""
        recipe = self.recipe
        groups = decay_groups(model, recipe)
        if recipe.optimizer == "sgd":
            return SGD(groups, lr=recipe.learning_rate, momentum=MOMENTUM)
        return AdamW(groups, lr=recipe.learning_rate, betas=recipe.betas)

    def schedule(self, optimizer: Optimizer) -> LRScheduler:
        """A cosine, or tenths after the recipe's milestones."""
        recipe = self.recipe
        if not recipe.milestones:
            return super().schedule(optimizer)
        return LambdaLR(optimizer, warmup_and_falls(recipe.steps, recipe.warmup, recipe.milestones))

    def measure(self, model: nn.Module, data: DetectionData, process: Process) -> dict[str, float]:
        """AP of masks and of boxes on the test pictures."""
        figures = self.details(model, data, process)["metrics"]
        return {name: figures[name] for name in HEADLINES}

    def details(self, model: nn.Module, data: DetectionData, process: Process) -> dict[str, Any]:
        """All of COCO's figures for masks and boxes, in the pixels of the fitted pictures."""
        predictions, targets = [], []
        for place in range(len(data.test)):
            pixels, target = data.test[place]
            predictions.append(self.find(model, pixels, process))
            targets.append(target)
        figures = average_precision(predictions, targets, masks=True)
        rows = [{"name": data.classes[place], "AP": ap} for place, ap in figures.pop("classes").items() if place >= 0]
        return {"metrics": figures, "classes": rows}

    def find(self, model: nn.Module, pixels: Tensor, process: Process) -> Objects:
        """Boxes, scores, labels from 0 and masks (k, H, W) of one picture of bytes, on the CPU."""
        (objects,) = model([pixels.to(process.device).float() / 255])
        boxes, scores, labels, masks = (objects[name].cpu() for name in ("boxes", "scores", "labels", "masks"))
        return {"boxes": boxes, "scores": scores, "labels": labels - 1, "masks": masks[:, 0] > MASK_THRESHOLD}

    def host_name(self, model: nn.Module) -> str:
        return f"Mask R-CNN, {self.recipe.backbone}"

    def published(self) -> dict[str, Any] | None:
        """What Poly-NL's paper reports for this block on COCO; None for other detectors, data and blocks."""
        recipe = self.recipe
        if (recipe.detector, recipe.backbone) != ("published", "resnet50") or not is_coco_2017(recipe.data):
            return None
        return published(self.name, data="COCO", split="val2017", host="Mask R-CNN, resnet50", mixer=recipe.mixer_name)

    def block(self) -> str:
        if self.recipe.backbone in LAST_OF_RES4:
            return super().block()
        mixer = self.recipe.mixer_name
        return f"on {self.recipe.backbone}" + f" with {mixer} in attention's place" * (mixer != NO_BLOCK)

    def from_summary(self, summary: Mapping[str, Any]) -> DetectionData:
        return reading.from_summary(self.recipe, summary)

    def for_evaluation(self, summary: Mapping[str, Any], whole: bool, limit: int | None) -> DetectionData:
        """The recipe's pictures; of the nuclei, the crops of the right quarter."""
        wheel, classes = self._nuclei(), tuple(summary["classes"])
        write = None if wheel is None else lambda place: nuclei.write(wheel, place, self.recipe.image_size)
        return reading.for_evaluation(self.recipe, classes, whole, limit, self.say, write)

    def _nuclei(self) -> Path | None:
        """The wheel or folder with the nuclei; None where the data are others."""
        data = self.recipe.data
        return Path(data) if data is not None and self._has_nuclei(data) else None

    def _has_nuclei(self, data: str) -> bool:
        layout = self.recipe.layout
        return layout == "nuclei" or (layout is None and nuclei.is_nuclei(Path(data)))
