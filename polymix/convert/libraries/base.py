"""What the files of all libraries use: recipes, libraries and classes by name, arguments read off a model."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from torch import nn

from polymix.compat import cure_torchvision
from polymix.convert.plain import is_plain
from polymix.errors import MissingExtraError, OptionError

Recipe = dict[str, Any]
MODELS = {  # where each library has the classes of its models
    "timm": "timm.models.", "torchvision": "torchvision.models.", "transformers": "transformers.models.",
    "diffusers": "diffusers.models.", "torch": "torch.nn.", "polymix": "polymix.models.",
}  # fmt: skip
_EXTRAS = {"timm": "'polymix[vision]'", "transformers": "'polymix[text]'"}


def load_library(name: str) -> Any:
    """A library that a model comes from, or a module of it; MissingExtraError where it is not installed."""
    try:
        cure_torchvision()
        return importlib.import_module(name)
    except ImportError as error:
        top = name.partition(".")[0]
        cure = f"pip install {_EXTRAS.get(top, top)}"
        raise MissingExtraError(top, str(error), f"{top}, which the model comes from", cure) from error


def model_class(recipe: Recipe) -> Any:
    """A class of models that the library has, and nothing else that its modules hold."""
    name, (module, _, kind) = recipe["library"], recipe["class"].rpartition(".")
    load_library(name)
    found = getattr(load_library(module), kind, None) if recipe["class"].startswith(MODELS[name]) else None
    if not isinstance(found, type) or not issubclass(found, nn.Module) or not found.__module__.startswith(name):
        raise OptionError("host", recipe["class"], f"a class of {name}'s models, {MODELS[name]}….Class", "")
    return found


def built(recipe: Recipe, kwargs: dict[str, Any]) -> nn.Module:
    return model_class(recipe)(**kwargs)


def class_path(model: nn.Module) -> str:
    return f"{type(model).__module__}.{type(model).__qualname__}"


def usable(model: nn.Module, seen: dict[str, Any]) -> dict[str, Any]:
    """What was seen of the arguments of a model's class."""
    kinds = [kind for kind in type(model).__mro__ if issubclass(kind, nn.Module)]
    known = {"num_classes"}.union(*(inspect.signature(kind).parameters for kind in kinds))
    return {key: value for key, value in seen.items() if key in known and value is not None and is_plain(value)}
