"""torchvision: builders by name."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn

from polymix.convert.libraries.base import Recipe, built, load_library, usable
from polymix.convert.plain import encode


def read(model: Any) -> Iterator[Recipe]:
    """No model says what it was called by: each name may be, whose builder returns its class."""
    models = load_library("torchvision.models")
    said = [part.num_classes for part in model.modules() if type(getattr(part, "num_classes", None)) is int]
    heads = {name.rpartition(".")[2]: part for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    head = heads.get("cls_score", next(reversed(heads.values()), None))
    classes = said[0] if said else getattr(head, "out_features", None)
    kwargs = usable(model, {"num_classes": classes, "image_size": getattr(model, "image_size", None)})
    for name in models.list_models():
        if inspect.signature(models.get_model_builder(name)).return_annotation is type(model):
            frozen = any(type(part).__name__ == "FrozenBatchNorm2d" for part in model.modules())
            yield {"name": name, "kwargs": encode(kwargs), **({"frozen": True} if frozen else {})}


def build(recipe: Recipe, kwargs: dict[str, Any]) -> nn.Module:
    if "class" in recipe:
        return built(recipe, kwargs)
    builder = load_library("torchvision.models").get_model_builder(recipe["name"])
    weights = {"weights", "weights_backbone"} & set(inspect.signature(builder).parameters)
    model = builder(**dict.fromkeys(weights), **kwargs)
    if recipe.get("frozen"):
        _freeze(model.backbone.body)
    return model


def _freeze(part: nn.Module) -> None:
    """A detector's backbone has frozen norms if its builder was given weights, which would be fetched."""
    for name, child in part.named_children():
        if isinstance(child, nn.BatchNorm2d):
            frozen = load_library("torchvision.ops").FrozenBatchNorm2d
            setattr(part, name, frozen(child.num_features, eps=child.eps))
        _freeze(child)
