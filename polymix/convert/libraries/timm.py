"""timm: architectures by name, and what a model tells of its arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from polymix.convert.libraries.base import Recipe, built, load_library, usable
from polymix.convert.plain import encode, is_plain
from polymix.errors import OptionError


def read(model: Any) -> Iterator[Recipe]:
    """What the model says of itself, over what it was called with where timm kept that."""
    name = (getattr(model, "pretrained_cfg", None) or {}).get("architecture")
    head = model.get_classifier() if hasattr(model, "get_classifier") else None
    first = next((part for part in model.modules() if isinstance(part, nn.Conv2d)), None)
    drops = [part.drop_prob for part in model.modules() if type(part).__name__ == "DropPath"]
    seen = {
        "num_classes": getattr(head, "out_features", getattr(model, "num_classes", None)),
        "in_chans": getattr(first, "in_channels", None),
        "img_size": getattr(getattr(model, "patch_embed", None), "img_size", None),
        "global_pool": getattr(model, "global_pool", None),
        "drop_path_rate": max(drops, default=None),
    }
    kept = {key: value for key, value in getattr(model, "_model_args", {}).items() if is_plain(value)}
    if name:
        yield {"name": name, "kwargs": encode({**kept, **usable(model, seen)})}


def build(recipe: Recipe, kwargs: dict[str, Any]) -> nn.Module:
    if "class" in recipe:
        return built(recipe, kwargs)
    timm = load_library("timm")
    if not timm.is_model(recipe["name"]):
        raise OptionError("host", recipe["name"], "an architecture that timm lists", "Nothing is fetched for a host.")
    return timm.create_model(
        recipe["name"], pretrained=False, pretrained_cfg=None, pretrained_cfg_overlay=None, checkpoint_path="",
        cache_dir=None, **kwargs,
    )  # fmt: skip
