"""Scans for training: keyframes that are read from disk one at a time, packed without padding."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset

from polymix.errors import DataError, check_choice
from polymix.tasks.boxes3d import kitti, nuscenes
from polymix.tasks.boxes3d.frames import Frame, Objects
from polymix.tasks.boxes3d.made import made
from polymix.tasks.boxes3d.recipe import Boxes3dRecipe
from polymix.tasks.nuscenes_tables import version_of

__all__ = ["LAYOUTS", "BoxData", "Frames", "check", "for_evaluation", "from_summary", "load", "made"]
LAYOUTS = ("nuscenes", "kitti")
READERS: Mapping[str, Any] = {"nuscenes": nuscenes, "kitti": kitti}
MADE = "drives of a made LiDAR"
UNUSED = 1  # training drives that an evaluation makes beside its test drives
Sample = tuple[Tensor, Tensor, Tensor]


class Frames(Dataset[Sample]):
    """Labelled keyframes as points (n, 5), boxes (m, 9) and classes (m,); with `varied` turned and scaled anew.

    Boxes without points are left out: nobody can find them.
    """

    def __init__(self, frames: Sequence[Frame], recipe: Boxes3dRecipe, classes: Sequence[int], varied: bool) -> None:
        self.frames, self.recipe, self.classes, self.varied = list(frames), recipe, list(classes), varied
        self.kept: dict[int, Any] | None = None

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, place: int) -> Sample:
        objects = self.objects(place)
        seen = torch.from_numpy(objects.points > 0)
        points, boxes = self.points(place), torch.from_numpy(objects.boxes)[seen]
        if self.varied:
            points, boxes = self._vary(points, boxes)
        return points, boxes, torch.from_numpy(objects.labels)[seen]

    def points(self, place: int) -> Tensor:
        """The points (n, 5) of a keyframe."""
        return torch.from_numpy(self.frames[place].points() if self.kept is None else self.kept[place])

    def objects(self, place: int) -> Objects:
        """The boxes of a keyframe whose classes the model knows, with labels of the model."""
        found: Any = self.frames[place].objects
        known = numpy.isin(found.labels, self.classes)
        labels = numpy.array([self.classes.index(k) for k in found.labels[known].tolist()], dtype=numpy.int64)
        names = [name for name, kept in zip(found.attributes, known, strict=True) if kept]
        return Objects(found.boxes[known], labels, names, found.points[known])

    def keep_all(self) -> None:
        """Read all points into memory, as their files are about to go."""
        self.kept = {place: frame.points() for place, frame in enumerate(self.frames)}

    def _vary(self, points: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
        recipe, chance = self.recipe, torch.rand(4)
        angle = math.radians(recipe.turn) * (2 * float(chance[0]) - 1)
        size = 1 + recipe.scale * (2 * float(chance[1]) - 1)
        cos, sin = math.cos(angle), math.sin(angle)
        turn = torch.tensor([[cos, sin], [-sin, cos]])
        points, boxes = points.clone(), boxes.clone()
        points[:, :2], boxes[:, :2], boxes[:, 7:9] = points[:, :2] @ turn, boxes[:, :2] @ turn, boxes[:, 7:9] @ turn
        boxes[:, 6] += angle
        if recipe.flip and chance[2] < 0.5:  # left and right
            for values in (points[:, 1], boxes[:, 1], boxes[:, 8], boxes[:, 6]):
                values.neg_()
        if recipe.flip and chance[3] < 0.5:  # front and back
            for values in (points[:, 0], boxes[:, 0], boxes[:, 7]):
                values.neg_()
            boxes[:, 6] = math.pi - boxes[:, 6]
        points[:, :3] *= size
        boxes[:, :6] *= size
        boxes[:, 7:9] *= size
        return points, boxes


@dataclass(frozen=True)
class BoxData:
    """Keyframes to train on and to test on, and the classes that occur."""

    name: str
    layout: str
    classes: tuple[str, ...]
    train: Frames
    test: Frames

    def collate(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
        """Packed points (n, 5), offsets (B + 1,), and boxes and classes of each scan."""
        offsets = torch.tensor([0, *(len(points) for points, _, _ in samples)]).cumsum(0)
        return torch.cat([points for points, _, _ in samples]), offsets, [(boxes, k) for _, boxes, k in samples]

    def fingerprint(self) -> list[Any]:
        """The number of training keyframes and a checksum of 16 of them and of their boxes."""
        frames, crc = self.train.frames, 0
        for place in range(16):
            frame = frames[len(frames) * place // 16]
            objects: Any = frame.objects
            crc = zlib.crc32(objects.boxes.tobytes(), zlib.crc32(frame.path.read_bytes(), crc))
        return [len(frames), crc]

    def summary(self) -> dict[str, Any]:
        """What a saved model needs, and how many keyframes there were."""
        return {"name": self.name, "layout": self.layout, "classes": list(self.classes), "train": len(self.train),
                "test": len(self.test)}  # fmt: skip


def load(recipe: Boxes3dRecipe, folder: Path, say: Callable[[str], None]) -> BoxData:
    """The keyframes of a recipe: the default data, which it makes in `folder` as nuScenes' tables, or --data.

    Raises DataError with the first mistake in tables, labels and names of files; points are read as they are needed.
    """
    source = folder / "boxes3d" if recipe.data is None else Path(recipe.data)
    if recipe.data is None:
        made(source, recipe.seed, recipe.scenes, recipe.test_scenes, recipe.sweeps)
        say(f"Made drives, in the layout of nuScenes: {source}")
    problems: list[str] = []
    layout, train, test = _find(source, recipe.layout, recipe.sweeps, problems)
    if problems:
        raise DataError.first_of(problems)
    there = sorted({int(k) for frame in train if frame.objects for k in frame.objects.labels})
    classes = tuple(READERS[layout].CLASSES[k] for k in there)
    name = MADE if recipe.data is None else str(recipe.data)
    return BoxData(name, layout, classes, Frames(train, recipe, there, True), Frames(test, recipe, there, False))


def check(folder: str | Path, layout: str | None = None, sweeps: int = 1) -> list[str]:
    """All mistakes in a data set, each a line that names file and entry. Every file is read.

    sweeps: how many scans are joined to a keyframe.
    """
    problems: list[str] = []
    try:
        _, train, test = _find(Path(folder), layout, sweeps, problems)
    except DataError as error:
        return [str(error.got)]
    for frame in (*train, *test):
        try:
            frame.points()
        except DataError as error:
            problems.append(str(error.got))
    return problems


def layout_of(folder: Path, layout: str | None) -> str:
    """The layout of a folder, by its files unless it is given. Raises DataError for a folder of none."""
    if layout is not None:
        check_choice("layout", layout, LAYOUTS)
    if not folder.is_dir():
        raise DataError("data", f"{folder}, which is no folder", "a folder of scans", "Check the path.")
    tables, scans = version_of(folder) is not None, (folder / "training" / "velodyne").is_dir()
    found = "nuscenes" if tables else "kitti" if scans else None
    if found is None or layout not in (None, found):
        got = f"{folder} without {'training/velodyne/' if layout == 'kitti' else 'v1.*/'}"
        raise DataError("data", got, "v1.*/*.json, or training/velodyne/*.bin", "Check the path.")
    return found


def _find(folder: Path, layout: str | None, sweeps: int, problems: list[str]) -> tuple[str, list[Frame], list[Frame]]:
    layout = layout_of(folder, layout)
    train, test = READERS[layout].find(folder, sweeps, problems.append)
    for part, frames in (("training", train), ("test", test)):
        counted = sum(int((frame.objects.points > 0).sum()) for frame in frames if frame.objects)
        if not counted and not problems:
            problems.append(f"{folder}: the {part} scans have no box with a point in it")
    return layout, train, test


def for_evaluation(
    recipe: Boxes3dRecipe, summary: Mapping[str, Any], whole: bool, limit: int | None, say: Callable[[str], None]
) -> BoxData:
    """Keyframes to measure a trained model on. Raises DataError where none of its classes occurs."""
    if recipe.data is None and not whole:
        recipe = replace(recipe, scenes=min(recipe.scenes, UNUSED))
    with TemporaryDirectory() as scratch:
        data = load(recipe, Path(scratch), say)
        known = from_summary(recipe, summary)
        if data.layout != known.layout:
            got, allowed = f"{data.name} in the layout of {data.layout}", f"{known.layout}, as in training"
            raise DataError("data", got, allowed, "Evaluate on data of the same kind.")
        frames = [*data.train.frames, *data.test.frames] if whole else data.test.frames
        test = Frames(frames[:limit], recipe, known.test.classes, False)
        if recipe.data is None:
            test.keep_all()
    return replace(known, name=data.name, train=data.train, test=test)


def from_summary(recipe: Boxes3dRecipe, summary: Mapping[str, Any]) -> BoxData:
    """The data of a finished run without its keyframes: what building its model needs."""
    layout, classes = str(summary["layout"]), tuple(summary["classes"])
    none = Frames((), recipe, [READERS[layout].CLASSES.index(name) for name in classes], False)
    return BoxData(str(summary["name"]), layout, classes, none, none)
