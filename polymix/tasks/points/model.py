"""The PTv3 that a recipe asks for."""

from __future__ import annotations

from pathlib import Path

from polymix.models.points import PTv3
from polymix.tasks.points.data import PointData
from polymix.tasks.points.recipe import PointsRecipe

HEADS = ("head",)  # of a model with other classes
FEATURES = 4  # of a LiDAR's points: coordinates and remission


def check(recipe: PointsRecipe) -> None:
    """Raise what `build` would raise about the recipe, before any file is read."""
    _build(recipe, FEATURES, 2)


def build(recipe: PointsRecipe, data: PointData) -> PTv3:
    """The model with fresh weights."""
    return _build(recipe, data.inputs, len(data.classes))


def _build(recipe: PointsRecipe, inputs: int, classes: int) -> PTv3:
    return PTv3(
        list(recipe.mixers_for(recipe.layers()).values()), inputs=inputs, classes=classes, depths=recipe.depths,
        channels=recipe.channels, heads=recipe.heads, decoder_depths=recipe.decoder_depths,
        decoder_channels=recipe.decoder_channels, decoder_heads=recipe.decoder_heads, window=recipe.windows(),
        orders=recipe.orders, shuffle=recipe.shuffle, cpe=recipe.cpe, drop_path=recipe.drop_path,
    )  # fmt: skip


def host_name(recipe: PointsRecipe) -> str:
    """What results call the host."""
    return "PTv3" if recipe.cpe else "PTv3 without convolutional position encodings"


def usage(recipe: PointsRecipe, data: PointData, folder: Path) -> list[str]:
    """Python lines that load the model, for the report."""
    return [
        "from polymix.tasks.saved import SavedRun",
        "",
        f"model = SavedRun.of({str(folder)!r}).load()  # features (V, {data.inputs}), voxels (V, 3), offsets -> (V, K)",
    ]
