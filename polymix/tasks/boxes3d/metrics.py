"""NDS, mAP and the errors of true positives, and predictions in the formats of nuScenes and KITTI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from polymix._io import output_names
from polymix.mixers.spec import parse_mixer
from polymix.models.points.center_head import decode
from polymix.models.points.rotated import corners
from polymix.tasks.boxes3d import kitti, nuscenes
from polymix.tasks.boxes3d.data import BoxData
from polymix.tasks.boxes3d.drawing import PREDICTION, TRUTH, draw_scans
from polymix.tasks.boxes3d.recipe import Boxes3dRecipe
from polymix.tasks.boxes3d.score import ERRORS, Sample, detection_score, in_range
from polymix.tasks.label_maps import some_of
from polymix.tasks.processes import Process
from polymix.tasks.turnable import Boxes, Scene, write_page

DIRECTIONS = {"NDS": "up", "mAP": "up"} | dict.fromkeys(ERRORS, "down")
DRAWN = 3  # test scans
SHOWN = 0.3  # the lowest score of a box in pictures and in `polymix predict`'s counts
PAPER: Mapping[str, Mapping[str, Any]] = {
    "softmax": {"NDS": 0.711, "mAP": 0.664, "source": "PADRe, Table 4: nuScenes, validation"},
    "padre:degree=2": {"NDS": 0.711, "mAP": 0.660, "source": "PADRe, Table 4: nuScenes, validation"},
}


def paper(recipe: Boxes3dRecipe) -> dict[str, Any] | None:
    """What the PADRe paper reports for this mixer on nuScenes; None for other mixers, and for plans."""
    mixer = parse_mixer(recipe.mixer)[1]
    rows = (row for name, row in PAPER.items() if parse_mixer(name)[1] == mixer)
    row = next(rows, None) if recipe.plan is None else None
    return None if row is None else dict(row)


def measure(model: nn.Module, data: BoxData, recipe: Boxes3dRecipe, process: Process) -> dict[str, float]:
    """NDS, mAP and the five errors on the test scans; without velocities, as in KITTI, mAP and the errors it has."""
    return _score(model, data, recipe, process)[0]


def details(model: nn.Module, data: BoxData, recipe: Boxes3dRecipe, process: Process) -> dict[str, Any]:
    """The metrics, and AP by distance and the errors of each class."""
    metrics, rows = _score(model, data, recipe, process)
    return {"metrics": metrics, "classes": rows, "count": len(data.test), "unit": "scans"}


def _score(
    model: nn.Module, data: BoxData, recipe: Boxes3dRecipe, process: Process
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    truths, found = [], []
    names = numpy.array(data.classes)
    for place in range(len(data.test)):
        objects = data.test.objects(place)
        true = Sample(objects.boxes.astype(float), names[objects.labels], numpy.array(objects.attributes, dtype=str))
        truths.append(in_range(true, objects.points))
        row = find_boxes(model, data.test.points(place), recipe, process)
        boxes, mine = row["boxes"].double().numpy(), names[row["labels"].numpy()]
        speeds = numpy.hypot(boxes[:, 7], boxes[:, 8])
        told = [nuscenes.attribute_of(str(name), speed) for name, speed in zip(mine, speeds, strict=True)]
        found.append(in_range(Sample(boxes, mine, numpy.array(told, dtype=str), row["scores"].double().numpy())))
    return detection_score(truths, found, data.classes)


def find_boxes(model: Any, points: Tensor, recipe: Boxes3dRecipe, process: Process) -> dict[str, Tensor]:
    """The boxes (n, 9) of one scan with scores and labels, the best first, on the CPU."""
    offsets = torch.tensor([0, len(points)])
    with torch.no_grad():
        found = model(points.to(process.device), offsets.to(process.device))
    return decode(found, model.head.group_of, model.extent, model.stride, most=recipe.most, least=recipe.least,
                  nms=recipe.nms, overlap=recipe.overlap, radius=(recipe.radius,))[0]  # fmt: skip


def draw(model: nn.Module, data: BoxData, recipe: Boxes3dRecipe, folder: Path) -> list[Path]:
    """predictions.png: some test scans from above and in perspective, with boxes; scan.html: the first, to turn."""
    rows, sets = [], []
    for place in some_of(len(data.test), DRAWN):
        points, true, labels = data.test[place]
        found = _shown(find_boxes(model, points, recipe, Process()))
        rows.append((points, true, found["boxes"]))
        sets.append({"truth": _boxes(true, labels, data.classes, TRUTH),
                     "prediction": _boxes(found["boxes"], found["labels"], data.classes, PREDICTION)})  # fmt: skip
    path = folder / "predictions.png"
    draw_scans(path, rows, recipe.space)
    return [path, write_page(folder / "scan.html", Scene(rows[0][0], boxes=sets[0]), "A test scan")]


def _boxes(boxes: Tensor, labels: Tensor, classes: Sequence[str], colour: str) -> Boxes:
    return Boxes(corners(boxes[:, :7]), [classes[k] for k in labels.tolist()], colour)


def _shown(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    kept = found["scores"] >= SHOWN
    return {name: value[kept] for name, value in found.items()}


def describe(recipe: Boxes3dRecipe, data: BoxData) -> str:
    """What the model was trained on, for the report."""
    sides = " × ".join(f"{side:g}" for side in recipe.voxel)
    return (
        f"{recipe.mixer_name} in DSVT with CenterPoint's head, on {data.name}: {len(data.train):,} training scans, "
        f"{len(data.test):,} test scans, {', '.join(data.classes)}, voxels of {sides} m."
    )


def predict(
    model: nn.Module, data: BoxData, recipe: Boxes3dRecipe, files: Sequence[Path], folder: Path, process: Process
) -> list[dict[str, Any]]:
    """The boxes in some scans: a .pcd.bin of nuScenes' keyframes, or a .bin of KITTI with calib/ beside its folder.

    nuScenes' scans go into one results_nusc.json, in the world's frame. For KITTI each scan has a NAME.txt in the
    format of its labels. Each result has the file, how many objects of each class score at least 0.3, a picture, and
    a page in which one can turn the scan.
    """
    rows, all_found = [], []
    opened: dict[Path, nuscenes.BoxTables] = {}
    for path, name in zip(files, output_names(files), strict=True):
        tables = data.layout == "nuscenes"
        frame = nuscenes.frame_at(path, recipe.sweeps, opened) if tables else kitti.frame_at(path)
        points = torch.from_numpy(frame.points())
        found = find_boxes(model, points, recipe, process)
        if tables:
            all_found.append((frame, found))
        else:
            kitti.write_labels(folder / f"{name}.txt", frame, found, data.classes)
        shown, picture = _shown(found), folder / f"{name}.png"
        draw_scans(picture, [(points, None, shown["boxes"])], recipe.space)
        boxes = {"prediction": _boxes(shown["boxes"], shown["labels"], data.classes, PREDICTION)}
        page = write_page(folder / f"{name}.html", Scene(points, boxes=boxes), path.name)
        counts = {name: int((shown["labels"] == k).sum()) for k, name in enumerate(data.classes)}
        rows.append({"file": str(path), "objects": counts, "picture": picture.name, "page": page.name,
                     "boxes": "results_nusc.json" if tables else f"{name}.txt"})  # fmt: skip
    if all_found:
        nuscenes.write_results(folder / "results_nusc.json", all_found, data.classes)
    return rows
