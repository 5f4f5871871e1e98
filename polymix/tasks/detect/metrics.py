"""Average precision of the detector, and pictures of its boxes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polymix.compat import nms
from polymix.mixers.spec import parse_mixer
from polymix.tasks.boxes.data import DetectionData
from polymix.tasks.boxes.drawing import draw_annotated, draw_truth_and_prediction
from polymix.tasks.boxes.fitting import fit
from polymix.tasks.boxes.pictures import read_pixels
from polymix.tasks.boxes.precision import NAMES, average_precision
from polymix.tasks.detect.detr import MOST, find_objects
from polymix.tasks.detect.recipe import DetectRecipe
from polymix.tasks.processes import Process

DIRECTIONS = dict.fromkeys(NAMES.values(), "up")
OVERLAP = 0.6  # above which the box of a lower score is dropped
SHOWN = 0.3  # the lowest score of a box in pictures
DRAWN = 6  # test pictures
PAPER = {"softmax": 0.406, "padre-2": 0.402}


def paper(recipe: DetectRecipe) -> dict[str, Any] | None:
    """What PADRe's paper reports for DETR with this mixer in its encoder on COCO; None for others and for plans."""
    others = (recipe.plan, recipe.decoder_mixer, recipe.cross_mixer) != (None, None, None)
    if recipe.host != "detr" or recipe.makes_data or others:
        return None
    mixer = parse_mixer(recipe.mixer)[1]
    ap = next((value for name, value in PAPER.items() if parse_mixer(name)[1] == mixer), None)
    return None if ap is None else {"AP": ap, "source": "PADRe, Table 3: DETR on COCO"}


def measure(model: nn.Module, data: DetectionData, recipe: DetectRecipe, process: Process) -> dict[str, float]:
    """AP, AP50, AP75, AP by area and AR100 on the test pictures."""
    found = details(model, data, recipe, process)["metrics"]
    return {name: found[name] for name in ("AP", "AP50", "AP75", "AR100")}


def details(model: nn.Module, data: DetectionData, recipe: DetectRecipe, process: Process) -> dict[str, Any]:
    """All of COCO's figures, and AP by class."""
    boxes, targets = [], []
    for predictions, truths in predict_all(model, data, recipe, process):
        boxes += predictions
        targets += truths
    found = average_precision(boxes, targets)
    by_class = found.pop("classes")
    rows = [{"name": data.classes[place], "AP": value} for place, value in by_class.items() if place >= 0]
    return {"metrics": found, "classes": rows}


def predict_all(
    model: nn.Module, data: DetectionData, recipe: DetectRecipe, process: Process
) -> Iterator[tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]]:
    """Predictions and targets of the test pictures in the pixels of the files, a batch at a time, on the CPU."""
    for start in range(0, len(data.test), recipe.batch_size):
        samples = [data.test[place] for place in range(start, min(start + recipe.batch_size, len(data.test)))]
        images, targets = data.collate(samples)
        rows = find(model, images.to(process.device), torch.stack([target["size"] for target in targets]), recipe)
        for row, target in zip(rows, targets, strict=True):
            row["boxes"] = row["boxes"] / target["scale"]
        yield (
            rows,
            [{**t, "boxes": t["boxes"] / t["scale"], "area": t["area"] / t["scale"][:2].prod()} for t in targets],
        )


def find(model: nn.Module, images: Tensor, sizes: Tensor, recipe: DetectRecipe) -> list[dict[str, Tensor]]:
    """The best boxes of each of the fitted pictures (B, 3, S, S) of bytes, whose sizes without padding are (B, 2)."""
    if recipe.host != "dense":
        return find_objects(model, images, sizes)
    logits, boxes = model(images.float() / 127.5 - 1)
    return [choose(*pair) for pair in zip(logits.float().cpu(), boxes.float().cpu(), strict=True)]


def choose(logits: Tensor, boxes: Tensor) -> dict[str, Tensor]:
    """The best boxes of one picture, without those that overlap a better one of the same class."""
    scores = logits.sigmoid().flatten()
    best = scores.topk(min(4 * MOST, len(scores))).indices
    tokens, labels = best // logits.shape[1], best % logits.shape[1]
    apart = labels[:, None] * (boxes.abs().amax() + 1) * 2  # boxes of different classes never meet
    kept = nms(boxes[tokens] + apart, scores[best], OVERLAP)[:MOST]
    return {"boxes": boxes[tokens][kept], "scores": scores[best][kept], "labels": labels[kept]}


def draw(model: nn.Module, data: DetectionData, recipe: DetectRecipe, folder: Path) -> list[Path]:
    """samples.png: test pictures with the true boxes above and the predicted ones below."""
    predictions, _ = next(predict_all(model, data, recipe, Process()))
    pictures = []
    for picture, found in zip(data.test.pictures.pictures[:DRAWN], predictions, strict=False):
        target, shown = picture.target(), found["scores"] >= SHOWN
        truth = {name: target[name] for name in ("boxes", "labels")}
        pictures.append((picture.pixels(), truth, {name: found[name][shown] for name in truth}))
    path = folder / "samples.png"
    draw_truth_and_prediction(pictures, data.classes, path)
    return [path]


def predict(
    model: nn.Module, data: DetectionData, recipe: DetectRecipe, files: Sequence[Path], folder: Path, process: Process
) -> list[dict[str, Any]]:
    """The objects in picture files: class, score and box in the file's pixels, drawn on a copy in `folder`."""
    results = []
    for place, file in enumerate(files):
        pixels = read_pixels(file)
        none: Mapping[str, Tensor] = {"boxes": torch.zeros(0, 4), "area": torch.zeros(0)}
        image, target = fit(pixels, none, **recipe.sizes)
        found = find(model, image[None].to(process.device), target["size"][None], recipe)[0]
        shown = found["scores"] >= SHOWN
        corners = (found["boxes"] / target["scale"])[shown]
        names = [data.classes[i] for i in found["labels"][shown]]
        scores = found["scores"][shown].tolist()
        words = [f"{name} {score:.2f}" for name, score in zip(names, scores, strict=True)]
        path = folder / f"{place:03d}-{file.stem}.png"
        draw_annotated(path, pixels, corners, words)
        objects = [
            {"class": name, "score": round(score, 4), "box": [round(value, 2) for value in box]}
            for name, score, box in zip(names, scores, corners.tolist(), strict=True)
        ]
        results.append({"file": str(file), "picture": path.name, "objects": objects})
    return results


def describe(recipe: DetectRecipe, data: DetectionData) -> str:
    """What the model was trained on, for the report."""
    names = ", ".join(data.classes[:12]) + " …" * (len(data.classes) > 12)
    text = f"{recipe.mixer} in the encoder of a detector, on {data.name}: {len(data.train):,} training pictures and "
    return text + f"{len(data.test):,} test pictures, {len(data.classes)} classes ({names})."
