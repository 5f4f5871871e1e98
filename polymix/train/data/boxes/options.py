"""The options of every training on annotated pictures."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from polymix.train.objects import ObjectsRecipe
from polymix.train.option_effects import Beside
from polymix.train.recipe import Count, Place, wrong

CROP_FROM = (400, 500, 600)  # short sides of pictures that are cropped
NO_BLOCK = "none"  # the value of `mixer` for the host as it is
LAST_OF_RES4 = {"resnet18": "backbone.body.layer3.1", "resnet50": "backbone.body.layer3.5"}

Broken = Annotated[
    Literal["refuse", "skip"],
    Field(description="stop at the first mistake in the annotations, or leave such entries out"),
]
Scenes = Annotated[Count, Field(description="training pictures of the default data; at most 128 pixels a side, grown")]
TestScenes = Annotated[Count, Field(description="test pictures of the default data")]
ImageSize = Annotated[int, Field(ge=16, description="sides in pixels to which pictures are fitted, in their shape")]
Question = Annotated[
    Literal["which", "what", "same", "bar"],
    Field(
        description="of the default data: same, find the digit that stands at the top left; which, the smallest, middle"
        " or largest of a scene's digits, which only the others tell; what, the digit itself; bar, whether the bar at"
        " the left edge is green or magenta, which decides the class of the digits at the right"
    ),
]
Backbone = Literal["resnet18", "resnet50"]
Block = Annotated[
    str,
    Field(min_length=1, description="mixer inserted before the last block of Res4, such as non_local; none: no block"),
]


class PicturesRecipe(ObjectsRecipe):
    """What detection and instance segmentation share: their data."""

    sources: ClassVar[tuple[str, ...]] = ("data", "annotations")
    fits_source: ClassVar[tuple[str, ...]] = ("layout", "images")
    of_default: ClassVar[tuple[str, ...]] = ("question",)
    reading: ClassVar[tuple[str, ...]] = ("broken",)
    only_beside: ClassVar[tuple[Beside, ...]] = (*ObjectsRecipe.only_beside, ("short_sides", (), ("crops",)))

    annotations: Place | None = Field(
        None, description="one COCO json, instead of a folder as data; every fifth picture is held out"
    )
    images: Place | None = Field(None, description="folder of the pictures of `annotations`")
    broken: Broken = "refuse"
    question: Question = "which"
    scenes: Scenes = 3000
    test_scenes: TestScenes = 200
    image_size: ImageSize = 64
    short_sides: tuple[Count, ...] = Field(
        (), description="short sides in pixels, one drawn for a training picture, the largest for others; none: as fits"
    )
    long_side: Count | None = Field(None, description="the longest side of a picture in pixels; None: image_size")
    flip: bool = Field(False, description="mirror half of the training pictures")
    crops: bool = Field(
        False, description="take a part of half of the training pictures, with sides of 384 to 600, as DETR does"
    )

    with_masks: ClassVar[bool] = False  # whether objects need a mask
    side_multiple: ClassVar[int] = 16  # of image_size

    @model_validator(mode="after")
    def _pictures_fit(self) -> PicturesRecipe:
        check_side(self.image_size, self.side_multiple)
        if (self.annotations is None) != (self.images is None):
            lone, other = ("annotations", "images") if self.images is None else ("images", "annotations")
            raise wrong(lone, f"it without {other}", "both or neither", "One names a json, one its pictures.")
        if self.data is not None and self.annotations is not None:
            raise wrong("data", "it with annotations and images", "one of the two", "Leave one out.")
        if self.annotations is not None and self.layout is not None:
            cure = "Leave it out: annotations is a json of COCO."
            raise wrong("layout", f"{self.layout!r} with annotations", "None", cure)
        return self

    @property
    def synthetic(self) -> bool:
        """Whether the pictures are the default data, which have no padding."""
        return self.source is None

    @property
    def sizes(self) -> dict[str, Any]:
        """What `fit` takes for pictures that do not vary: those of the test."""
        return {"size": self.image_size, "short": max(self.short_sides, default=None), "long": self.long_side}


def check_side(image_size: int, multiple: int) -> None:
    """What a recipe's validator raises about sides that the host cannot halve often enough."""
    if image_size % multiple:
        raise wrong("image_size", image_size, f"a multiple of {multiple}", f"For example, {4 * multiple}.")
