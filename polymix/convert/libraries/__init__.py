"""How the models of each library are read into a recipe, and built from one, without running other code than theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import nn

from polymix.convert.libraries import configs, timm, torchvision
from polymix.convert.libraries.base import MODELS, Recipe, built, class_path
from polymix.convert.plain import encode, is_plain

__all__ = ["LIBRARIES", "Library", "Recipe", "library_of"]


class Library(NamedTuple):
    """What a model tells of itself, how one is built; by_config: its models tell all."""

    read: Callable[[Any], Iterator[Recipe]]
    build: Callable[[Recipe, dict[str, Any]], Any]
    by_config: bool = False


def library_of(kind: type) -> str | None:
    return next((name for name, models in MODELS.items() if kind.__module__.startswith(models)), None)


def _nothing(model: nn.Module) -> Iterator[Recipe]:
    yield from ()


def _options(model: Any) -> Iterator[Recipe]:
    """Our own hosts keep what they were built with."""
    if is_plain(getattr(model, "options", None)):
        yield {"class": class_path(model), "kwargs": encode(model.options)}


LIBRARIES = {
    "timm": Library(timm.read, timm.build),
    "torchvision": Library(torchvision.read, torchvision.build),
    "transformers": Library(configs.read_transformers, configs.build_transformers, True),
    "diffusers": Library(configs.read_diffusers, configs.build_diffusers, True),
    "torch": Library(_nothing, built),
    "polymix": Library(_options, built),
}
