"""The vision transformer that a recipe asks for."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from polymix.mixers.spec import parse_mixer
from polymix.models import VisionTransformer
from polymix.tasks.classify.data import ImageSets
from polymix.tasks.classify.recipe import ImageRecipe


def _options(recipe: ImageRecipe, channels: int, classes: int) -> dict[str, Any]:
    return {
        "image_size": recipe.image_size, "patch_size": recipe.patch_size, "dim": recipe.dim, "depth": recipe.depth,
        "mlp_ratio": recipe.mlp_ratio, "class_token": recipe.class_token, "channels": channels, "classes": classes,
    }  # fmt: skip


def check(recipe: ImageRecipe) -> None:
    """Raise what `build` would raise about the recipe, before any image is read."""
    VisionTransformer(parse_mixer(recipe.mixer)[1], **_options(recipe, 3, 2), device="meta")


def build(recipe: ImageRecipe, data: ImageSets) -> VisionTransformer:
    """The model with fresh weights."""
    options = _options(recipe, data.images.channels, len(data.images.classes))
    return VisionTransformer(parse_mixer(recipe.mixer)[1], **options)


def usage(recipe: ImageRecipe, data: ImageSets, folder: Path) -> list[str]:
    """Python lines that load the model, for the report."""
    options = _options(recipe, data.images.channels, len(data.images.classes))
    words = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return [
        "import torch",
        "from polymix.mixers.spec import parse_mixer",
        "from polymix.models import VisionTransformer",
        "",
        f"model = VisionTransformer(parse_mixer({recipe.mixer!r})[1], {words})",
        f"model.load_state_dict(torch.load({str(folder / 'model.pt')!r}))",
    ]


def next_commands(recipe: ImageRecipe, data: ImageSets, folder: Path) -> list[tuple[str, str]]:
    """What to run next, and why, for the report."""
    command = "polymix compare" + (f" --data {shlex.quote(recipe.data)}" if recipe.data else "")
    return [("Compare all mixers on these images:", command)]
