"""Recipes: a model's library, class and arguments written as JSON, from which the model can be built again."""

from __future__ import annotations

import importlib
import inspect
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from polymix.convert.adapters.libraries import LIBRARIES, library_of, load_library
from polymix.errors import MissingExtraError, OptionError, one_line
from polymix.files import load_python
from polymix.mixers import MixerConfig
from polymix.mixers.spec import mixer_config

Recipe = dict[str, Any]
RECIPE_ATTRIBUTE = "_polymix_host"  # of a model that does not tell by itself how it was built
FORMS = (
    '{"library": "timm" or "torchvision", "name": …, "kwargs": {…}}, '
    '{"library": "timm", "torchvision", "torch" or "polymix", "class": "package.module.Class", "kwargs": {…}}, or '
    '{"call": "package.module:function" or "file.py:function", "kwargs": {…}}'
)
_SCALARS = (type(None), bool, int, float, str)


# Recipes of a model


def candidates(model: nn.Module, folder: Path) -> Iterator[Recipe]:
    """Recipes that may build this model, the likeliest first. Which of them does shows when it is built."""
    if vars(model).get(RECIPE_ATTRIBUTE):
        yield normal(vars(model)[RECIPE_ATTRIBUTE], folder)
    library = library_of(type(model))
    if library is not None:
        for recipe in LIBRARIES[library].load_adapters().read_recipes(model):
            yield {"library": library, **recipe}


def normal(host: Any, folder: Path) -> Recipe:
    """A recipe as a user writes it, in the form that is saved: arguments as JSON, a file relative to the folder."""
    host = {"call": host} if isinstance(host, str) else host
    recipe = {"kwargs": {}, **host} if isinstance(host, Mapping) else {}
    forms, keys = ({"call"}, {"library", "name"}, {"library", "class"}), set(recipe) - {"kwargs", "frozen"}
    right = keys in forms and all(type(recipe[key]) is str for key in keys) and ":" in recipe.get("call", ":")
    library = LIBRARIES.get(recipe.get("library", "torch"))
    if not right or library is None or library.by_config or not is_plain(recipe["kwargs"]):
        cure = "Arguments are numbers, strings, tuples, lists, dicts and mixer configs."
        raise OptionError("host", repr(host), FORMS, cure)
    if "call" in recipe:
        place, _, function = recipe["call"].rpartition(":")
        recipe["call"] = f"{_relative(Path(place), folder) if place.endswith('.py') else place}:{function}"
    return {**recipe, "kwargs": encode(recipe["kwargs"])}


def build(recipe: Recipe, folder: Path, trust: bool) -> nn.Module:
    """Build the model that a recipe describes, with untrained weights.

    Raises OptionError where the recipe names the user's own code and `trust` is off, and where building fails.
    """
    if "call" in recipe and not trust:
        got = f"False for a model that is built by code outside of polymix and its libraries, {recipe['call']}"
        cure = "Read that code. If you trust it, call load_pretrained(folder, trust=True)."
        raise OptionError("trust", got, "True", cure)
    kwargs = decode(recipe.get("kwargs", {}))
    library = None if "call" in recipe else LIBRARIES.get(recipe["library"])
    try:
        if "call" in recipe:
            host = {**recipe, "call": _absolute(recipe["call"], folder), "kwargs": kwargs}
            model = _called(host["call"], kwargs)
            model = model[0] if isinstance(model, tuple) and model else model
        elif library is None:
            raise OptionError("host", recipe["library"], ", ".join(LIBRARIES), "A newer polymix may know it.")
        else:
            host, model = {**recipe, "kwargs": kwargs}, library.load_adapters().build_model(recipe, kwargs)
    except (MissingExtraError, OptionError):
        raise
    except Exception as error:  # from the library or the user's code
        got = f"{describe(recipe)}, which fails with {one_line(error)}"
        raise OptionError("host", got, FORMS, "") from error
    if not isinstance(model, nn.Module):
        got = f"{describe(recipe)}, which returns {type(model).__name__}"
        raise OptionError("host", got, "a function that returns a model, or (model, its input)", "")
    if library is None or not library.by_config:
        vars(model)[RECIPE_ATTRIBUTE] = host
    return model


def describe(recipe: Recipe) -> str:
    """A recipe in an error message."""
    return ", ".join(
        f"{key}={recipe[key]}" for key in ("library", "name", "class", "call", "kwargs") if recipe.get(key)
    )


def _relative(file: Path, folder: Path) -> str:
    try:
        return Path(os.path.relpath(file.resolve(), folder.resolve())).as_posix()
    except ValueError:  # another drive
        return file.resolve().as_posix()


def _absolute(call: str, folder: Path) -> str:
    place, _, function = call.rpartition(":")
    if not place.endswith(".py"):
        return call
    path = (folder / place).resolve()
    if not path.is_file():
        cure = "Put it there. A file inside the folder moves with the folder."
        raise OptionError("host", f"{call}, but {path} does not exist", "a file that exists", cure)
    return f"{path}:{function}"


def _called(call: str, kwargs: dict[str, Any]) -> Any:
    place, _, function = call.rpartition(":")
    if place.endswith(".py"):
        return getattr(load_python(Path(place), "host"), function)(**kwargs)
    return getattr(importlib.import_module(place), function)(**kwargs)


# What read_recipes and build_model of the adapters share


def class_path(model: nn.Module) -> str:
    """The "package.module.Class" of a model."""
    return f"{type(model).__module__}.{type(model).__qualname__}"


def model_class(recipe: Recipe) -> Any:
    """The class that a recipe names. Raises OptionError unless it is a model class of the recipe's library."""
    name, (module, _, kind) = recipe["library"], recipe["class"].rpartition(".")
    models = LIBRARIES[name].models
    load_library(name)
    loaded = getattr(load_library(module), kind, None) if recipe["class"].startswith(models) else None
    if not isinstance(loaded, type) or not issubclass(loaded, nn.Module) or not loaded.__module__.startswith(name):
        raise OptionError("host", recipe["class"], f"a model class of {name}, {models}….Class", "")
    return loaded


def build_class(recipe: Recipe, kwargs: dict[str, Any]) -> nn.Module:
    """The recipe's class called with the arguments."""
    return model_class(recipe)(**kwargs)


def known_arguments(model: nn.Module, values: dict[str, Any]) -> dict[str, Any]:
    """Those of the values found on a model that its class takes as arguments."""
    kinds = [kind for kind in type(model).__mro__ if issubclass(kind, nn.Module)]
    names = {"num_classes"}.union(*(inspect.signature(kind).parameters for kind in kinds))
    return {key: value for key, value in values.items() if key in names and value is not None and is_plain(value)}


# Arguments as JSON


def is_plain(value: Any) -> bool:
    """Whether `encode` can write a value: numbers, strings, tuples, lists, dicts and mixer configs."""
    if type(value) is dict:
        return all(type(key) is str and not key.startswith("__") and is_plain(part) for key, part in value.items())
    if type(value) in (tuple, list):
        return all(map(is_plain, value))
    return type(value) in _SCALARS or isinstance(value, MixerConfig)


def encode(value: Any) -> Any:
    """A plain value in JSON's types."""
    if isinstance(value, MixerConfig):
        return {"__mixer__": value.to_dict()}
    if isinstance(value, dict):
        return {key: encode(part) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        parts = [encode(part) for part in value]
        return {"__tuple__": parts} if isinstance(value, tuple) else parts
    return {"__float__": repr(value)} if isinstance(value, float) and not math.isfinite(value) else value


def decode(value: Any) -> Any:
    """The value that `encode` was given."""
    if isinstance(value, list):
        return [decode(part) for part in value]
    if not isinstance(value, dict):
        return value
    if "__mixer__" in value:
        return mixer_config(value["__mixer__"])
    if "__tuple__" in value:
        return tuple(map(decode, value["__tuple__"]))
    return float(value["__float__"]) if "__float__" in value else {key: decode(part) for key, part in value.items()}
