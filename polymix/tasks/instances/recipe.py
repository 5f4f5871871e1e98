"""The options of a training that finds objects and their masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from polymix.errors import check_choice
from polymix.tasks.boxes.detectors import LAST_OF_RES4, NO_BLOCK
from polymix.tasks.boxes.options import PicturesRecipe
from polymix.tasks.recipe import check_milestones

DETECTORS, OPTIMIZERS = ("small", "published"), ("adamw", "sgd")


@dataclass(frozen=True)
class InstancesRecipe(PicturesRecipe):
    """torchvision's Mask R-CNN with a mixer before the last block of Res4, as Poly-NL (section 4.2) places it.

    `PicturesRecipe` has the options of the data, and `TaskRecipe` those that all tasks share.

    Args:
        mixer: what is inserted, as on the command line: "poly_nl:reduction=4", "non_local", "se";
            "none": no block.
        backbone: "resnet18" or "resnet50", with a feature pyramid. Batch norm trains; with `init` it is frozen, as are
            the stem and the first stage.
        detector: "small", anchors by image_size and few proposals; "published", those of torchvision's reference:
            anchors of 32 to 512 pixels, 2,000 proposals in training and 1,000 in use, 512 boxes of a picture.
        optimizer: "adamw", or "sgd" with a momentum of 0.9.
        milestones: shares of the steps after which the learning rate is a tenth; (): it falls as a cosine.
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
    detector: str = "small"
    optimizer: str = "adamw"
    milestones: Sequence[float] = ()

    without_mixer: ClassVar[str | None] = NO_BLOCK
    with_masks: ClassVar[bool] = True
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tiny": {"steps": 2, "scenes": 8, "test_scenes": 4},
        # torchvision's references/detection, whose model is the baseline of Poly-NL's Table 1b; 26 epochs of COCO.
        "paper": {
            "backbone": "resnet50", "detector": "published", "image_size": 1344, "short_sides": (800,),
            "long_side": 1333, "flip": True, "batch_size": 16, "epochs": 26, "optimizer": "sgd", "learning_rate": 0.02,
            "weight_decay": 1e-4, "clip": 1e9, "warmup": 1000 / 190_580, "milestones": (16 / 26, 22 / 26),
            "evaluate_every": 7330, "checkpoint_every": 7330,
        },
    }  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("backbone", self.backbone, LAST_OF_RES4)
        check_choice("detector", self.detector, DETECTORS)
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        check_milestones(self.milestones)
