"""The options of every training on annotated pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from polymix.errors import OptionError, check_choice, check_int
from polymix.tasks.boxes.pictures import MISTAKES
from polymix.tasks.recipe import TaskRecipe
from polymix.tasks.scenes import QUESTIONS

_FIELDS = {"annotations": "annotations_file"}


@dataclass(frozen=True)
class PicturesRecipe(TaskRecipe):
    """What detection and instance segmentation share: their data. `TaskRecipe` has the options that all tasks share.

    Args:
        data: a folder in COCO's or VOC's layout; None: digits on photographs.
        annotations_file, images: one COCO json and its folder of pictures, instead of `data`; a fifth is held out. On
            the command line the first is --set annotations=FILE.
        mistakes: "refuse" stops at the first mistake in the annotations; "skip" leaves such entries out.
        question: of the default data: "which", the smallest, middle or largest of a scene's digits, which only the
            others tell; or "what", the digit itself.
        scenes, test_scenes: how many the default data has.
        image_size: sides to which pictures are fitted, in pixels; a multiple of 16. Their shape is kept.
    """

    annotations_file: str | None = None
    images: str | None = None
    mistakes: str = "refuse"
    question: str = "which"
    scenes: int = 3000
    test_scenes: int = 200
    image_size: int = 64

    with_masks: ClassVar[bool] = False  # whether objects need a mask

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("scenes", "test_scenes"):
            check_int(name, getattr(self, name), 1)
        check_int("image_size", self.image_size, 16)
        if self.image_size % 16:
            raise OptionError("image_size", self.image_size, "a multiple of 16", "For example, 64.")
        check_choice("mistakes", self.mistakes, MISTAKES)
        check_choice("question", self.question, QUESTIONS)
        if (self.annotations_file is None) != (self.images is None):
            lone, other = ("annotations", "images") if self.images is None else ("images", "annotations")
            raise OptionError(lone, f"it without {other}", "both or neither", "One names a json, one its pictures.")
        if self.data is not None and self.annotations_file is not None:
            raise OptionError("data", "it with annotations and images", "one of the two", "Leave one out.")

    def other_options(self) -> dict[str, str]:
        """`annotations`, the name of `annotations_file` on the command line."""
        return {"annotations": "str | None"}

    def with_options(self, options: Mapping[str, Any]) -> PicturesRecipe:
        """This recipe with other options, by name. Raises OptionError for an unknown one or a value out of range."""
        return super().with_options({_FIELDS.get(name, name): value for name, value in options.items()})
