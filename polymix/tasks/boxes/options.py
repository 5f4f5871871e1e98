"""The options of every training on annotated pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from polymix.errors import OptionError, check_choice, check_int
from polymix.tasks.boxes.fitting import CROP_FROM, Variation
from polymix.tasks.boxes.pictures import MISTAKES
from polymix.tasks.recipe import TaskRecipe
from polymix.tasks.scenes import QUESTIONS, SAME

_FIELDS = {"annotations": "annotations_file"}


@dataclass(frozen=True)
class PicturesRecipe(TaskRecipe):
    """What detection and instance segmentation share: their data. `TaskRecipe` has the options that all tasks share.

    Args:
        data: a folder in COCO's or VOC's layout; None: digits on photographs.
        annotations_file, images: one COCO json and its folder of pictures, instead of `data`; a fifth is held out. On
            the command line the first is --set annotations=FILE.
        mistakes: "refuse" stops at the first mistake in the annotations; "skip" leaves such entries out.
        question: of the default data: "same", find the digit that stands at the top left; "which", the smallest,
            middle or largest of a scene's digits; in both only the other digits tell. "what", the digit itself.
        scenes, test_scenes: how many the default data has. They have at most 128 pixels a side, and grow to image_size.
        image_size: sides to which pictures are fitted, in pixels; a multiple of 16. Their shape is kept.
        short_sides: of the pictures in pixels, one of which is drawn for a training picture, and the largest of which
            others get; (): as large as fits. No picture grows beyond image_size.
        long_side: the longest side of a picture in pixels; None: image_size.
        flip: mirror half of the training pictures.
        crops: bring half of the training pictures to a short side of 400, 500 or 600 first, and take a part with sides
            of 384 to 600, as DETR does; needs short_sides.
    """

    annotations_file: str | None = None
    images: str | None = None
    mistakes: str = "refuse"
    question: str = "which"
    scenes: int = 3000
    test_scenes: int = 200
    image_size: int = 64
    short_sides: Sequence[int] = ()
    long_side: int | None = None
    flip: bool = False
    crops: bool = False

    with_masks: ClassVar[bool] = False  # whether objects need a mask

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("scenes", "test_scenes"):
            check_int(name, getattr(self, name), 1)
        check_int("image_size", self.image_size, 16)
        if self.image_size % 16:
            raise OptionError("image_size", self.image_size, "a multiple of 16", "For example, 64.")
        check_choice("mistakes", self.mistakes, MISTAKES)
        check_choice("question", self.question, (*QUESTIONS, SAME))
        for name in ("flip", "crops"):
            check_choice(name, getattr(self, name), (True, False))
        sides = self.short_sides if isinstance(self.short_sides, (tuple, list)) else (None,)
        if not all(type(side) is int and side >= 1 for side in sides):
            raise OptionError("short_sides", repr(self.short_sides), "whole numbers of pixels", "Pass 480,512, say.")
        if self.long_side is not None:
            check_int("long_side", self.long_side, 1)
        if self.crops and not sides:
            cure = f"Pass short_sides, such as {CROP_FROM[0]},{CROP_FROM[-1]}."
            raise OptionError("crops", "True without short_sides", "it with short_sides", cure)
        if (self.annotations_file is None) != (self.images is None):
            lone, other = ("annotations", "images") if self.images is None else ("images", "annotations")
            raise OptionError(lone, f"it without {other}", "both or neither", "One names a json, one its pictures.")
        if self.data is not None and self.annotations_file is not None:
            raise OptionError("data", "it with annotations and images", "one of the two", "Leave one out.")

    @property
    def makes_data(self) -> bool:
        """Whether the pictures are the default data, which have no padding."""
        return self.data is None and self.annotations_file is None

    @property
    def source(self) -> str | None:
        """The folder or the json that --check reads."""
        return self.data if self.annotations_file is None else self.annotations_file

    def check_options(self) -> dict[str, Any]:
        return {"images": self.images, "masks": self.with_masks}

    @property
    def sizes(self) -> dict[str, Any]:
        """What `fit` takes for pictures that do not vary: those of the test."""
        return {"size": self.image_size, "short": max(self.short_sides, default=None), "long": self.long_side}

    @property
    def variation(self) -> Variation:
        """How training pictures vary."""
        return Variation(self.flip, tuple(self.short_sides), self.crops)

    def other_options(self) -> dict[str, str]:
        """`annotations`, the name of `annotations_file` on the command line."""
        return {"annotations": "str | None"}

    def with_options(self, options: Mapping[str, Any]) -> PicturesRecipe:
        """This recipe with other options, by name. Raises OptionError for an unknown one or a value out of range."""
        return super().with_options({_FIELDS.get(name, name): value for name, value in options.items()})
