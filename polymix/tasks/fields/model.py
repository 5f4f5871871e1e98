"""The TSViT that a recipe asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from polymix.models import TSViT
from polymix.tasks.fields.data import FieldData
from polymix.tasks.fields.pastis import BANDS
from polymix.tasks.fields.recipe import FieldsRecipe

HEADS = ("class_tokens",)  # of a model with other classes


def _options(recipe: FieldsRecipe, classes: int) -> dict[str, Any]:
    return {
        "classes": classes, "bands": BANDS, "image_size": recipe.window, "patch": recipe.patch, "dim": recipe.dim,
        "temporal_depth": recipe.temporal_depth, "spatial_depth": recipe.spatial_depth, "heads": recipe.heads,
        "mask_padding": recipe.mask_padding, "legacy_layout": recipe.legacy_layout,
    }  # fmt: skip


def check(recipe: FieldsRecipe) -> None:
    """Raise what `build` would raise about the recipe, before any file is read."""
    _build(recipe, recipe.classes or 6)


def build(recipe: FieldsRecipe, data: FieldData) -> TSViT:
    """The model with fresh weights."""
    return _build(recipe, len(data.classes))


def _build(recipe: FieldsRecipe, classes: int) -> TSViT:
    return TSViT(list(recipe.mixers_for(recipe.layers()).values()), **_options(recipe, classes))


def host_name(recipe: FieldsRecipe) -> str:
    return "TSViT"


def usage(recipe: FieldsRecipe, data: FieldData, folder: Path) -> list[str]:
    """Python lines that load the model, for the report."""
    return [
        "from polymix.tasks.saved import SavedRun",
        "",
        f"model = SavedRun.of({str(folder)!r}).load()  # images (B, T, 10, H, W), days (B, T) -> logits (B, K, H, W)",
    ]
