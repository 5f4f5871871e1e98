"""The options of a training on images: a whole run, and the schedule by which models are compared."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from polymix.errors import OptionError, check_choice, check_int, check_number
from polymix.tasks.recipe import TaskRecipe


@dataclass(frozen=True)
class ImageRecipe(TaskRecipe):
    """A vision transformer that classifies images. `TaskRecipe` has the options that all tasks share.

    Args:
        data: a folder with one sub-folder of images per class; None: scikit-learn's handwritten digits.
        mixer: of every block, as on the command line: "pom", "padre:degree=3".
        image_size, patch_size: in pixels. Images are resized and cropped to squares.
        dim, depth, mlp_ratio: channels, blocks, and hidden units of the MLP per channel.
        class_token: classify by a token of its own instead of the mean of all tokens.
        label_smoothing: share of each label that is spread over all classes.
    """

    batch_size: int = 64
    steps: int = 700
    learning_rate: float = 2e-3
    warmup: float = 0.2
    final: float = 0.0
    mixer: str = "pom"
    image_size: int = 16
    patch_size: int = 2
    dim: int = 32
    depth: int = 2
    mlp_ratio: float = 4.0
    class_token: bool = False
    label_smoothing: float = 0.1

    trains_control: ClassVar[bool] = False  # the digits are solved without mixing; `polymix compare` shows it

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("image_size", "patch_size", "dim", "depth"):
            check_int(name, getattr(self, name), 1)
        if self.image_size % self.patch_size:
            got = f"{self.patch_size} with image_size={self.image_size}"
            raise OptionError("patch_size", got, "a divisor of the image size", "Change one of the two.")
        check_choice("class_token", self.class_token, (True, False))
        check_number("mlp_ratio", self.mlp_ratio, 1 / self.dim, math.inf, "a number that leaves a hidden unit", 4)
        check_number("label_smoothing", self.label_smoothing, 0.0, 1.0, "a share below 1", 0.1)


@dataclass(frozen=True)
class Schedule:
    """How every model of a comparison is trained: AdamW, warm-up and cosine decay, cross-entropy.

    Args:
        epochs, batch_size: passes through the images, and images per step.
        learning_rate: the highest one. warmup: share of the steps in which it rises.
        weight_decay: of AdamW.
        label_smoothing: share of each label that is spread over all classes.
    """

    epochs: int = 30
    batch_size: int = 64
    learning_rate: float = 2e-3
    weight_decay: float = 0.05
    warmup: float = 0.2
    label_smoothing: float = 0.1

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
