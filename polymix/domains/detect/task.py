"""Detection as a task: boxes and classes of objects, measured by COCO's average precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from polymix.domains.detect import metrics as measuring
from polymix.domains.detect.dense import DenseDetector
from polymix.domains.detect.detr import build_detr, check_padding, detr_counts, detr_losses, inputs
from polymix.domains.detect.losses import dense_losses, responsible
from polymix.domains.detect.recipe import DetectRecipe
from polymix.numbers import plural
from polymix.train.counted import CountedTask
from polymix.train.data.boxes import data as reading
from polymix.train.data.boxes.coco import is_coco_2017
from polymix.train.data.boxes.data import DetectionData
from polymix.train.data.boxes.detectors import DRAWN_PICTURES, Objects, answers
from polymix.train.data.boxes.fitting import EMPTY, fit
from polymix.train.data.boxes.precision import NAMES
from polymix.train.data.drawing import draw_truth_and_prediction
from polymix.train.optimizers import rated_groups, warmup_and_falls
from polymix.train.published import published
from polymix.train.task import Metric, Process

HEADLINES = ("AP", "AP50", "AP75", "AR100")
SHOWN_CLASSES = 12  # in a sentence
BACKBONE = ("model.backbone.",)  # of DETR in transformers


class DetectTask(CountedTask[DetectRecipe, DetectionData]):
    """A dense detector images -> (logits, boxes), or DETR of transformers."""

    name = "detect"
    metrics = tuple(Metric(name, "higher") for name in NAMES.values())
    layouts = reading.LAYOUTS
    unit = "images"
    fresh = ("label.", "class_labels_classifier.")  # of the dense detector and of DETR: depend on the classes
    predicts: ClassVar[bool] = True

    def check(self) -> None:
        recipe = self.recipe
        with torch.device("meta"):
            model = self._build(2)
        if recipe.host != "dense" and not recipe.synthetic:
            check_padding(model)

    def problems(self, source: str) -> list[str]:
        return reading.check(source, self.recipe.layout, self.recipe.images, say=self.say)

    def load(self, folder: Path) -> DetectionData:
        return reading.load(self.recipe, folder, self.say)

    def build(self, data: DetectionData) -> nn.Module:
        return self._build(len(data.classes))

    def _build(self, classes: int) -> nn.Module:
        recipe = self.recipe
        if recipe.host != "dense":
            return build_detr(recipe, classes)
        match = recipe.dim if recipe.match_parameters else None
        mixers = list(recipe.mixers_for(recipe.block_names(), match).values())
        return DenseDetector(
            mixers, image_size=recipe.image_size, classes=classes, dim=recipe.dim, stem=recipe.stem_of_host
        )

    def counts(self, model: Any, batch: Any) -> Tensor:
        """Of the tokens that answer for an object; `detr_counts`."""
        targets = batch[1]
        if self.recipe.host != "dense":
            return detr_counts(model, targets)
        return (torch.cat(responsible(model.centres, model.stride, targets)) >= 0).sum()[None]

    def sums(self, model: Any, batch: Any) -> Tensor:
        images, targets = batch
        if self.recipe.host != "dense":
            return detr_losses(model, images, targets)
        logits, boxes = self.infer(model, batch)
        return dense_losses(logits, boxes, model.centres, model.stride, targets)[None]

    def infer(self, model: nn.Module, batch: Any) -> Any:
        """Logits and boxes."""
        images, targets = batch
        if self.recipe.host != "dense":
            return model(**inputs(images, torch.stack([target["size"] for target in targets])))
        return model(images.float() / 127.5 - 1)

    def optimizer(self, model: nn.Module) -> Optimizer:
        """The base class's; for DETR with a rate for the backbone."""
        recipe = self.recipe
        if recipe.host == "dense":
            return super().optimizer(model)
        groups = rated_groups(model, recipe, BACKBONE, recipe.backbone_learning_rate / recipe.learning_rate)
        return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=recipe.betas)

    def schedule(self, optimizer: Optimizer) -> LRScheduler:
        """The base class's; for DETR a drop to a tenth at `drop_at`."""
        recipe = self.recipe
        if recipe.host == "dense":
            return super().schedule(optimizer)
        return LambdaLR(optimizer, warmup_and_falls(recipe.steps, recipe.warmup, (recipe.drop_at,)))

    def measure(self, model: nn.Module, data: DetectionData, process: Process) -> dict[str, float]:
        """AP, AP50, AP75 and AR100 on the test pictures."""
        figures = self.details(model, data, process)["metrics"]
        return {name: figures[name] for name in HEADLINES}

    def details(self, model: nn.Module, data: DetectionData, process: Process) -> dict[str, Any]:
        """All of COCO's figures, and AP by class."""
        return measuring.details(model, data, self.recipe, process)

    def draw(self, model: nn.Module, data: DetectionData, folder: Path) -> list[Path]:
        """samples.png: test pictures with the true boxes above and the predicted ones below."""
        predictions, _ = next(measuring.predict_all(model, data, self.recipe, Process()))
        pictures = [
            (picture.pixels(), picture.target(), objects)
            for picture, objects in zip(data.test.pictures.pictures[:DRAWN_PICTURES], predictions, strict=False)
        ]
        path = folder / "samples.png"
        draw_truth_and_prediction(pictures, data.classes, path, self.recipe.threshold)
        return [path]

    def describe(self, data: DetectionData) -> str:
        names = ", ".join(data.classes[:SHOWN_CLASSES]) + " …" * (len(data.classes) > SHOWN_CLASSES)
        text = f"{self.recipe.mixer_name} in the encoder of a detector, on {data.name}: {len(data.train):,} training "
        return text + f"pictures and {len(data.test):,} test pictures, {plural(len(data.classes), 'class')} ({names})."

    def host_name(self, model: nn.Module) -> str:
        recipe = self.recipe
        if recipe.host != "dense":
            name = "DETR" if recipe.host == "detr" else "Conditional DETR"
            return f"{name}, {recipe.backbone}, {recipe.depth} + {recipe.depth} layers, stride {recipe.stride_of_host}"
        return f"dense detector on {recipe.stem_of_host}, {recipe.depth} layers of {recipe.dim} channels"

    def published(self) -> dict[str, Any] | None:
        """What PADRe's paper reports for DETR with this mixer in its encoder on COCO; None for others and for plans."""
        recipe = self.recipe
        others = (recipe.plan, recipe.decoder_mixer, recipe.cross_mixer) != (None, None, None)
        own = (recipe.host, recipe.backbone, recipe.stride_of_host, recipe.match_parameters)
        if own != ("detr", "resnet50", 32, False) or others or not is_coco_2017(recipe.data):
            return None
        return published(self.name, data="COCO", split="val2017", host="DETR, resnet50", mixer=recipe.mixer)

    def from_summary(self, summary: Mapping[str, Any]) -> DetectionData:
        return reading.from_summary(self.recipe, summary)

    def for_evaluation(self, summary: Mapping[str, Any], whole: bool, limit: int | None) -> DetectionData:
        return reading.for_evaluation(self.recipe, tuple(summary["classes"]), whole, limit, self.say)

    def predict(
        self, model: nn.Module, data: DetectionData, files: Sequence[Path], folder: Path, process: Process
    ) -> list[dict[str, Any]]:
        """The objects in picture files, in their pixels as they are shown, drawn on a copy in `folder`."""

        def find(pixels: Tensor) -> Objects:
            image, target = fit(pixels, EMPTY, **self.recipe.sizes)
            objects = measuring.find(model, image[None].to(process.device), target["size"][None], self.recipe)[0]
            return {**objects, "boxes": objects["boxes"] / target["scale"]}

        return answers(find, files, folder, data.classes, self.recipe.threshold)
