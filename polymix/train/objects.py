"""The options that all domains share that find objects."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from polymix.train.recipe import Fraction, Recipe


class ObjectsRecipe(Recipe):
    """What domains share that find objects, each with a score."""

    in_pictures: ClassVar[tuple[str, ...]] = ("threshold",)

    threshold: Fraction = Field(
        0.3, description="lowest score of an object in pictures; the files of `predict` also have those below it"
    )
