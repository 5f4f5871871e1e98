"""What torchvision's detectors share as tasks: a mixer inserted into their backbone, losses and predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from polymix.convert.insert import insert
from polymix.mixers.spec import parse_mixer
from polymix.train.data.boxes.data import DetectionData
from polymix.train.data.boxes.options import LAST_OF_RES4, NO_BLOCK
from polymix.train.data.drawing import draw_annotated, draw_truth_and_prediction
from polymix.train.data.pictures import read_picture
from polymix.train.data.scores import reaching, said_of
from polymix.train.data.vision import torchvision
from polymix.train.objects import ObjectsRecipe
from polymix.train.task import Process, Task

INSERTED = tuple(f"{place}.inserted" for place in LAST_OF_RES4.values())  # fresh where --init names a host without it
MIN_SCORE = 0.01  # of an object in the answers to files
GATES = ("se",)  # blocks that multiply x themselves, and are inserted without x + s · mixer(x)
DRAWN_PICTURES = 6  # test pictures
R = TypeVar("R", bound=ObjectsRecipe)
D = TypeVar("D", bound=DetectionData)
Objects = dict[str, Tensor]  # boxes (k, 4), scores (k), labels (k) from 0 and perhaps masks (k, H, W)


class DetectorTask(Task[R, D]):
    """A detector of torchvision with a mixer before the last block of Res4; the loss is the sum of its losses."""

    unit = "images"
    predicts: ClassVar[bool] = True
    detector: ClassVar[str]  # what reports call it

    def truths(self, targets: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Targets as the detector takes them, without crowds."""
        raise NotImplementedError(f"{type(self).__name__} has no truths(targets)")

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """All losses, added. Detectors of torchvision compute them in training mode alone."""
        images, targets = batch
        training = model.training
        model.train()
        losses: Mapping[str, Tensor] = model(list(images.float() / 255), self.truths(targets))
        model.train(training)
        return torch.stack([*losses.values()]).sum()

    def infer(self, model: nn.Module, batch: Any) -> Any:
        return model(list(batch[0].float() / 255))

    def find(self, model: nn.Module, pixels: Tensor, process: Process) -> Objects:
        """The objects in one picture of bytes (3, H, W), in its pixels, on the CPU."""
        raise NotImplementedError(f"{type(self).__name__} has no find(model, pixels, process)")

    def draw(self, model: nn.Module, data: D, folder: Path) -> list[Path]:
        """samples.png: test pictures with the true objects above and the predicted ones below."""
        pictures = []
        for place in range(min(DRAWN_PICTURES, len(data.test))):
            pixels, truth = data.test[place]
            pictures.append((pixels, truth, self.find(model, pixels, Process())))
        path = folder / "samples.png"
        draw_truth_and_prediction(pictures, data.classes, path, self.recipe.threshold)
        return [path]

    def predict(
        self, model: nn.Module, data: D, files: Sequence[Path], folder: Path, process: Process
    ) -> list[dict[str, Any]]:
        """The objects in picture files, in their pixels as they are shown, drawn on a copy in `folder`."""
        find = partial(self.find, model, process=process)
        return answers(find, files, folder, data.classes, self.recipe.threshold)

    def block(self) -> str:
        """Where the mixer is, in words."""
        mixer: str = self.recipe.mixer
        return "without a block" if mixer == NO_BLOCK else f"with {mixer} before the last block of Res4"

    def describe(self, data: D) -> str:
        text = f"{self.detector} {self.block()}, on {data.name}: {len(data.train):,} training pictures and "
        return text + f"{len(data.test):,} test pictures, {len(data.classes)} class{'es' * (len(data.classes) != 1)}."


def check_mixer(mixer: str) -> None:
    """Raise OptionError or UnknownNameError unless `mixer` is "none" or a mixer."""
    if mixer != NO_BLOCK:
        parse_mixer(mixer)


def resnet_pyramid(body: Any, layers: Sequence[int], channels: int, coarser: nn.Module) -> nn.Module:
    """A feature pyramid on the maps of a torchvision ResNet.

    Args:
        layers: of the ResNet, from 1 to 4, whose maps have strides 4, 8, 16 and 32.
        channels: of the pyramid.
        coarser: makes the levels that follow.
    """
    extractor = torchvision("models.detection.backbone_utils").BackboneWithFPN
    names = {f"layer{layer}": str(layer - 1) for layer in layers}
    widths = [body.inplanes >> (4 - layer) for layer in layers]
    pyramid: nn.Module = extractor(body, names, widths, channels, coarser)
    return pyramid


def insert_mixer(model: nn.Module, backbone: str, mixer: str, size: int, *, fresh: bool) -> None:
    """Insert a mixer before the last block of Res4, where Poly-NL has it (section 5.1.3); none for "none".

    Args:
        size: sides of the pictures in pixels, from which mixers that need rows and columns take theirs.
        fresh: whether the model learns from scratch. The factor s of x + s · mixer(x) then starts at 1, else at 0, so
            that what trained weights compute stays so at first; gates have none.
    """
    if mixer != NO_BLOCK:
        example = ([torch.zeros(3, size, size)],)
        config = parse_mixer(mixer)[1]
        residual = config.name not in GATES
        insert(model, LAST_OF_RES4[backbone], config, input=example, residual=residual, scale=float(fresh and residual))


def answers(
    find: Callable[[Tensor], Objects], files: Sequence[Path], folder: Path, classes: Sequence[str], threshold: float
) -> list[dict[str, Any]]:
    """What `predict` returns of picture files, in which `find` finds the objects of pixels.

    Returns:
        "answer", a sentence; "objects", each with class, score, box and mask (RLE), of all that score at least 0.01 or
        the threshold; and "picture", in which those that reach the threshold are drawn.
    """
    rows = []
    for place, file in enumerate(files):
        pixels = read_picture(file)
        rows.append(_answer(place, file, folder, pixels, find(pixels), classes, threshold))
    return rows


def _answer(
    place: int, file: Path, folder: Path, pixels: Tensor, objects: Objects, classes: Sequence[str], threshold: float
) -> dict[str, Any]:
    from polymix.train.data.boxes.masks import encode

    sentence, path = said_of(objects, classes, threshold), folder / f"{place:03d}-{file.stem}.png"
    drawn = reaching(objects, threshold)
    words = [f"{classes[label]} {score:.2f}"
             for label, score in zip(drawn["labels"], drawn["scores"].tolist(), strict=True)]  # fmt: skip
    draw_annotated(path, pixels, drawn["boxes"], words, drawn.get("masks"), "" if words else sentence)
    objects = reaching(objects, min(MIN_SCORE, threshold))
    names = [classes[label] for label in objects["labels"]]
    scores, masks = objects["scores"].tolist(), objects.get("masks")
    rows: list[dict[str, Any]] = [
        {"class": name, "score": round(score, 4), "box": [round(value, 2) for value in box]}
        for name, score, box in zip(names, scores, objects["boxes"].tolist(), strict=True)
    ]
    for row, mask in zip(rows, () if masks is None else masks, strict=masks is not None):
        row["mask"] = encode(mask)
    return {"file": str(file), "answer": sentence, "picture": path.name, "objects": rows}
