"""Recipes as people hand them over: a Python file, and words such as steps=200."""

from __future__ import annotations

import json
import runpy
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from polymix.errors import DataError, OptionError
from polymix.tasks.text.recipe import TextRecipe

_LISTS: dict[str, type] = {"mixers": str, "prompts": str, "betas": float}
_TEXTS = {"positions"}  # of which "none" is a name
_WORDS = {"none": "null", "None": "null", "True": "true", "False": "false"}


def load_recipe(path: str | Path) -> TextRecipe:
    """The `recipe` of a Python file, which is run."""
    if not Path(path).is_file():
        raise DataError("recipe", str(path), "a Python file", "recipes/text.py is one to begin with.")
    recipe = runpy.run_path(str(path)).get("recipe")
    if not isinstance(recipe, TextRecipe):
        got = f"{path}, in which it is {type(recipe).__name__}"
        raise OptionError("recipe", got, "a file that sets recipe = TextRecipe(…)", "See docs/language/training.md.")
    return recipe


def changed(recipe: TextRecipe, words: Sequence[str]) -> TextRecipe:
    """With ["steps=200", "mixers=pom,local"]; what is no option of the recipe is one of its model."""
    own: dict[str, Any] = {}
    model = dict(recipe.options)
    known = {f.name for f in fields(recipe)} - {"options"}
    for word in words:
        name, sign, text = word.partition("=")
        if not sign or not name.isidentifier() or not text:
            raise OptionError("--set", repr(word), "name=value", "Try --set steps=200.")
        (own if name in known else model)[name] = _value(name, text)
    return replace(recipe, **own, options=model)


def _value(name: str, text: str) -> Any:
    """A list where the option is one, a number, true, false, none, else the text."""
    try:
        if name in _LISTS:
            return tuple(_LISTS[name](part) for part in text.split(","))
        if name in _TEXTS:
            return text
        return json.loads(_WORDS.get(text, text))
    except json.JSONDecodeError:
        return text
    except ValueError as error:
        raise OptionError(f"--set {name}", repr(text), "numbers separated by commas", "") from error
