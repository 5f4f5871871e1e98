"""Scans for training: voxels of clouds that are read from disk one at a time, packed without padding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset

from polymix.domains.segment3d import lidarseg
from polymix.domains.segment3d.augment import Voxels, cropped, mixed, thinned, varied
from polymix.domains.segment3d.grid import MAX_VOXELS, voxelize
from polymix.domains.segment3d.layouts import KITTI, VOID, Scan, layout_of, list_scans
from polymix.domains.segment3d.recipe import MAX_CLASSES, Segment3dRecipe
from polymix.domains.segment3d.synthetic import NAME, synthetic
from polymix.errors import DataError, OptionError
from polymix.numbers import plural
from polymix.train.data.class_names import own_names
from polymix.train.data.problems import Problems
from polymix.train.data.splits import checksum_of, spread
from polymix.train.data.synthetic import cached
from polymix.train.task import Data

MAX_POOLS = 12  # by which pieces of a scan are aligned
UNUSED_SCANS = 1  # training scans that are written where only the test scans are measured


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
    coordinates: which features places give, as the recipe says. vary: gives changed places and features.
    whole: where the scan is of which the points are a piece. random_points: a voxel has the features and the label of
    one of its points by chance; else of the first.
    """

    def __init__(
        self, points: Any, classes: Any, voxel: float, coordinates: str = "centred",
        vary: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None, whole: Whole | None = None,
        random_points: bool = False,
    ) -> None:  # fmt: skip
        values = torch.from_numpy(points)
        places, features = (values[:, :3], values[:, 3:]) if vary is None else vary(values)
        voxels = voxelize(places, voxel)
        chosen = voxels.drawn() if random_points else voxels.first
        if coordinates == "centred":
            away = places - (places.mean(0) if whole is None else whole.middle)
            features = torch.cat((away / 10, features), 1)
        elif coordinates == "metres":
            features = torch.cat((places, features), 1)
        self.features = features[chosen].float()
        self.grid, self.inverse = voxels.grid, voxels.inverse
        if whole is not None:  # voxels are joined as they are in the whole scan
            self.grid = self.grid + (_low(values, voxel) - whole.low) % (1 << MAX_POOLS)
        self.points, self.classes = points, classes
        self.labels = None if classes is None else torch.from_numpy(classes)[chosen]


class Scans(Dataset[Cloud]):
    """Labelled scans; with `varied` each is changed anew as the recipe says (see `augment`)."""

    def __init__(self, scans: Sequence[Scan], recipe: Segment3dRecipe, varied: bool = False) -> None:
        self.scans, self.recipe, self.varied = list(scans), recipe, varied
        self.in_memory: dict[int, tuple[Any, Any]] | None = None

    def __len__(self) -> int:
        return len(self.scans)

    def __getitem__(self, place: int) -> Cloud:
        points, classes = self.read(place)
        if not self.varied:
            return Cloud(points, classes, self.recipe.voxel, self.recipe.coordinates)
        if (left := thinned(len(points), self.recipe)) is not None:
            points, classes = points[left.numpy()], classes[left.numpy()]
        vary = partial(varied, recipe=self.recipe, scan=self.scans[place])
        recipe = self.recipe
        return Cloud(points, classes, recipe.voxel, recipe.coordinates, vary, random_points=recipe.random_points)

    def read(self, place: int) -> tuple[Any, Any]:
        """The points and classes of a scan."""
        if self.in_memory is not None and place in self.in_memory:
            return self.in_memory[place]
        points = self.scans[place].points()
        return points, self.scans[place].classes(len(points))

    def keep_all(self) -> None:
        """Read all scans into memory, as their files are about to go."""
        self.in_memory = {place: self.read(place) for place in range(len(self))}


@dataclass(frozen=True)
class Segment3dData(Data):
    """Scans to train on and to test on, the classes, and how many numbers a point has, coordinates first."""

    name: str
    classes: tuple[str, ...]
    inputs: int
    train: Scans
    test: Scans

    @property
    def features(self) -> int:
        """The features of a point. Raises OptionError where it has none."""
        coordinates = self.train.recipe.coordinates
        if coordinates == "none" and self.inputs == 3:
            got = f"'none' for {self.name}, whose points have places alone"
            raise OptionError("coordinates", got, "'centred' or 'metres'", "Change it.")
        return self.inputs - (3 if coordinates == "none" else 0)

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
        scans = self.train.scans

        def contents() -> Iterator[bytes]:
            for place in spread(len(scans), 16):
                for path in (scans[place].path, scans[place].labels):
                    if path is not None and path.is_file():
                        yield path.read_bytes()

        return [len(scans), checksum_of(contents())]

    def summary(self) -> dict[str, Any]:
        """What a saved model needs, and how many scans there were."""
        return {"name": self.name, "classes": list(self.classes), "inputs": self.inputs, "train": len(self.train),
                "test": len(self.test)}  # fmt: skip


def load(recipe: Segment3dRecipe, folder: Path, say: Callable[[str], None]) -> Segment3dData:
    """The scans of --data, or the default ones, which are written below `folder` as SemanticKITTI has them.

    Every scan and its labels are read.

    Raises:
        DataError: the first mistake, by file and entry. OptionError: `colour` for scans without colours.
    """
    if recipe.data is None:
        settings: dict[str, Any] = {
            "seed": recipe.seed, "scans": recipe.scans, "test_scans": recipe.test_scans, "question": recipe.question
        }  # fmt: skip
        source = cached(folder, "segment3d", settings, lambda place: synthetic(place, **settings))
        say(f"Synthetic {NAME}, in the layout of SemanticKITTI: {source}")
    else:
        source = Path(recipe.data)
    problems = Problems()
    train, test, inputs, count = read(source, recipe.layout, recipe.smallest_voxel, problems)
    problems.settle()
    plain = next((scan for scan in train if not scan.coloured), None)
    if recipe.colour and plain is not None:
        got = f"True for {plain.path}, which has no color.npy"
        raise OptionError("colour", got, "scans with colours", "Leave it out.")
    names = {"semantickitti": KITTI, "nuscenes": lidarseg.CLASSES}
    own = own_names(source)
    classes = names.get(layout_of(source, recipe.layout)) or (own.names if own and len(own.names) >= count else ())
    classes = classes or tuple(f"class {place}" for place in range(count))
    name = NAME if recipe.data is None else str(recipe.data)
    return Segment3dData(name, classes, inputs, Scans(train, recipe, varied=True), Scans(test, recipe))


def check(folder: str | Path, layout: str | None = None, voxel: float = 0.05) -> list[str]:
    """All mistakes in a data set, each a line that names file and entry. Every file is read.

    voxel: the smallest side of a voxel in metres, of which at most 65,536 fit along a scan, however it is turned.
    """
    problems = Problems()
    with problems.noting():
        read(Path(folder), layout, voxel, problems)
    return problems.lines


def for_evaluation(
    recipe: Segment3dRecipe, summary: Mapping[str, Any], whole: bool, limit: int | None, say: Callable[[str], None]
) -> Segment3dData:
    """Scans to measure a trained model on. Raises DataError where they have other features or more classes."""
    if recipe.data is None and not whole:
        recipe = recipe.changed(scans=min(recipe.scans, UNUSED_SCANS), epochs=recipe.epochs)
    with TemporaryDirectory() as scratch:
        data = load(recipe, Path(scratch), say)
        trained = from_summary(recipe, summary)
        if data.inputs != trained.inputs or len(data.classes) > len(trained.classes):
            got = f"{data.name} with {data.inputs} features and {len(data.classes)} classes"
            allowed = f"{trained.inputs} and at most {len(trained.classes)}, as in training"
            raise DataError("data", got, allowed, "Evaluate on data of the same kind.")
        scans = [*data.train.scans, *data.test.scans] if whole else data.test.scans
        test = Scans(scans[:limit], recipe)
        if recipe.data is None:
            test.keep_all()
    return replace(data, classes=trained.classes, test=test)


def from_summary(recipe: Segment3dRecipe, summary: Mapping[str, Any]) -> Segment3dData:
    """The data of a finished run without its scans: what building its model needs."""
    none = Scans((), recipe)
    return Segment3dData(str(summary["name"]), tuple(summary["classes"]), int(summary["inputs"]), none, none)


def check_width(path: Path, points: Any, voxel: float, argument: str = "data") -> None:
    """Raise DataError if a scan, however it is turned, spans more voxels than the curves can number."""
    x, y, z = numpy.ptp(points[:, :3].astype(numpy.float64), axis=0)
    if max(math.hypot(x, y), z) >= voxel * MAX_VOXELS:
        size = f"{x:,.0f} × {y:,.0f} × {z:,.0f} m"
        got = f"{path}, which spans {size}, more than {MAX_VOXELS:,} voxels of {voxel:.3g} m"
        raise DataError(argument, got, "a scan that is not as wide", "Remove far points.")


def read(folder: Path, layout: str | None, voxel: float, problems: Problems) -> tuple[list[Scan], list[Scan], int, int]:
    """Training and test scans, the features of a point and the number of classes; reads all scans.

    Raises DataError for a folder of no layout, or tables that cannot be read.
    """
    parts = list_scans(folder, layout_of(folder, layout), problems)
    inputs, count = 0, 0
    for name, scans in zip(("training", "test"), parts, strict=True):
        counted = False
        for scan in scans:
            with problems.noting():
                points = scan.points()
                if inputs and points.shape[1] != inputs:
                    problems.add(scan.path, "", f"{points.shape[1]} numbers a point, others have {inputs}")
                inputs = inputs or points.shape[1]
                check_width(scan.path, points, voxel)
                classes = scan.classes(len(points)) if scan.labels is not None else numpy.zeros(0, numpy.int64)
                classes = classes[classes != VOID]
                count, counted = max(count, int(classes.max(initial=-1)) + 1), counted or bool(len(classes))
        if scans and not counted and not problems:
            problems.add(folder, f"the {name} scans", "they have no label that counts")
    if not problems and not 1 < count <= MAX_CLASSES:
        problems.add(folder, "", f"it has {plural(count, 'class')}; 2 to {MAX_CLASSES} are needed")
    return *parts, inputs, count
