"""Face detection as a task: RetinaNet, measured by WIDER FACE's average precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polymix.domains.faces import data as reading
from polymix.domains.faces.data import FaceData
from polymix.domains.faces.metrics import Answer, wider_ap
from polymix.domains.faces.recipe import FacesRecipe
from polymix.domains.faces.retinanet import build_retinanet
from polymix.train.data.boxes.detectors import INSERTED, DetectorTask, Objects, check_mixer
from polymix.train.task import Metric, Process

SUBSETS = ("AP_hard", "AP_medium", "AP_easy", "AP_all")


class FacesTask(DetectorTask[FacesRecipe, FaceData]):
    """A model [images] -> [{boxes, scores, labels}]: losses are the focal loss against background, and L1 of boxes."""

    name = "faces"
    metrics = tuple(Metric(name, "higher") for name in SUBSETS)
    layouts = reading.LAYOUTS
    fresh = ("head.", *INSERTED)
    detector = "RetinaNet"

    def check(self) -> None:
        check_mixer(self.recipe.mixer)

    def problems(self, source: str) -> list[str]:
        return reading.check(source, self.say)

    def load(self, folder: Path) -> FaceData:
        return reading.load(self.recipe, folder, self.say)

    def build(self, data: FaceData) -> nn.Module:
        return build_retinanet(self.recipe)

    def truths(self, targets: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Boxes and labels of the faces that count."""
        return [{name: t[name][~t["iscrowd"]] for name in ("boxes", "labels")} for t in targets]

    def measure(self, model: nn.Module, data: FaceData, process: Process) -> dict[str, float]:
        """AP of each subset on the test pictures, in the pixels of the files."""
        rows = []
        for place in range(len(data.test)):
            pixels, target = data.test[place]
            faces = self.find(model, pixels, process)
            rows.append((faces["boxes"] / target["scale"], faces["scores"]))
        figures = {}
        for name, counted in data.counted.items():
            answers = []
            for picture, (boxes, scores), mine in zip(data.test.pictures.pictures, rows, counted, strict=True):
                counts = torch.tensor([place in mine for place in range(len(picture.objects))], dtype=torch.bool)
                answers.append(Answer(boxes, scores, picture.target()["boxes"], counts))
            figures[f"AP_{name}"] = wider_ap(answers)
        return {name: figures[name] for name in SUBSETS if name in figures}

    def details(self, model: nn.Module, data: FaceData, process: Process) -> dict[str, Any]:
        """The metrics, and how many faces count in each."""
        counts = {name: sum(map(len, rows)) for name, rows in data.counted.items()}
        return {"metrics": self.measure(model, data, process), "faces": counts}

    def find(self, model: nn.Module, pixels: Tensor, process: Process) -> Objects:
        """Boxes, scores and labels in a picture of bytes, in its pixels, on the CPU."""
        (faces,) = model([pixels.to(process.device).float() / 255])
        return {name: value.float().cpu() if name != "labels" else value.cpu() for name, value in faces.items()}

    def host_name(self, model: nn.Module) -> str:
        return f"RetinaNet, {self.recipe.backbone}"

    def from_summary(self, summary: Mapping[str, Any]) -> FaceData:
        return reading.from_summary(self.recipe, summary)

    def for_evaluation(self, summary: Mapping[str, Any], whole: bool, limit: int | None) -> FaceData:
        return reading.for_evaluation(self.recipe, whole, limit, self.say)
