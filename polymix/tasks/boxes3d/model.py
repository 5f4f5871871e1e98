"""The CenterPoint that a recipe asks for."""

from __future__ import annotations

from pathlib import Path

from polymix.models.points.center_point import CenterPoint
from polymix.tasks.boxes3d.data import BoxData
from polymix.tasks.boxes3d.frames import INPUTS
from polymix.tasks.boxes3d.recipe import Boxes3dRecipe

HEADS = ("head",)  # of a model with other classes
GROUPS = (1, 2, 2, 1, 2, 2)  # of nuScenes' ten classes, as CenterPoint has them


def check(recipe: Boxes3dRecipe) -> None:
    """Raise what `build` would raise about the recipe, before any file is read."""
    _build(recipe, 2)


def build(recipe: Boxes3dRecipe, data: BoxData) -> CenterPoint:
    """The model with fresh weights."""
    return _build(recipe, len(data.classes))


def _build(recipe: Boxes3dRecipe, classes: int) -> CenterPoint:
    x, y = recipe.window
    high = recipe_height(recipe)
    dsvt = {"heads": recipe.heads, "hidden": recipe.hidden, "set_size": recipe.set_size, "blocks": (recipe.blocks,),
            "windows": (((x, y, high), (x, y, high)),), "shift": (x // 2, y // 2)}  # fmt: skip
    return CenterPoint(
        list(recipe.mixers_for(recipe.layers()).values()), inputs=INPUTS,
        groups=GROUPS if classes == sum(GROUPS) else (1,) * classes, space=recipe.space, voxel=recipe.voxel,
        encoder=recipe.encoder, dsvt=dsvt, depths=recipe.depths, strides=recipe.strides, channels=recipe.channels,
        out=recipe.out, stride=recipe.stride, head_dim=recipe.head_dim, convolutions=recipe.convolutions,
    )  # fmt: skip


def recipe_height(recipe: Boxes3dRecipe) -> int:
    """Voxels above each other."""
    return round((recipe.space[5] - recipe.space[2]) / recipe.voxel[2])


def host_name(recipe: Boxes3dRecipe) -> str:
    """What results call the host."""
    return "DSVT with CenterPoint's head"


def usage(recipe: Boxes3dRecipe, data: BoxData, folder: Path) -> list[str]:
    """Python lines that load the model, for the report."""
    return [
        "from polymix.tasks.saved import SavedRun",
        "",
        f"model = SavedRun.of({str(folder)!r}).load()  # points (n, {INPUTS}), offsets (B + 1,) -> heat and boxes",
    ]
