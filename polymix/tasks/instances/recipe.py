"""The options of a training that finds objects and their masks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from polymix.errors import check_choice
from polymix.tasks.boxes.detectors import LAST_OF_RES4, NO_BLOCK
from polymix.tasks.boxes.options import PicturesRecipe


@dataclass(frozen=True)
class InstancesRecipe(PicturesRecipe):
    """torchvision's Mask R-CNN with a mixer before the last block of Res4, as Poly-NL (section 4.2) places it.

    `PicturesRecipe` has the options of the data, and `TaskRecipe` those that all tasks share.

    Args:
        mixer: what is inserted, as on the command line: "poly_nl:reduction=4", "non_local", "se";
            "none": no block.
        backbone: "resnet18" or "resnet50", with a feature pyramid and batch norm that trains.
    """

    steps: int = 200
    batch_size: int = 4
    learning_rate: float = 1e-3
    evaluate_every: int = 200
    question: str = "what"
    scenes: int = 400
    test_scenes: int = 50
    mixer: str = "poly_nl:reduction=4"
    backbone: str = "resnet18"

    without_mixer: ClassVar[str | None] = NO_BLOCK
    with_masks: ClassVar[bool] = True
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tiny": {"steps": 2, "scenes": 8, "test_scenes": 4},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("backbone", self.backbone, LAST_OF_RES4)
