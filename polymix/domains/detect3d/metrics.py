"""NDS, mAP and the errors of true positives, and predictions in the formats of nuScenes and KITTI."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from polymix.domains.detect3d import kitti, nuscenes
from polymix.domains.detect3d.center_head import decode
from polymix.domains.detect3d.data import Detect3dData
from polymix.domains.detect3d.drawing import PREDICTION, TRUTH, draw_scans
from polymix.domains.detect3d.recipe import Detect3dRecipe
from polymix.domains.detect3d.rotated import corners
from polymix.domains.detect3d.score import Sample, detection_score, in_range
from polymix.files import output_names
from polymix.train.data.scans.page import Boxes, Pages, Scene
from polymix.train.data.scores import reaching, said_of
from polymix.train.data.splits import spread
from polymix.train.task import Process, Say

SCANS_DRAWN = 3


def score(
    model: nn.Module, data: Detect3dData, recipe: Detect3dRecipe, process: Process
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """NDS, mAP and the errors on the test scans, and a row for each class, without predictions of what is ignored."""
    truths, predictions = [], []
    names = numpy.array(data.classes)
    for place in range(len(data.test)):
        objects = data.test.objects(place)
        true = Sample(objects.boxes.astype(float), names[objects.labels], numpy.array(objects.attributes, dtype=str))
        truths.append(in_range(true, objects.points))
        row = find_boxes(model, data.test.points(place), recipe, process)
        boxes, mine = row["boxes"].double().numpy(), names[row["labels"].numpy()]
        speeds = numpy.hypot(boxes[:, 7], boxes[:, 8])
        attributes = [nuscenes.attribute_of(str(name), speed) for name, speed in zip(mine, speeds, strict=True)]
        scores = row["scores"].double().numpy()
        predicted = in_range(Sample(boxes, mine, numpy.array(attributes, dtype=str), scores))
        if objects.ignored is not None:
            counts = kitti.counted(predicted, true, objects.ignored, data.test.frames[place].calibration)
            predicted = Sample(*(part[counts] for part in predicted))
        predictions.append(predicted)
    return detection_score(truths, predictions, data.classes)


def find_boxes(model: Any, points: Tensor, recipe: Detect3dRecipe, process: Process) -> dict[str, Tensor]:
    """The boxes (n, 9) of one scan with scores and labels, the best first, on the CPU."""
    offsets = torch.tensor([0, len(points)])
    with torch.no_grad():
        output = model(points.to(process.device), offsets.to(process.device))
    return decode(output, model.head.group_of, model.extent, model.stride, most=recipe.most, least=recipe.least,
                  nms=recipe.nms, overlap=recipe.overlap, radius=recipe.radius)[0]  # fmt: skip


def draw(model: nn.Module, data: Detect3dData, recipe: Detect3dRecipe, folder: Path, say: Say) -> list[Path]:
    """predictions.png: some test scans from above and in perspective, with boxes; scan.html: the first, to turn."""
    scenes = []
    for place in spread(len(data.test), SCANS_DRAWN):
        points, true, labels = data.test[place]
        best = reaching(find_boxes(model, points, recipe, Process()), recipe.threshold)
        boxes = {"truth": _boxes(true, labels, data.classes, TRUTH),
                 "prediction": _boxes(best["boxes"], best["labels"], data.classes, PREDICTION)}  # fmt: skip
        scenes.append(Scene(points, boxes=boxes))
    path = folder / "predictions.png"
    draw_scans(path, scenes, recipe.space)
    return [path, *Pages(say).write(folder / "scan.html", scenes[0], "A test scan")]


def _boxes(boxes: Tensor, labels: Tensor, classes: Sequence[str], colour: str) -> Boxes:
    return Boxes(corners(boxes[:, :7]), [classes[k] for k in labels.tolist()], colour)


def predict(
    model: nn.Module, data: Detect3dData, recipe: Detect3dRecipe, files: Sequence[Path], folder: Path,
    process: Process, say: Say,
) -> list[dict[str, Any]]:  # fmt: skip
    """The boxes in some scans: a .pcd.bin of nuScenes' keyframes, or a .bin of KITTI with calib/ beside its folder.

    nuScenes' scans go into one results_nusc.json, in the world's frame. For KITTI each scan has a NAME.txt in the
    format of its labels; both have all boxes down to `least`. Each result has the file, how many objects of each class
    reach the threshold, a sentence about them, a picture, and a page in which one can turn the scan (None without
    plotly).
    """
    rows, predictions, pages = [], [], Pages(say)
    opened: dict[Path, nuscenes.BoxTables] = {}
    for path, name in zip(files, output_names(files), strict=True):
        tables = data.layout == "nuscenes"
        frame = nuscenes.frame_at(path, recipe.sweeps, opened) if tables else kitti.frame_at(path)
        points = torch.from_numpy(frame.points())
        objects = find_boxes(model, points, recipe, process)
        if tables:
            predictions.append((frame, objects))
        else:
            kitti.write_labels(folder / f"{name}.txt", frame, objects, data.classes)
        best, picture = reaching(objects, recipe.threshold), folder / f"{name}.png"
        boxes = {"prediction": _boxes(best["boxes"], best["labels"], data.classes, PREDICTION)}
        scene = Scene(points, boxes=boxes)
        draw_scans(picture, [scene], recipe.space)
        page = pages.write(folder / f"{name}.html", scene, path.name)
        counts = {name: int((best["labels"] == k).sum()) for k, name in enumerate(data.classes)}
        rows.append({"file": str(path), "answer": said_of(objects, data.classes, recipe.threshold), "objects": counts,
                     "picture": picture.name, "page": page[0].name if page else None,
                     "boxes": "results_nusc.json" if tables else f"{name}.txt"})  # fmt: skip
    if predictions:
        nuscenes.write_results(folder / "results_nusc.json", predictions, data.classes)
    return rows
