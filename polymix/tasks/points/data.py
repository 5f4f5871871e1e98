"""Scans for training: voxels of clouds that are read from disk one at a time, packed without padding."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset

from polymix._io import write_whole
from polymix.errors import DataError, OptionError, PolymixError
from polymix.models.points import MOST_VOXELS, voxelize
from polymix.tasks.points import lidarseg
from polymix.tasks.points.augment import Voxels, cropped, mixed, thinned, varied
from polymix.tasks.points.layouts import KITTI, LAYOUTS, VOID, Scan, find, layout_of
from polymix.tasks.points.lidar import scan
from polymix.tasks.points.recipe import MOST_CLASSES, PointsRecipe

__all__ = ["LAYOUTS", "PointData", "Scans", "check", "for_evaluation", "from_summary", "load", "made"]
MADE = "scans of a made LiDAR"
POOLS = 12  # at most, by which pieces of a scan are aligned
UNUSED = 1  # training scans that an evaluation makes beside its test scans


class Whole(NamedTuple):
    """A scan that is cut into pieces: its middle in metres (3,), and its lowest voxel (3,)."""

    middle: Tensor
    low: Tensor

    @staticmethod
    def of(points: Any, voxel: float) -> Whole:
        middle = torch.from_numpy(points[:, :3].mean(0, dtype=numpy.float64)).float()
        return Whole(middle, _low(torch.from_numpy(points), voxel))


def _low(points: Tensor, voxel: float) -> Tensor:
    return (points[:, :3].amin(0).double() / voxel).floor().long()


class Cloud:
    """One cloud as the model takes it: features (V, C) and places (V, 3) of its voxels, and their labels (V,).

    inverse: the voxel of each point. points: as they were read. classes: of the points, int64 (n,); None: unknown.
    vary: gives changed places and features. whole: where the scan is of which the points are a piece.
    """

    def __init__(
        self, points: Any, classes: Any, voxel: float,
        vary: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None, whole: Whole | None = None,
    ) -> None:  # fmt: skip
        values = torch.from_numpy(points)
        places, features = (values[:, :3], values[:, 3:]) if vary is None else vary(values)
        found = voxelize(places, voxel)
        away = places - (places.mean(0) if whole is None else whole.middle)
        self.features = torch.cat((away / 10, features), 1)[found.first].float()
        self.grid, self.inverse = found.grid, found.inverse
        if whole is not None:  # voxels are joined as they are in the whole scan
            self.grid = self.grid + (_low(values, voxel) - whole.low) % (1 << POOLS)
        self.points, self.classes = points, classes
        self.labels = None if classes is None else torch.from_numpy(classes)[found.first]


class Scans(Dataset[Cloud]):
    """Labelled scans; with `varied` each is changed anew as the recipe says (see `polymix.tasks.points.augment`)."""

    def __init__(self, scans: Sequence[Scan], recipe: PointsRecipe, varied: bool = False) -> None:
        self.scans, self.recipe, self.varied = list(scans), recipe, varied
        self.kept: dict[int, tuple[Any, Any]] | None = None

    def __len__(self) -> int:
        return len(self.scans)

    def __getitem__(self, place: int) -> Cloud:
        points, classes = self.read(place)
        if not self.varied:
            return Cloud(points, classes, self.recipe.voxel)
        if (left := thinned(len(points), self.recipe)) is not None:
            points, classes = points[left.numpy()], classes[left.numpy()]
        vary = partial(varied, recipe=self.recipe, scan=self.scans[place])
        return Cloud(points, classes, self.recipe.voxel, vary)

    def read(self, place: int) -> tuple[Any, Any]:
        """The points and classes of a scan."""
        if self.kept is not None and place in self.kept:
            return self.kept[place]
        points = self.scans[place].points()
        return points, self.scans[place].classes(len(points))

    def keep_all(self) -> None:
        """Read all scans into memory, as their files are about to go."""
        self.kept = {place: self.read(place) for place in range(len(self))}


@dataclass(frozen=True)
class PointData:
    """Scans to train on and to test on, the classes, and how many features a point has."""

    name: str
    classes: tuple[str, ...]
    inputs: int
    train: Scans
    test: Scans

    def collate(self, clouds: Sequence[Cloud]) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
        """Packed clouds: features (V, C), voxels (V, 3), offsets (B + 1,), labels (V,), and the number of points.

        With the recipe's `mix`, two clouds become one by chance. A cloud is cropped to the recipe's `crop`.
        """
        recipe = self.train.recipe
        labelled = ((cloud, cloud.labels) for cloud in clouds if cloud.labels is not None)  # as training clouds are
        voxels = [Voxels(cloud.features, cloud.grid, labels) for cloud, labels in labelled]
        parts = mixed([cropped(one, recipe.crop) for one in voxels], recipe)
        features, grid, labels = (torch.cat(values) for values in zip(*parts, strict=True))
        offsets = torch.tensor([0, *(len(part.grid) for part in parts)]).cumsum(0)
        return features, grid, offsets, labels, sum(len(cloud.points) for cloud in clouds)

    def fingerprint(self) -> list[Any]:
        """The number of training scans and a checksum of 16 of them as they lie on disk."""
        scans, crc = self.train.scans, 0
        for place in range(16):
            found = scans[len(scans) * place // 16]
            for path in (found.path, found.labels):
                if path is not None and path.is_file():
                    crc = zlib.crc32(path.read_bytes(), crc)
        return [len(scans), crc]

    def summary(self) -> dict[str, Any]:
        """What a saved model needs, and how many scans there were."""
        return {"name": self.name, "classes": list(self.classes), "inputs": self.inputs, "train": len(self.train),
                "test": len(self.test)}  # fmt: skip


def load(recipe: PointsRecipe, folder: Path, say: Callable[[str], None]) -> PointData:
    """The scans of a recipe: the default data, which it makes in `folder` as SemanticKITTI, or --data.

    Raises DataError with the first mistake, by file and entry. Every scan and its labels are read.
    """
    if recipe.data is None:
        where = made(folder / "points", recipe.seed, recipe.scans, recipe.test_scans)
        say(f"Made scans, in the layout of SemanticKITTI: {where}")
    source = folder / "points" if recipe.data is None else Path(recipe.data)
    problems: list[str] = []
    train, test, inputs, count = _read(source, recipe.layout, problems, recipe.check_options()["voxel"])
    if problems:
        raise DataError.first_of(problems)
    plain = next((one for one in train if not one.coloured), None)
    if recipe.colour and plain is not None:
        got = f"True for {plain.path}, which has no color.npy"
        raise OptionError("colour", got, "scans with colours", "Leave it out.")
    known = {"semantickitti": KITTI, "nuscenes": lidarseg.CLASSES}
    classes = known.get(layout_of(source, recipe.layout)) or tuple(f"class {place}" for place in range(count))
    name = MADE if recipe.data is None else str(recipe.data)
    return PointData(name, classes, inputs, Scans(train, recipe, varied=True), Scans(test, recipe))


def check(folder: str | Path, layout: str | None = None, voxel: float = 0.05) -> list[str]:
    """All mistakes in a data set, each a line that names file and entry. Every file is read.

    voxel: the smallest side of a voxel in metres, of which at most 65,536 fit along a scan, however it is turned.
    """
    problems: list[str] = []
    try:
        _read(Path(folder), layout, problems, voxel)
    except DataError as error:
        return [str(error.got)]
    return problems


def made(folder: str | Path, seed: int = 0, scans: int = 60, test_scans: int = 16) -> Path:
    """Write the default data as SemanticKITTI has it, and return the folder; a set of the same options is kept.

    Training scans are in sequence 00 and test scans in sequence 08; every scan has a street of its own.
    """
    folder = Path(folder)
    stamp = folder / f".made-{seed}-{scans}-{test_scans}"
    if stamp.is_file():
        return folder
    for number, count in ((0, scans), (8, test_scans)):
        sequence = folder / "sequences" / f"{number:02d}"
        for kind, suffix in (("velodyne", "bin"), ("labels", "label")):
            (sequence / kind).mkdir(parents=True, exist_ok=True)
            for old in (sequence / kind).glob(f"*.{suffix}"):
                old.unlink()
        for place in range(count):
            points, labels = scan(numpy.random.default_rng([seed, number, place]))
            write_whole(sequence / "velodyne" / f"{place:06d}.bin", lambda part, x=points: x.tofile(part))  # type: ignore[misc]
            write_whole(sequence / "labels" / f"{place:06d}.label", lambda part, x=labels: x.tofile(part))  # type: ignore[misc]
    stamp.touch()
    return folder


def for_evaluation(
    recipe: PointsRecipe, summary: Mapping[str, Any], whole: bool, limit: int | None, say: Callable[[str], None]
) -> PointData:
    """Scans to measure a trained model on. Raises DataError where they have other features or more classes."""
    if recipe.data is None and not whole:
        recipe = replace(recipe, scans=min(recipe.scans, UNUSED))
    with TemporaryDirectory() as scratch:
        data = load(recipe, Path(scratch), say)
        known = from_summary(recipe, summary)
        if data.inputs != known.inputs or len(data.classes) > len(known.classes):
            got = f"{data.name} with {data.inputs} features and {len(data.classes)} classes"
            allowed = f"{known.inputs} and at most {len(known.classes)}, as in training"
            raise DataError("data", got, allowed, "Evaluate on data of the same kind.")
        scans = [*data.train.scans, *data.test.scans] if whole else data.test.scans
        test = Scans(scans[:limit], recipe)
        if recipe.data is None:
            test.keep_all()
    return replace(data, classes=known.classes, test=test)


def from_summary(recipe: PointsRecipe, summary: Mapping[str, Any]) -> PointData:
    """The data of a finished run without its scans: what building its model needs."""
    none = Scans((), recipe)
    return PointData(str(summary["name"]), tuple(summary["classes"]), int(summary["inputs"]), none, none)


def too_wide(path: Path, points: Any, voxel: float) -> list[str]:
    """A problem if a scan, however it is turned, spans more voxels than the curves can number."""
    x, y, z = numpy.ptp(points[:, :3].astype(numpy.float64), axis=0)
    if max(math.hypot(x, y), z) < voxel * MOST_VOXELS:
        return []
    return [f"{path}, which spans {x:,.0f} × {y:,.0f} × {z:,.0f} m, more than {MOST_VOXELS:,} voxels of {voxel:.3g} m"]


def _read(
    folder: Path, layout: str | None, problems: list[str], voxel: float
) -> tuple[list[Scan], list[Scan], int, int]:
    """Training and test scans, the features of a point and the number of classes. Adds what is wrong to `problems`."""
    found = find(folder, layout_of(folder, layout), problems.append)
    inputs, most = 0, 0
    for number, part in enumerate(found):
        counted = False
        for one in part:
            try:
                points = one.points()
                classes = one.classes(len(points)) if one.labels is not None else numpy.zeros(0, numpy.int64)
            except PolymixError as error:
                problems.append(f"{error.got}" if isinstance(error, DataError) else str(error))
                continue
            if inputs and points.shape[1] != inputs:
                problems.append(f"{one.path} has {points.shape[1]} numbers a point, others {inputs}")
            inputs = inputs or points.shape[1]
            problems += too_wide(one.path, points, voxel)
            there = classes[classes != VOID]
            most, counted = max(most, int(there.max(initial=-1)) + 1), counted or bool(len(there))
        if part and not counted and not problems:
            problems.append(f"{folder}: the {('training', 'test')[number]} scans have no label that counts")
    if not problems and not 1 < most <= MOST_CLASSES:
        problems.append(f"{folder} has {most} classes; 2 to {MOST_CLASSES} are needed")
    return *found, inputs, most
