"""Recipes of hosts: what is written down of a model's library and arguments, so that it can be built again."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from polymix.convert.libraries import LIBRARIES, Recipe, library_of
from polymix.convert.plain import decode, encode, is_plain
from polymix.errors import MissingExtraError, OptionError

REMEMBERED = "_polymix_host"  # attribute of a model that was built by a recipe which it does not tell
FORMS = (
    '{"library": "timm" or "torchvision", "name": …, "kwargs": {…}}, '
    '{"library": "timm", "torchvision", "torch" or "polymix", "class": "package.module.Class", "kwargs": {…}}, or '
    '{"call": "package.module:function" or "file.py:function", "kwargs": {…}}'
)


def candidates(model: nn.Module, folder: Path) -> Iterator[Recipe]:
    """Recipes that may be the model's, the likeliest first; whether one is shows what it builds."""
    if vars(model).get(REMEMBERED):
        yield normal(vars(model)[REMEMBERED], folder)
    library = library_of(type(model))
    if library is not None:
        for recipe in LIBRARIES[library].read(model):
            yield {"library": library, **recipe}


def normal(host: Any, folder: Path) -> Recipe:
    """A recipe of the user's as it is saved: arguments as JSON has them, a file by its way from the folder."""
    host = {"call": host} if isinstance(host, str) else host
    recipe = {"kwargs": {}, **host} if isinstance(host, Mapping) else {}
    sorts, named = ({"call"}, {"library", "name"}, {"library", "class"}), set(recipe) - {"kwargs", "frozen"}
    right = named in sorts and all(type(recipe[key]) is str for key in named) and ":" in recipe.get("call", ":")
    library = LIBRARIES.get(recipe.get("library", "torch"))
    if not right or library is None or library.by_config or not is_plain(recipe["kwargs"]):
        raise OptionError("host", repr(host), FORMS, "Arguments are numbers, words, tuples, lists, dicts and mixers.")
    if "call" in recipe:
        place, _, function = recipe["call"].rpartition(":")
        recipe["call"] = f"{_way(Path(place), folder) if place.endswith('.py') else place}:{function}"
    return {**recipe, "kwargs": encode(recipe["kwargs"])}


def build(recipe: Recipe, folder: Path, trust: bool) -> nn.Module:
    """The host that a recipe names.

    Raises OptionError where code of the user's builds it and `trust` is off, and where building fails.
    """
    if "call" in recipe and not trust:
        got = f"False for a model that code of its own builds, {recipe['call']}"
        raise OptionError("trust", got, "True", "Read that code; then load_pretrained(folder, trust=True) runs it.")
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
            host, model = {**recipe, "kwargs": kwargs}, library.build(recipe, kwargs)
    except (MissingExtraError, OptionError):
        raise
    except Exception as error:  # whatever a library, or code of the user's, raises is one line here
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise OptionError("host", f"{said(recipe)}, which fails with {reason}", FORMS, "") from error
    if not isinstance(model, nn.Module):
        got = f"{said(recipe)}, which returns {type(model).__name__}"
        raise OptionError("host", got, "a function that returns a model, or (model, its input)", "")
    if library is None or not library.by_config:
        vars(model)[REMEMBERED] = host
    return model


def said(recipe: Recipe) -> str:
    """A recipe in a message."""
    return ", ".join(
        f"{key}={recipe[key]}" for key in ("library", "name", "class", "call", "kwargs") if recipe.get(key)
    )


def _way(file: Path, folder: Path) -> str:
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
        cure = "Put it there; a file that is inside the folder goes wherever the folder goes."
        raise OptionError("host", f"{call}, but there is no {path}", "a file that exists", cure)
    return f"{path}:{function}"


def _called(call: str, kwargs: dict[str, Any]) -> Any:
    place, _, function = call.rpartition(":")
    if not place.endswith(".py"):
        return getattr(importlib.import_module(place), function)(**kwargs)
    spec = importlib.util.spec_from_file_location(Path(place).stem, place)
    assert spec is not None and spec.loader is not None  # of a file that ends in .py
    source = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(source)
    return getattr(source, function)(**kwargs)
