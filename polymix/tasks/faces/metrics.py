"""WIDER FACE's average precision, and pictures of faces that were found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polymix.tasks.boxes.data import Sample
from polymix.tasks.boxes.detectors import block_in_words
from polymix.tasks.boxes.drawing import draw_annotated, draw_truth_and_prediction
from polymix.tasks.boxes.pictures import read_pixels
from polymix.tasks.faces.data import FaceData
from polymix.tasks.faces.recipe import FacesRecipe
from polymix.tasks.processes import Process

NAMES = ("AP_hard", "AP_medium", "AP_easy", "AP_all")
DIRECTIONS = dict.fromkeys(NAMES, "up")
OVERLAP = 0.5  # IoU of a face that is found
THRESHOLDS = 1000
SHOWN = 0.3  # the lowest score of a face in pictures
DRAWN = 6  # test pictures


class Found(NamedTuple):
    """The predictions (k, 4) and scores (k) of a picture, its faces (n, 4), and which of them count (n)."""

    boxes: Tensor
    scores: Tensor
    faces: Tensor
    counted: Tensor


def iou(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union of all pairs (k, n), of boxes whose corners are pixels that belong to them.

    As in WIDER FACE's evaluation, a box from x1 to x2 is x2 - x1 + 1 wide.
    """
    low, high = torch.maximum(a[:, None, :2], b[None, :, :2]), torch.minimum(a[:, None, 2:], b[None, :, 2:])
    both = (high - low + 1).clamp(min=0).prod(-1)
    sizes = [(part[:, 2:] - part[:, :2] + 1).prod(-1) for part in (a, b)]
    return both / (sizes[0][:, None] + sizes[1] - both)


def wider_ap(found: Iterable[Found]) -> float:
    """Average precision by the rule of WIDER FACE's evaluation; 0 where no face counts.

    Each prediction, the best first, belongs to the face with which its IoU is largest, if that is at least 0.5. If the
    face does not count in the subset, neither does the prediction. The first prediction of a face that counts is right;
    further ones, and those without a face, are wrong. Scores are scaled to [0, 1] over all pictures. Precision and
    recall at 1,000 thresholds, 0.999 to 0, give the area below the precision, which is first made to fall with the
    recall. Pictures without any face do not count.
    """
    pictures = list(found)
    total = sum(int(picture.counted.sum()) for picture in pictures)
    every = torch.cat([torch.zeros(0), *(picture.scores for picture in pictures)]).double()
    if not total or not len(every):
        return 0.0
    low, high = every.min(), every.max()
    scores, judged, right = [], [], []
    for picture in pictures:
        if not len(picture.faces) or not len(picture.scores):
            continue
        order = picture.scores.argsort(descending=True, stable=True)
        best, face = iou(picture.boxes[order].double(), picture.faces.double()).max(1)
        near = best >= OVERLAP
        counts = picture.counted[face]
        first = torch.zeros_like(near)
        seen: set[int] = set()
        for place in (near & counts).nonzero()[:, 0].tolist():
            first[place] = int(face[place]) not in seen
            seen.add(int(face[place]))
        value = picture.scores[order].double()
        scores.append((value - low) / (high - low) if high > low else torch.ones_like(value))
        judged.append(~near | counts)
        right.append(first)
    if not scores:
        return 0.0
    order = torch.cat(scores).argsort(descending=True, stable=True)
    falling = -torch.cat(scores)[order]
    thresholds = 1 - torch.arange(1, THRESHOLDS + 1, dtype=torch.float64) / THRESHOLDS
    upto = torch.searchsorted(falling, -thresholds, right=True)
    counts_of = [torch.cat((torch.zeros(1), torch.cat(part)[order].cumsum(0)))[upto] for part in (judged, right)]
    precision = counts_of[1].double() / counts_of[0].clamp(min=1)
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    recall = torch.cat((ends[:1], counts_of[1].double() / total, ends[1:]))
    precision = torch.cat((ends[:1], precision, ends[:1])).flip(0).cummax(0).values.flip(0)
    return float((recall.diff() * precision[1:]).sum())


def measure(model: nn.Module, data: FaceData, recipe: FacesRecipe, process: Process) -> dict[str, float]:
    """AP of each subset on the test pictures, in the pixels of the files."""
    rows = [in_file(find(model, data.test[place], process), data.test[place]) for place in range(len(data.test))]
    figures = {}
    for name, counted in data.counted.items():
        found = []
        for picture, row, mine in zip(data.test.pictures.pictures, rows, counted, strict=True):
            counts = torch.tensor([place in mine for place in range(len(picture.things))], dtype=torch.bool)
            found.append(Found(row["boxes"], row["scores"], picture.target()["boxes"], counts))
        figures[f"AP_{name}"] = wider_ap(found)
    return {name: figures[name] for name in NAMES if name in figures}


def details(model: nn.Module, data: FaceData, recipe: FacesRecipe, process: Process) -> dict[str, Any]:
    """The metrics, and how many faces count in each."""
    counts = {name: sum(map(len, rows)) for name, rows in data.counted.items()}
    return {"metrics": measure(model, data, recipe, process), "faces": counts}


def find(model: nn.Module, sample: Sample, process: Process) -> dict[str, Tensor]:
    """Boxes, scores and labels in a picture of bytes, on the CPU; in its own pixels."""
    (found,) = model([sample[0].to(process.device).float() / 255])
    return {name: value.float().cpu() if name != "labels" else value.cpu() for name, value in found.items()}


def in_file(found: dict[str, Tensor], sample: Sample) -> dict[str, Tensor]:
    """What was found in a fitted picture, in the pixels of the file."""
    return {**found, "boxes": found["boxes"] / sample[1]["scale"]}


def draw(model: nn.Module, data: FaceData, recipe: FacesRecipe, folder: Path) -> list[Path]:
    """predictions.png: test pictures with the true faces above and the found ones below."""
    pictures = []
    for place in range(min(DRAWN, len(data.test))):
        sample = data.test[place]
        found = find(model, sample, Process())
        shown = found["scores"] >= SHOWN
        pictures.append((sample[0], sample[1], {name: value[shown] for name, value in found.items()}))
    path = folder / "predictions.png"
    draw_truth_and_prediction(pictures, data.classes, path)
    return [path]


def predict(
    model: nn.Module, data: FaceData, recipe: FacesRecipe, files: Sequence[Path], folder: Path, process: Process
) -> list[dict[str, Any]]:
    """The faces in picture files: score and box in the file's pixels, drawn on a copy in `folder`."""
    results = []
    for place, file in enumerate(files):
        pixels = read_pixels(file)
        found = find(model, (pixels, {}), process)
        found = {name: value[found["scores"] >= SHOWN] for name, value in found.items()}
        path = folder / f"{place:03d}-{file.stem}.png"
        scores = found["scores"].tolist()
        draw_annotated(path, pixels, found["boxes"], [f"face {score:.2f}" for score in scores])
        rows = [{"score": round(score, 4), "box": [round(v, 2) for v in box]}
                for score, box in zip(scores, found["boxes"].tolist(), strict=True)]  # fmt: skip
        results.append({"file": str(file), "picture": path.name, "faces": rows})
    return results


def describe(recipe: FacesRecipe, data: FaceData) -> str:
    """What the model was trained on, for the report."""
    text = f"RetinaNet {block_in_words(recipe.mixer)}, on {data.name}: {len(data.train):,} training pictures and "
    return text + f"{len(data.test):,} test pictures."
