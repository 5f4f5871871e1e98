"""The options of a training that finds objects."""

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
class DetectRecipe(TaskRecipe):
    """A detector: a small convolutional stem, an encoder of mixers and a dense head. `TaskRecipe` has shared options.

    Args:
        data: a folder in COCO's or VOC's layout; None: digits on photographs.
        annotations_file, images: one COCO json and its folder of pictures, instead of `data`; a fifth is held out. On
            the command line the first is --set annotations=FILE.
        mistakes: "refuse" stops at the first mistake in the annotations; "skip" leaves such entries out.
        question: of the default data: "which", the smallest, middle or largest of a scene's digits, which only the
            others tell; or "what", the digit itself.
        scenes, test_scenes: how many the default data has.
        mixer: of every encoder layer, as on the command line: "softmax", "padre:degree=3".
        image_size: sides to which pictures are fitted, in pixels; a multiple of 8. Their shape is kept.
        dim, depth: channels and layers of the encoder.
    """

    steps: int = 1800
    learning_rate: float = 2e-3
    final: float = 0.02
    evaluate_every: int = 600
    checkpoint_every: int = 300
    log_every: int = 50
    annotations_file: str | None = None
    images: str | None = None
    mistakes: str = "refuse"
    question: str = "which"
    scenes: int = 3000
    test_scenes: int = 200
    mixer: str = "softmax"
    image_size: int = 64
    dim: int = 64
    depth: int = 3

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tiny": {"steps": 4, "scenes": 16, "test_scenes": 8, "batch_size": 8, "dim": 16, "depth": 1},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("scenes", "test_scenes", "depth"):
            check_int(name, getattr(self, name), 1)
        for name in ("image_size", "dim"):
            check_int(name, getattr(self, name), 16)
            if getattr(self, name) % 16:
                raise OptionError(name, getattr(self, name), "a multiple of 16", "For example, 64.")
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

    def with_options(self, options: Mapping[str, Any]) -> DetectRecipe:
        """This recipe with other options, by name. Raises OptionError for an unknown one or a value out of range."""
        return super().with_options({_FIELDS.get(name, name): value for name, value in options.items()})
