"""The options of a training that finds faces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from polymix.errors import OptionError, check_choice, check_int
from polymix.tasks.boxes.detectors import LAST_OF_RES4, NO_BLOCK
from polymix.tasks.boxes.pictures import MISTAKES
from polymix.tasks.recipe import TaskRecipe

LAYERS = ((2, 3), (2, 3, 4))


@dataclass(frozen=True)
class FacesRecipe(TaskRecipe):
    """torchvision's RetinaNet with square anchors, and a mixer before the last block of Res4.

    `TaskRecipe` has the options that all tasks share.

    Args:
        data: a folder in WIDER FACE's layout; None: faces of scikit-image pasted into photographs.
        mixer: what is inserted, as on the command line: "poly_nl:reduction=4", "non_local"; "none": no block.
        backbone: "resnet18" or "resnet50", whose batch norm trains.
        layers: of the ResNet, from which the feature pyramid is made: 2, 3 and 4, of strides 8, 16 and 32. It has two
            more levels above them.
        channels: of the feature pyramid and the heads.
        smallest_anchor: side in pixels of the smallest anchor, at stride 8. Each level has three sizes, and
            those of the next level are twice as large.
        image_size: sides to which pictures are fitted, in pixels; a multiple of 32. Their shape is kept.
        scenes, test_scenes: how many the default data has. They have at most 128 pixels a side, and grow to image_size.
        mistakes: "refuse" stops at the first mistake in the annotations; "skip" leaves such entries out.
    """

    steps: int = 160
    batch_size: int = 8
    learning_rate: float = 1e-3
    evaluate_every: int = 160
    checkpoint_every: int = 80
    mixer: str = "poly_nl:reduction=4"
    backbone: str = "resnet18"
    layers: Sequence[int] = (2, 3)
    channels: int = 64
    smallest_anchor: int = 12
    image_size: int = 96
    scenes: int = 300
    test_scenes: int = 100
    mistakes: str = "refuse"

    without_mixer: ClassVar[str | None] = NO_BLOCK
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tiny": {"steps": 2, "batch_size": 2, "scenes": 4, "test_scenes": 2, "channels": 8, "image_size": 64},
        "wider": {"backbone": "resnet50", "layers": (2, 3, 4), "channels": 256, "smallest_anchor": 16,
                  "image_size": 640, "epochs": 80, "batch_size": 16, "learning_rate": 1e-4, "evaluate_every": 8050},
    }  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("backbone", self.backbone, LAST_OF_RES4)
        check_choice("mistakes", self.mistakes, MISTAKES)
        for name in ("scenes", "test_scenes"):
            check_int(name, getattr(self, name), 1)
        check_int("smallest_anchor", self.smallest_anchor, 4)
        check_int("channels", self.channels, 8)
        if tuple(self.layers) not in LAYERS:
            raise OptionError("layers", repr(self.layers), "2,3 or 2,3,4", "The block is in layer 3.")
        check_int("image_size", self.image_size, 64)
        if self.image_size % 32:
            raise OptionError("image_size", self.image_size, "a multiple of 32", "For example, 128.")
