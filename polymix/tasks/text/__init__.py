"""Training language models on text: `train_text` with a `TextRecipe`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from polymix.tasks.runner import train
from polymix.tasks.text.recipe import TextRecipe

__all__ = ["TextRecipe", "train_text"]


def train_text(
    recipe: TextRecipe, out: str | Path, *, resume: bool = False, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Train a language model and leave it in `out`, as transformers' Auto classes load it.

    See `polymix.tasks.runner.train` for what else the folder gets, for `resume` and for the errors.
    """
    return train(recipe, out, resume=resume, say=say)
