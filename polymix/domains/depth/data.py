"""Views of scenes for training: pictures with depth in the model's size, and the rays of their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from polymix.domains.depth import synthetic
from polymix.domains.depth.layouts import View, layout_of, list_views, read_depth
from polymix.domains.depth.recipe import DepthRecipe
from polymix.errors import DataError
from polymix.train.data.cameras import in_middle, rays, read_matrix
from polymix.train.data.kept import Kept
from polymix.train.data.pictures import middle, middle_part, read_header, read_picture
from polymix.train.data.problems import Problems
from polymix.train.data.splits import TEST_SHARE
from polymix.train.data.synthetic import cached
from polymix.train.task import Data, Say

NAME = "synthetic rooms"
Scene = tuple[View, ...]  # the views of a sample
Sample = tuple[Tensor, Tensor, Tensor]


class Scenes(Kept[Sample]):
    """Bytes (K, 3, H, W), depth (K, H, W) with 0 where it does not count, and rays (K, N, 6), of one camera none."""

    def __init__(self, scenes: Sequence[Scene], recipe: DepthRecipe) -> None:
        super().__init__(7 * len(scenes) * recipe.cameras * recipe.height * recipe.width)
        self.scenes, self.recipe = scenes, recipe

    def __len__(self) -> int:
        return len(self.scenes)

    def read(self, place: int) -> Sample:
        return read_scene(self.scenes[place], self.recipe)


def read_scene(scene: Scene, recipe: DepthRecipe) -> Sample:
    """A sample of `Scenes`: the middle of each picture in the model's size, its depth by the nearest pixel."""
    size = (recipe.height, recipe.width)
    pictures = torch.stack([middle(read_picture(view.picture), *size) for view in scene])
    depths = [counted(read_depth(view.depth, view.unit), recipe) for view in scene]
    parts = [depth[middle_part(depth.shape, size)][None, None] for depth in depths]
    depth = torch.cat([interpolate(part, size, mode="nearest-exact")[0] for part in parts])
    return pictures, depth, rays_of(scene, recipe)


def counted(depth: Tensor, recipe: DepthRecipe) -> Tensor:
    """Depth with 0 in place of what is below `min_depth` or above `max_depth`."""
    return depth.where((depth >= recipe.min_depth) & (depth <= (recipe.max_depth or torch.inf)), 0.0)


def intrinsics_of(view: View, recipe: DepthRecipe) -> Tensor:
    """The matrix (3, 3) of a view's camera in the pixels of the model. Raises DataError: there is none."""
    matrix = read_matrix(view.intrinsics, "intrinsics", view.picture)
    return in_middle(matrix, view.size[::-1], (recipe.height, recipe.width))


def rays_of(scene: Scene, recipe: DepthRecipe) -> Tensor:
    """Place and direction (K, N, 6) of the ray of each token, in the axes of the first camera; of one camera none."""
    if recipe.cameras == 1:
        return torch.zeros(1, 0, 6)
    poses = torch.stack([read_matrix(view.pose, "pose", view.picture) for view in scene])
    matrices = [intrinsics_of(view, recipe) for view in scene]
    return rays(poses, matrices, recipe.height, recipe.width, recipe.patch_size)


@dataclass(frozen=True)
class DepthData(Data):
    """Scenes for training and for the test, and c, the mean log depth of the training data."""

    name: str
    centre: float
    train: Scenes
    test: Scenes

    def summary(self) -> dict[str, Any]:
        """What results.json keeps: enough to build the model."""
        return {"name": self.name, "centre": self.centre, "train": len(self.train), "test": len(self.test)}


def load(recipe: DepthRecipe, folder: Path, say: Say) -> DepthData:
    """The scenes of a recipe's data, or synthetic ones, which are written to `folder`. Reads every depth file.

    Raises DataError: the first problem of all.
    """
    source = Path(recipe.data or "")
    if recipe.data is None:
        settings = {"seed": recipe.seed, "cameras": recipe.cameras, "height": recipe.height, "width": recipe.width,
                    "train": recipe.synthetic_train, "test": recipe.synthetic_test}  # fmt: skip
        source = cached(folder, "rooms", settings, lambda place: synthetic.write(place, **settings))
    problems = Problems()
    train, test, centre = read(recipe, source, problems)
    problems.settle(say=say)
    return DepthData(recipe.data or NAME, centre, Scenes(train, recipe), Scenes(test, recipe))


def read(recipe: DepthRecipe, folder: Path, problems: Problems) -> tuple[list[Scene], list[Scene], float]:
    """The sound scenes for training and for the test, and the mean log depth of all. Raises DataError.

    Where a folder does not say which are for the test, the last fifth is.
    """
    means: list[float] = []
    parts = list_views(folder, layout_of(folder, recipe.layout), problems)
    train, test = ([*_scenes(recipe, part, problems, means)] for part in parts)
    if not problems:
        cut = len(train) - max(1, len(train) // TEST_SHARE)
        train, test = (train, test) if test else (train[:cut], train[cut:])
        if not train or not test:
            got = f"{folder} with {len(train) + len(test)} samples of {recipe.cameras} views"
            raise DataError("data", got, "two or more, for training and for the test", "Add some.")
    return train, test, sum(means) / max(1, len(means))


def _scenes(recipe: DepthRecipe, views: list[View], problems: Problems, means: list[float]) -> Iterator[Scene]:
    """Samples of as many views of one scene as there are cameras, in order; the log depths' means are added."""
    for name, group in groupby(views, lambda view: view.scene):
        sound = []
        for view in group:
            with problems.noting():
                view, depth = _checked(view, recipe)
                rays_of((view,), recipe)
                means.append(depth[depth > 0].log().mean().item())
                sound.append(view)
        spare = len(sound) % recipe.cameras
        if len(sound) < recipe.cameras and not problems:
            problems.add(name, "", f"a scene of {len(sound)} views; a sample has {recipe.cameras}: see cameras")
        elif spare:
            problems.note(name, f"the last views, too few for a sample of {recipe.cameras}, are left out")
        yield from (tuple(sound[k : k + recipe.cameras]) for k in range(0, len(sound) - spare, recipe.cameras))


def _checked(view: View, recipe: DepthRecipe) -> tuple[View, Tensor]:
    """The view with its size and unit, and what of its depth counts. Raises DataError: none does."""
    view = view if recipe.depth_unit is None else view._replace(unit=recipe.depth_unit)
    header, depth = read_header(view.picture), read_depth(view.depth, view.unit)
    if (header.height, header.width) != tuple(depth.shape):
        size = f"{depth.shape[1]} × {depth.shape[0]}"
        got = f"{view.picture}, which is {header.width} × {header.height} pixels, and {size} in {view.depth}"
        raise DataError("data", got, "one size", "Resize one of them.")
    depth = counted(depth, recipe)
    if not depth.any():
        got = f"{view.depth} without a valid pixel: all are 0, or outside of min_depth and max_depth"
        raise DataError("data", got, "depths", "Remove it.")
    return view._replace(size=(header.width, header.height)), depth


def list_problems(recipe: DepthRecipe, source: str) -> list[str]:
    """Every problem of a folder, in sentences; reads all files."""
    problems = Problems()
    with problems.noting():
        train, test, _ = read(recipe, Path(source), problems)
        for view in (view for scene in (*train, *test) for view in scene):
            with problems.noting():
                read_picture(view.picture)
    return problems.lines
