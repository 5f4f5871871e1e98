"""The options of a training that finds objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from polymix.errors import OptionError, check_int
from polymix.tasks.boxes.options import PicturesRecipe


@dataclass(frozen=True)
class DetectRecipe(PicturesRecipe):
    """A detector: a small convolutional stem, an encoder of mixers and a dense head.

    `PicturesRecipe` has the options of the data, and `TaskRecipe` those that all tasks share.

    Args:
        mixer: of every encoder layer, as on the command line: "softmax", "padre:degree=3".
        dim, depth: channels, a multiple of 16, and layers of the encoder.
    """

    steps: int = 1800
    learning_rate: float = 2e-3
    final: float = 0.02
    evaluate_every: int = 600
    checkpoint_every: int = 300
    log_every: int = 50
    mixer: str = "softmax"
    dim: int = 64
    depth: int = 3

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tiny": {"steps": 4, "scenes": 16, "test_scenes": 8, "batch_size": 8, "dim": 16, "depth": 1},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("depth", self.depth, 1)
        check_int("dim", self.dim, 16)
        if self.dim % 16:
            raise OptionError("dim", self.dim, "a multiple of 16", "For example, 64.")
