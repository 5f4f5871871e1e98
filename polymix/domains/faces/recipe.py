"""The options of a training that finds faces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from polymix.train.data.boxes.options import (
    NO_BLOCK,
    Backbone,
    Block,
    Broken,
    ImageSize,
    Scenes,
    TestScenes,
    check_side,
)
from polymix.train.objects import ObjectsRecipe
from polymix.train.recipe import (
    BatchSize,
    CheckpointEvery,
    EvaluateEvery,
    LearningRate,
    Steps,
    wrong,
)

LAYERS = ((2, 3), (2, 3, 4))


class FacesRecipe(ObjectsRecipe):
    """torchvision's RetinaNet with square anchors, and a mixer before the last block of Res4.

    The data are a folder in WIDER FACE's layout; without one they are faces of scikit-image pasted into photographs.
    """

    task: ClassVar[str] = "polymix.domains.faces.task:FacesTask"
    without_mixer: ClassVar[str | None] = NO_BLOCK
    of_default: ClassVar[tuple[str, ...]] = ("question",)
    reading: ClassVar[tuple[str, ...]] = ("broken",)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tiny": {"steps": 2, "batch_size": 2, "scenes": 4, "test_scenes": 2, "channels": 8, "image_size": 64},
        "wider": {"backbone": "resnet50", "layers": (2, 3, 4), "channels": 256, "smallest_anchor": 16,
                  "image_size": 640, "epochs": 80.0, "batch_size": 16, "learning_rate": 1e-4, "warmup": 0.1,
                  "final": 0.1, "cosine_from": "warmup", "weight_decay": 0.05, "decay": "matrices",
                  "betas": (0.9, 0.95), "clip": 1.0, "ema": 0.0, "keep": "last", "evaluate_every": 8050},
    }  # fmt: skip

    steps: Steps = 320
    batch_size: BatchSize = 4
    learning_rate: LearningRate = 1e-3
    evaluate_every: EvaluateEvery = 320
    checkpoint_every: CheckpointEvery = 160
    mixer: Block = "poly_nl:reduction=4"
    backbone: Backbone = Field("resnet18", description="whose batch norm learns")
    layers: tuple[int, ...] = Field(
        (2, 3), description="of the ResNet, of strides 8, 16 and 32, from which the pyramid is built: 2,3 or 2,3,4"
    )
    channels: int = Field(64, ge=8, description="of the feature pyramid and the heads")
    smallest_anchor: int = Field(
        12,
        ge=4,
        description="side in pixels of the smallest anchor, at stride 8; three sizes a level, doubling by level",
    )
    image_size: ImageSize = 160
    question: Literal["bar", "all"] = Field(
        "bar",
        description="of the default data: bar, find the faces in the colour of the bar at the left edge, green or"
        " magenta; all, find every face",
    )
    scenes: Scenes = 300
    test_scenes: TestScenes = 100
    broken: Broken = "refuse"

    @model_validator(mode="after")
    def _pyramid_fits(self) -> FacesRecipe:
        if self.layers not in LAYERS:
            raise wrong("layers", repr(self.layers), "2,3 or 2,3,4", "The block is in layer 3.")
        if self.image_size < 64:  # the coarsest level would have no cell
            raise wrong("image_size", self.image_size, "an integer of at least 64", "For example, 160.")
        check_side(self.image_size, 32)
        return self
