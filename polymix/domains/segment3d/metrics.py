"""mIoU and accuracy on the original points, pictures from above, and predictions in SemanticKITTI's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from polymix.domains.segment3d import lidarseg
from polymix.domains.segment3d.data import Cloud, Segment3dData, Whole, check_width
from polymix.domains.segment3d.layouts import KITTI, TO_KITTI, VOID, Scan
from polymix.domains.segment3d.pieces import RIM, pieces_of
from polymix.domains.segment3d.recipe import Segment3dRecipe
from polymix.errors import DataError
from polymix.files import output_names, write_whole
from polymix.train.data.drawing import save_figure
from polymix.train.data.label_maps import VOID_COLOUR, Confusion, colour_of, save_classes, shares_of
from polymix.train.data.scans.page import Colouring, Pages, Scene
from polymix.train.data.splits import spread
from polymix.train.published import published as published_figures
from polymix.train.task import Process, Say

SCANS_DRAWN = 3
TEST_SCANS = 4071  # of SemanticKITTI
TEST_ROOMS = 312  # of ScanNet
SIZES = ("depths", "channels", "heads", "decoder_depths", "decoder_channels", "decoder_heads", "window", "whole", "cpe")


def published(recipe: Segment3dRecipe) -> dict[str, Any] | None:
    """What the PoM paper reports for this mixer in PTv3 on SemanticKITTI or ScanNet; None for other data and sizes."""
    its_host = all(getattr(recipe, name) == recipe.presets["paper"][name] for name in SIZES)
    data = "SemanticKITTI" if is_semantic_kitti(recipe.data) else "ScanNet" if is_scannet(recipe.data) else None
    if not its_host or data is None:
        return None
    return published_figures("segment3d", data=data, split="validation", host="PTv3", mixer=recipe.mixer_name)


def is_scannet(folder: str | None) -> bool:
    """Whether a folder is ScanNet of 20 classes itself, by the names and the number of its test rooms."""
    rooms = () if folder is None else (Path(folder) / "val").glob("scene????_??/segment20.npy")
    return sum(1 for _ in rooms) == TEST_ROOMS


def is_semantic_kitti(folder: str | None) -> bool:
    """Whether a folder is SemanticKITTI itself, by the number of its test scans."""
    scans = () if folder is None else (Path(folder) / "sequences/08/velodyne").glob("*.bin")
    return sum(1 for _ in scans) == TEST_SCANS


def confusion(model: nn.Module, data: Segment3dData, process: Process) -> Confusion:
    """Counts of (true, predicted) classes over all points of the test scans."""
    counts = Confusion(len(data.classes), VOID)
    for place in range(len(data.test)):
        points, classes = data.test.read(place)
        predicted = predict_points(model, points, data.test.recipe, process)
        counts.update(predicted, torch.from_numpy(classes))
    return counts


def predict_points(model: nn.Module, points: Any, recipe: Segment3dRecipe, process: Process) -> Tensor:
    """The class of every point (n,) of a scan, `piece` points at a time."""
    if len(points) <= recipe.piece:
        return predict_cloud(model, Cloud(points, None, recipe.voxel, recipe.coordinates), process)
    classes = torch.empty(len(points), dtype=torch.int64)
    whole = Whole.of(points, recipe.voxel)
    cells = numpy.floor(points[:, :3].astype(numpy.float64) / recipe.voxel).astype(numpy.int32)
    for own, around in pieces_of(cells, recipe.piece, RIM):
        chosen = numpy.sort(numpy.concatenate((own, around)))  # so that a voxel has the same first point
        cloud = Cloud(points[chosen], None, recipe.voxel, recipe.coordinates, whole=whole)
        predicted = predict_cloud(model, cloud, process)
        classes[torch.from_numpy(own)] = predicted[torch.from_numpy(numpy.searchsorted(chosen, own))]
    return classes


def predict_cloud(model: nn.Module, cloud: Cloud, process: Process) -> Tensor:
    """The class of every point (n,) of a cloud: that of its voxel."""
    offsets = torch.tensor([0, len(cloud.grid)])
    with torch.no_grad():
        logits = model(*(value.to(process.device) for value in (cloud.features, cloud.grid, offsets)))
    return logits.argmax(1).cpu()[cloud.inverse]


def draw(model: nn.Module, data: Segment3dData, folder: Path, say: Say) -> list[Path]:
    """predictions.png: some test scans from above in true and predicted colours; scan.html: the first, to turn."""
    rows = []
    for place in spread(len(data.test), SCANS_DRAWN):
        points, classes = data.test.read(place)
        predicted = predict_points(model, points, data.test.recipe, Process()).numpy()
        rows.append((points, {"truth": classes, "prediction": predicted}))
    path = folder / "predictions.png"
    draw_from_above(path, rows, data.classes)
    return [path, *Pages(say).write(folder / "scan.html", scene_of(*rows[0], data.classes), "A test scan")]


def scene_of(points: Any, colourings: Mapping[str, Any], classes: Sequence[str]) -> Scene:
    """A scan in the colours of its classes, once for each of the colourings, classes (n,) by name."""
    from matplotlib.colors import to_hex

    legend = {place: (name, to_hex(colour_of(place))) for place, name in enumerate(classes)} | {
        VOID: ("void", to_hex(VOID_COLOUR))
    }
    return Scene(points, {name: Colouring(labels, legend) for name, labels in colourings.items()})


def draw_from_above(path: Path, rows: Sequence[tuple[Any, Mapping[str, Any]]], classes: Sequence[str]) -> None:
    """A picture with a row for each scan: its points (n, 3 or more) from above, in the colours of some classes (n,)."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    titles = list(rows[0][1])
    figure = Figure(figsize=(4.2 * len(titles) + 1.6, 3.4 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), len(titles), squeeze=False)
    there: set[int] = set()
    for axes, (points, colourings) in zip(grid, rows, strict=True):
        upwards = numpy.argsort(points[:, 2], kind="stable")  # what is higher hides what is lower
        for place, (title, labels) in zip(axes, colourings.items(), strict=True):
            there |= set(numpy.unique(labels).tolist()) - {VOID}
            colours = [VOID_COLOUR if k == VOID else colour_of(int(k)) for k in labels[upwards]]
            place.scatter(points[upwards, 0], points[upwards, 1], s=0.6, c=colours, linewidths=0)
            place.set_aspect("equal")
            place.set_title(title, fontsize=9)
            place.set_axis_off()
    figure.legend(handles=[Patch(color=colour_of(k), label=classes[k]) for k in sorted(there)],
                  loc="outside right center", frameon=False, fontsize=8)  # fmt: skip
    save_figure(path, figure)


def predict(
    model: nn.Module, data: Segment3dData, recipe: Segment3dRecipe, files: Sequence[Path], folder: Path,
    process: Process, say: Say,
) -> list[dict[str, Any]]:  # fmt: skip
    """The class of every point of some scans: a .bin file of SemanticKITTI, a .pcd.bin of nuScenes, or a folder of
    Pointcept's arrays.

    Each result has the file, the share of each class, a picture from above, a page in which one can turn the scan
    (None without plotly), and the classes: NAME.label in SemanticKITTI's numbers for a .bin file; for a model of
    nuScenes-lidarseg TOKEN_lidarseg.bin with a byte a point, 1 to 16; else NAME-classes.npy. See `output_names` for
    files of one name.
    """
    rows: list[dict[str, Any]] = []
    opened: dict[Path, dict[str, str]] = {}
    pages = Pages(say)
    for path, name in zip(files, output_names(files), strict=True):
        binary = "nuscenes" if data.classes == lidarseg.CLASSES else "semantickitti"
        layout = "pointcept" if path.is_dir() else binary
        points = Scan(path, layout, None).points()
        if points.shape[1] != data.inputs:
            got = f"{path} with {points.shape[1]} numbers a point"
            raise DataError("files", got, f"{data.inputs}, as in training", "Pass scans of the same kind.")
        check_width(path, points, recipe.voxel, "files")
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
        colourings = {"prediction": predicted.numpy()}
        draw_from_above(picture, [(points, colourings)], data.classes)
        written = pages.write(folder / f"{name}.html", scene_of(points, colourings, data.classes), path.name)
        shares = shares_of(predicted, data.classes)
        rows.append({"file": str(path), "largest": max(shares, key=lambda name: shares[name]), "points": len(points),
                     "picture": picture.name, "page": written[0].name if written else None,
                     "classes": output.name, "shares": shares})  # fmt: skip
    return rows
