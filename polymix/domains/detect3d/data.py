"""Scans for training: keyframes that are read from disk one at a time, packed without padding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset

from polymix.domains.detect3d import kitti, nuscenes
from polymix.domains.detect3d.frames import Frame, Objects
from polymix.domains.detect3d.recipe import Detect3dRecipe
from polymix.domains.detect3d.synthetic import NAME, synthetic
from polymix.errors import DataError, check_choice
from polymix.train.data.problems import Problems
from polymix.train.data.sampling import number
from polymix.train.data.scans.nuscenes_tables import version_of
from polymix.train.data.splits import checksum_of, spread
from polymix.train.data.synthetic import cached
from polymix.train.task import Data

LAYOUTS = ("nuscenes", "kitti")
READERS: Mapping[str, Any] = {"nuscenes": nuscenes, "kitti": kitti}
UNUSED_SCENES = 1  # training drives that are written where only the test drives are measured
Sample = tuple[Tensor, Tensor, Tensor]


class Frames(Dataset[Sample]):
    """Labelled keyframes as points (n, 5), boxes (m, 9) and classes (m,); with `varied` turned and scaled anew.

    Boxes without points are left out: nobody can find them.
    """

    def __init__(self, frames: Sequence[Frame], recipe: Detect3dRecipe, classes: Sequence[int], varied: bool) -> None:
        self.frames, self.recipe, self.classes, self.varied = list(frames), recipe, list(classes), varied
        self.in_memory: dict[int, Any] | None = None

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
        return torch.from_numpy(self.frames[place].points() if self.in_memory is None else self.in_memory[place])

    def objects(self, place: int) -> Objects:
        """The boxes of a keyframe whose classes the model knows, with labels of the model."""
        objects: Any = self.frames[place].objects
        known = numpy.isin(objects.labels, self.classes)
        labels = numpy.array([self.classes.index(k) for k in objects.labels[known].tolist()], dtype=numpy.int64)
        names = [name for name, is_known in zip(objects.attributes, known, strict=True) if is_known]
        return Objects(objects.boxes[known], labels, names, objects.points[known], objects.ignored)

    def keep_all(self) -> None:
        """Read all points into memory, as their files are about to go."""
        self.in_memory = {place: frame.points() for place, frame in enumerate(self.frames)}

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
        if recipe.move:
            away = recipe.move * torch.randn(3)
            points[:, :3], boxes[:, :3] = points[:, :3] + away, boxes[:, :3] + away
        return points, boxes


@dataclass(frozen=True)
class Detect3dData(Data):
    """Keyframes to train on and to test on, and the classes that occur."""

    name: str
    layout: str
    classes: tuple[str, ...]
    train: Frames
    test: Frames

    def groups(self) -> list[int]:
        """How many of the classes each group of the head has."""
        sizes = [sum(name in group for name in self.classes) for group in READERS[self.layout].GROUPS]
        return [size for size in sizes if size]

    def collate(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
        """Packed points (n, 5), offsets (B + 1,), and boxes and classes of each scan."""
        offsets = torch.tensor([0, *(len(points) for points, _, _ in samples)]).cumsum(0)
        return torch.cat([points for points, _, _ in samples]), offsets, [(boxes, k) for _, boxes, k in samples]

    def fingerprint(self) -> list[Any]:
        """The number of training keyframes and a checksum of 16 of them and of their boxes."""
        frames = self.train.frames

        def contents() -> Iterator[bytes]:
            for place in spread(len(frames), 16):
                objects: Any = frames[place].objects
                yield frames[place].path.read_bytes()
                yield objects.boxes.tobytes()

        return [len(frames), checksum_of(contents())]

    def summary(self) -> dict[str, Any]:
        """What a saved model needs, and how many keyframes there were."""
        return {"name": self.name, "layout": self.layout, "classes": list(self.classes), "train": len(self.train),
                "test": len(self.test)}  # fmt: skip


def load(recipe: Detect3dRecipe, folder: Path, say: Callable[[str], None]) -> Detect3dData:
    """The keyframes of --data, or the default ones, which are written below `folder` as nuScenes has them.

    Raises DataError with the first mistake in tables, labels and names of files; points are read as they are needed.
    """
    if recipe.data is None:
        settings: dict[str, Any] = {"seed": recipe.seed, "scenes": recipe.scenes, "test_scenes": recipe.test_scenes,
                                    "sweeps": recipe.sweeps, "question": recipe.question}  # fmt: skip
        source = cached(folder, "detect3d", settings, lambda place: synthetic(place, **settings))
        say(f"Synthetic {NAME}, in the layout of nuScenes: {source}")
    else:
        source = Path(recipe.data)
    problems = Problems()
    layout, train, test = read(source, recipe.layout, recipe.sweeps, problems)
    problems.settle()
    occurring = sorted({int(k) for frame in train if frame.objects for k in frame.objects.labels})
    classes = tuple(READERS[layout].CLASSES[k] for k in occurring)
    name = NAME if recipe.data is None else str(recipe.data)
    train = balanced(train, recipe.seed) if recipe.balanced else train
    parts = Frames(train, recipe, occurring, varied=True), Frames(test, recipe, occurring, varied=False)
    return Detect3dData(name, layout, classes, *parts)


def balanced(frames: Sequence[Frame], seed: int) -> list[Frame]:
    """Keyframes drawn with replacement, as many from those with each class, as many in all as `frames` has pairs of a
    keyframe and a class in it. Source: Zhu et al. 2019 (CBGS); OpenPCDet's BALANCED_RESAMPLING.
    """
    of_class: dict[int, list[Frame]] = {}
    for frame in frames:
        objects: Any = frame.objects
        for label in numpy.unique(objects.labels[objects.points > 0]).tolist():
            of_class.setdefault(label, []).append(frame)
    share = sum(map(len, of_class.values())) // len(of_class)
    draw = numpy.random.default_rng(number("balanced", seed))
    return [own[place] for _, own in sorted(of_class.items()) for place in draw.integers(len(own), size=share).tolist()]


def check(folder: str | Path, layout: str | None = None, sweeps: int = 1) -> list[str]:
    """All mistakes in a data set, each a line that names file and entry. Every file is read.

    sweeps: how many scans are joined to a keyframe.
    """
    problems = Problems()
    with problems.noting():
        _, train, test = read(Path(folder), layout, sweeps, problems)
        for frame in (*train, *test):
            with problems.noting():
                frame.points()
    return problems.lines


def layout_of(folder: Path, layout: str | None) -> str:
    """The layout of a folder, by its files unless it is given. Raises DataError for a folder of none."""
    if layout is not None:
        check_choice("layout", layout, LAYOUTS)
    if not folder.is_dir():
        raise DataError("data", f"{folder}, which is no folder", "a folder of scans", "Check the path.")
    there = {"nuscenes": version_of(folder) is not None, "kitti": (folder / "training" / "velodyne").is_dir()}
    present = next((name for name, is_there in there.items() if is_there and layout in (None, name)), None)
    if present is None:
        got = f"{folder} without {'training/velodyne/' if layout == 'kitti' else 'v1.*/'}"
        raise DataError("data", got, "v1.*/*.json, or training/velodyne/*.bin", "Check the path.")
    return present


def read(folder: Path, layout: str | None, sweeps: int, problems: Problems) -> tuple[str, list[Frame], list[Frame]]:
    """The layout, and training and test keyframes. Raises DataError for a folder of no layout, or broken tables."""
    layout = layout_of(folder, layout)
    train, test = READERS[layout].list_frames(folder, sweeps, problems)
    for part, frames in (("training", train), ("test", test)):
        counted = sum(int((frame.objects.points > 0).sum()) for frame in frames if frame.objects)
        if not counted and not problems:
            problems.add(folder, f"the {part} scans", "they have no box with a point in it")
    return layout, train, test


def for_evaluation(
    recipe: Detect3dRecipe, summary: Mapping[str, Any], whole: bool, limit: int | None, say: Callable[[str], None]
) -> Detect3dData:
    """Keyframes to measure a trained model on. Raises DataError where none of its classes occurs."""
    recipe = recipe.changed(balanced=False)  # each scan once
    if recipe.data is None and not whole:
        recipe = recipe.changed(scenes=min(recipe.scenes, UNUSED_SCENES))
    with TemporaryDirectory() as scratch:
        data = load(recipe, Path(scratch), say)
        trained = from_summary(recipe, summary)
        if data.layout != trained.layout:
            got, allowed = f"{data.name} in the layout of {data.layout}", f"{trained.layout}, as in training"
            raise DataError("data", got, allowed, "Evaluate on data of the same kind.")
        frames = [*data.train.frames, *data.test.frames] if whole else data.test.frames
        test = Frames(frames[:limit], recipe, trained.test.classes, varied=False)
        if recipe.data is None:
            test.keep_all()
    return replace(trained, name=data.name, train=data.train, test=test)


def from_summary(recipe: Detect3dRecipe, summary: Mapping[str, Any]) -> Detect3dData:
    """The data of a finished run without its keyframes: what building its model needs."""
    layout, classes = str(summary["layout"]), tuple(summary["classes"])
    none = Frames((), recipe, [READERS[layout].CLASSES.index(name) for name in classes], varied=False)
    return Detect3dData(str(summary["name"]), layout, classes, none, none)
