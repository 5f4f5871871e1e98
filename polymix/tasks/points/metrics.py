"""mIoU and accuracy on the original points, pictures from above, and predictions in SemanticKITTI's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from polymix._io import output_names, write_whole
from polymix.errors import DataError
from polymix.mixers.spec import parse_mixer
from polymix.tasks.label_maps import VOID_COLOUR, Confusion, colour_of, save_classes, shares_of, some_of
from polymix.tasks.points import lidarseg
from polymix.tasks.points.data import Cloud, PointData, Whole, too_wide
from polymix.tasks.points.layouts import KITTI, TO_KITTI, VOID, Scan
from polymix.tasks.points.pieces import RIM, pieces_of
from polymix.tasks.points.recipe import PointsRecipe
from polymix.tasks.processes import Process
from polymix.tasks.turnable import Colouring, Scene, write_page

DIRECTIONS = {"miou": "up", "accuracy": "up"}
DRAWN = 3  # test scans
# PoM, Section 4.4: SemanticKITTI's validation sequence. Attention is the authors' own run of PTv3.
PAPER: Mapping[str, Mapping[str, Any]] = {
    "softmax": {"miou": 0.672, "source": "PoM, Section 4.4: SemanticKITTI, validation"},
    "pom": {"miou": 0.666, "source": "PoM, Section 4.4: SemanticKITTI, validation"},
}


def paper(recipe: PointsRecipe) -> dict[str, Any] | None:
    """What the PoM paper reports for this mixer on SemanticKITTI; None for other mixers, and for plans."""
    row = PAPER.get(parse_mixer(recipe.mixer)[1].name) if recipe.plan is None else None
    return None if row is None else dict(row)


def measure(model: nn.Module, data: PointData, recipe: PointsRecipe, process: Process) -> dict[str, float]:
    """mIoU over the classes that occur and the share of points that are right, over all points of the test scans."""
    return _confusion(model, data, process).compute()


def details(model: nn.Module, data: PointData, recipe: PointsRecipe, process: Process) -> dict[str, Any]:
    """The metrics, and the IoU of each class that occurs."""
    confusion = _confusion(model, data, process)
    return {"metrics": confusion.named(data.classes), "count": len(data.test), "unit": "scans"}


def _confusion(model: nn.Module, data: PointData, process: Process) -> Confusion:
    confusion = Confusion(len(data.classes), VOID)
    for place in range(len(data.test)):
        points, classes = data.test.read(place)
        confusion.update(predict_points(model, points, data.test.recipe, process), torch.from_numpy(classes))
    return confusion


def predict_points(model: nn.Module, points: Any, recipe: PointsRecipe, process: Process) -> Tensor:
    """The class of every point (n,) of a scan, `piece` points at a time."""
    if len(points) <= recipe.piece:
        return predict_cloud(model, Cloud(points, None, recipe.voxel), process)
    found = torch.empty(len(points), dtype=torch.int64)
    whole = Whole.of(points, recipe.voxel)
    cells = numpy.floor(points[:, :3].astype(numpy.float64) / recipe.voxel).astype(numpy.int32)
    for own, around in pieces_of(cells, recipe.piece, RIM):
        chosen = numpy.sort(numpy.concatenate((own, around)))  # so that a voxel has the same first point
        predicted = predict_cloud(model, Cloud(points[chosen], None, recipe.voxel, whole=whole), process)
        found[torch.from_numpy(own)] = predicted[torch.from_numpy(numpy.searchsorted(chosen, own))]
    return found


def predict_cloud(model: nn.Module, cloud: Cloud, process: Process) -> Tensor:
    """The class of every point (n,) of a cloud: that of its voxel."""
    offsets = torch.tensor([0, len(cloud.grid)])
    with torch.no_grad():
        logits = model(*(value.to(process.device) for value in (cloud.features, cloud.grid, offsets)))
    return logits.argmax(1).cpu()[cloud.inverse]


def draw(model: nn.Module, data: PointData, recipe: PointsRecipe, folder: Path) -> list[Path]:
    """predictions.png: some test scans from above in true and predicted colours; scan.html: the first, to turn."""
    rows = []
    for place in some_of(len(data.test), DRAWN):
        points, classes = data.test.read(place)
        predicted = predict_points(model, points, data.test.recipe, Process()).numpy()
        rows.append((points, {"truth": classes, "prediction": predicted}))
    path = folder / "predictions.png"
    draw_from_above(path, rows, data.classes)
    return [path, write_page(folder / "scan.html", scene_of(*rows[0], data.classes), "A test scan")]


def scene_of(points: Any, found: Mapping[str, Any], classes: Sequence[str]) -> Scene:
    """A scan in the colours of its classes, once for each of `found`."""
    from matplotlib.colors import to_hex

    legend = {place: (name, to_hex(colour_of(place))) for place, name in enumerate(classes)} | {
        VOID: ("void", to_hex(VOID_COLOUR))
    }
    return Scene(points, {name: Colouring(labels, legend) for name, labels in found.items()})


def draw_from_above(path: Path, rows: Sequence[tuple[Any, Mapping[str, Any]]], classes: Sequence[str]) -> None:
    """A picture with a row for each scan: its points (n, 3 or more) from above, in the colours of some classes (n,)."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    titles = list(rows[0][1])
    figure = Figure(figsize=(4.2 * len(titles) + 1.6, 3.4 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), len(titles), squeeze=False)
    there: set[int] = set()
    for axes, (points, found) in zip(grid, rows, strict=True):
        upwards = numpy.argsort(points[:, 2], kind="stable")  # what is higher hides what is lower
        for place, (title, labels) in zip(axes, found.items(), strict=True):
            there |= set(numpy.unique(labels).tolist()) - {VOID}
            colours = [VOID_COLOUR if k == VOID else colour_of(int(k)) for k in labels[upwards]]
            place.scatter(points[upwards, 0], points[upwards, 1], s=0.6, c=colours, linewidths=0)
            place.set_aspect("equal")
            place.set_title(title, fontsize=9)
            place.set_axis_off()
    figure.legend(handles=[Patch(color=colour_of(k), label=classes[k]) for k in sorted(there)],
                  loc="outside right center", frameon=False, fontsize=8)  # fmt: skip
    write_whole(path, lambda part: figure.savefig(part, dpi=130, format="png"))


def describe(recipe: PointsRecipe, data: PointData) -> str:
    """What the model was trained on, for the report."""
    sizes = dict.fromkeys("whole clouds" if size is None else f"windows of {size}" for size in recipe.windows())
    window = " and ".join(sizes)
    return (
        f"{recipe.mixer_name} in PTv3, on {data.name}: {len(data.train):,} training scans, {len(data.test):,} test "
        f"scans, {len(data.classes)} classes, voxels of {recipe.voxel} m, {window}."
    )


def predict(
    model: nn.Module, data: PointData, recipe: PointsRecipe, files: Sequence[Path], folder: Path, process: Process
) -> list[dict[str, Any]]:
    """The class of every point of some scans: a .bin file of SemanticKITTI, a .pcd.bin of nuScenes, or a folder of
    Pointcept's arrays.

    Each result has the file, the share of each class, a picture from above, a page in which one can turn the scan, and
    the classes: NAME.label in SemanticKITTI's numbers for a .bin file; for a model of nuScenes-lidarseg
    TOKEN_lidarseg.bin with a byte a point, 1 to 16; else NAME-classes.npy. See `output_names` for files of one name.
    """
    rows: list[dict[str, Any]] = []
    opened: dict[Path, dict[str, str]] = {}
    for path, name in zip(files, output_names(files), strict=True):
        binary = "nuscenes" if data.classes == lidarseg.CLASSES else "semantickitti"
        layout = "pointcept" if path.is_dir() else binary
        points = Scan(path, layout, None).points()
        if points.shape[1] != data.inputs:
            got = f"{path} with {points.shape[1]} numbers a point"
            raise DataError("files", got, f"{data.inputs}, as in training", "Pass scans of the same kind.")
        if wide := too_wide(path, points, recipe.voxel):
            raise DataError("files", wide[0], "a scan that is not as wide", "Remove far points.")
        predicted = predict_points(model, points, recipe, process)
        if layout == "nuscenes":
            output = folder / lidarseg.output_of(path, opened)
            write_whole(output, (predicted.numpy() + 1).astype(numpy.uint8).tobytes())
        elif layout == "semantickitti" and data.classes == KITTI:
            output = folder / f"{name}.label"
            write_whole(output, numpy.array(TO_KITTI, dtype=numpy.uint32)[predicted.numpy()].tobytes())
        else:
            output = folder / f"{name}-classes.npy"
            save_classes(output, predicted)
        picture = folder / f"{name}.png"
        found = {"prediction": predicted.numpy()}
        draw_from_above(picture, [(points, found)], data.classes)
        page = write_page(folder / f"{name}.html", scene_of(points, found, data.classes), path.name)
        shares = shares_of(predicted, data.classes)
        rows.append({"file": str(path), "largest": max(shares, key=lambda name: shares[name]), "points": len(points),
                     "picture": picture.name, "page": page.name, "classes": output.name, "shares": shares})  # fmt: skip
    return rows
