"""The TSViT that a recipe asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from polymix.errors import OptionError
from polymix.mixers import LinearFloorMixer
from polymix.models import TSViT
from polymix.tasks.fields.data import FieldData
from polymix.tasks.fields.pastis import BANDS
from polymix.tasks.fields.recipe import FieldsRecipe

HEADS = ("class_tokens",)  # of a model with other classes


def _options(recipe: FieldsRecipe, classes: int) -> dict[str, Any]:
    return {
        "classes": classes, "bands": BANDS, "image_size": recipe.window, "patch": recipe.patch, "dim": recipe.dim,
        "temporal_depth": recipe.temporal_depth, "spatial_depth": recipe.spatial_depth, "heads": recipe.heads,
        "match_parameters": recipe.match_parameters,
        "days": recipe.days, "mask_padding": recipe.mask_padding, "legacy_layout": recipe.legacy_layout,
    }  # fmt: skip


def check(recipe: FieldsRecipe) -> None:
    """Raise what `build` would raise about the recipe, before any file is read."""
    _build(recipe, recipe.classes or 6)


def build(recipe: FieldsRecipe, data: FieldData) -> TSViT:
    """The model with fresh weights.

    Raises OptionError for a mixer that cannot leave padded dates out, where the data has series of different lengths.
    """
    model = _build(recipe, len(data.classes))
    for block in model.temporal if recipe.mask_padding and data.padded else ():
        mixer: Any = block.mixer
        if not isinstance(mixer, LinearFloorMixer) and "padding" not in mixer.capabilities.masks:
            got = f"{mixer.name}, which takes no mask, for series of different lengths"
            cure = "Choose another, or pass --set mask_padding=False: padded dates are then tokens, as published."
            raise OptionError("mixer", got, "a mixer that takes a padding mask", cure)
    return model


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
