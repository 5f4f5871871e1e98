"""Average precision of boxes and masks, and pictures of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from polymix.tasks.boxes.data import DetectionData
from polymix.tasks.boxes.detectors import block_in_words
from polymix.tasks.boxes.drawing import draw_annotated, draw_truth_and_prediction
from polymix.tasks.boxes.masks import encode
from polymix.tasks.boxes.pictures import read_pixels
from polymix.tasks.boxes.precision import average_precision
from polymix.tasks.instances.recipe import InstancesRecipe
from polymix.tasks.processes import Process

HEADLINES = ("mask_AP", "mask_AP50", "mask_AP75", "AP", "AP50", "AP75")
DIRECTIONS = dict.fromkeys(HEADLINES, "up")
SHOWN = 0.3  # the lowest score of an object in pictures
# AP of masks and of boxes on COCO, by the mixer's name (Poly-NL, Tables 1b and 2a).
PAPER = {
    "none": (0.346, 0.379), "poly_nl": (0.354, 0.392), "non_local": (0.354, 0.388), "se": (0.348, 0.381),
    "gc": (0.352, 0.388), "efficient": (0.354, 0.389), "tesa": (0.354, 0.395), "latent_gnn": (0.353, 0.389),
}  # fmt: skip
DRAWN = 6  # test pictures


def paper(recipe: InstancesRecipe) -> dict[str, Any] | None:
    """What Poly-NL's paper reports for this block on COCO; None for other detectors, data and blocks."""
    published = (recipe.detector, recipe.backbone) == ("published", "resnet50") and not recipe.makes_data
    row = PAPER.get(recipe.mixer.partition(":")[0]) if published else None
    return None if row is None else {"mask_AP": row[0], "AP": row[1], "source": "Poly-NL, Tables 1b and 2a: COCO"}


def measure(model: nn.Module, data: DetectionData, recipe: InstancesRecipe, process: Process) -> dict[str, float]:
    """AP of masks and of boxes on the test pictures."""
    found = details(model, data, recipe, process)["metrics"]
    return {name: found[name] for name in HEADLINES}


def details(model: nn.Module, data: DetectionData, recipe: InstancesRecipe, process: Process) -> dict[str, Any]:
    """All of COCO's figures for masks and boxes, in the pixels of the fitted pictures."""
    found, targets = [], []
    for place in range(len(data.test)):
        image, target = data.test[place]
        found.append(objects(model, image, process))
        targets.append(target)
    figures = average_precision(found, targets, masks=True)
    rows = [{"name": data.classes[place], "AP": ap} for place, ap in figures.pop("classes").items() if place >= 0]
    return {"metrics": figures, "classes": rows}


def objects(model: nn.Module, image: Tensor, process: Process) -> dict[str, Tensor]:
    """Boxes, scores, labels from 0 and masks (k, H, W) of one picture of bytes, on the CPU."""
    (found,) = model([image.to(process.device).float() / 255])
    return {"boxes": found["boxes"].cpu(), "scores": found["scores"].cpu(), "labels": found["labels"].cpu() - 1,
            "masks": found["masks"][:, 0].cpu() > 0.5}  # fmt: skip


def draw(model: nn.Module, data: DetectionData, recipe: InstancesRecipe, folder: Path) -> list[Path]:
    """samples.png: test pictures with the true masks above and the predicted ones below."""
    pictures = []
    for place in range(min(DRAWN, len(data.test))):
        image, truth = data.test[place]
        found = objects(model, image, Process())
        shown = found["scores"] >= SHOWN
        pictures.append((image, truth, {name: value[shown] for name, value in found.items()}))
    path = folder / "samples.png"
    draw_truth_and_prediction(pictures, data.classes, path)
    return [path]


def predict(
    model: nn.Module,
    data: DetectionData,
    recipe: InstancesRecipe,
    files: Sequence[Path],
    folder: Path,
    process: Process,
) -> list[dict[str, Any]]:
    """The objects in picture files: class, score, box and mask (RLE) in the file's pixels, drawn on a copy."""
    results = []
    for place, file in enumerate(files):
        pixels = read_pixels(file)
        found = objects(model, pixels, process)
        found = {name: value[found["scores"] >= SHOWN] for name, value in found.items()}
        names = [data.classes[i] for i in found["labels"]]
        scores = found["scores"].tolist()
        words = [f"{name} {score:.2f}" for name, score in zip(names, scores, strict=True)]
        path = folder / f"{place:03d}-{file.stem}.png"
        draw_annotated(path, pixels, found["boxes"], words, found["masks"])
        parts = zip(names, scores, found["boxes"].tolist(), found["masks"], strict=True)
        rows = [{"class": name, "score": round(score, 4), "box": [round(v, 2) for v in box], "mask": encode(mask)}
                for name, score, box, mask in parts]  # fmt: skip
        results.append({"file": str(file), "picture": path.name, "objects": rows})
    return results


def describe(recipe: InstancesRecipe, data: DetectionData) -> str:
    """What the model was trained on, for the report."""
    text = f"Mask R-CNN {block_in_words(recipe.mixer)}, on {data.name}: {len(data.train):,} training "
    return text + f"pictures and {len(data.test):,} test pictures, {len(data.classes)} classes."
