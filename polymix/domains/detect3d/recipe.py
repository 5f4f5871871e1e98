"""The options of a training on boxes in LiDAR scans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from polymix.domains.detect3d.extent import Extent
from polymix.errors import OptionError
from polymix.train.data.scans.options import Streets
from polymix.train.objects import ObjectsRecipe
from polymix.train.option_effects import Beside
from polymix.train.recipe import (
    BatchSize,
    CheckpointEvery,
    Clip,
    Count,
    EvaluateEvery,
    Final,
    HostInit,
    LearningRate,
    Mixer,
    Natural,
    NotNegative,
    Share,
    Steps,
    Warmup,
    WeightDecay,
    wrong,
)

NMS = ("rotated", "circle", "none")
Counts = tuple[Count, ...]
Side = Annotated[int, Field(ge=2)]


class Detect3dRecipe(ObjectsRecipe):
    """CenterPoint with DSVT, which finds boxes in LiDAR scans.

    The data are a folder of nuScenes or of KITTI's detection set; without one they are drives of a virtual LiDAR.
    """

    task: ClassVar[str] = "polymix.domains.detect3d.task:Detect3dTask"
    takes_plan: ClassVar[bool] = True
    of_default: ClassVar[tuple[str, ...]] = ("question",)
    after_training: ClassVar[tuple[str, ...]] = ("least", "most", "nms", "overlap", "radius")
    only_beside: ClassVar[tuple[Beside, ...]] = (
        *ObjectsRecipe.only_beside,
        ("one_cycle", (False,), ("cosine_from",)),
        ("nms", ("rotated",), ("overlap",)),
        ("nms", ("circle",), ("radius",)),
    )
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tiny": {"steps": 2, "evaluate_every": 2, "voxel": (1.6, 1.6, 4.0), "encoder": (8, 8), "heads": 2, "hidden": 8,
                 "set_size": 12, "blocks": 1, "window": (6, 6), "channels": (8,), "level_dim": 8, "head_dim": 8,
                 "scenes": 2, "test_scenes": 1, "sweeps": 2},
        # DSVT for nuScenes, which PADRe takes over; the head is CenterPoint's in place of TransFusion's. The space is
        # in the vehicle's frame, two metres below the LiDAR's. An epoch of the balanced list is 3,862 steps.
        "paper": {"mixer": "padre:degree=2", "sweeps": 10, "space": (-54.0, -54.0, -3.0, 54.0, 54.0, 5.0),
                  "voxel": (0.3, 0.3, 8.0), "encoder": (128, 128), "heads": 8, "hidden": 256, "set_size": 90,
                  "blocks": 4, "window": (30, 30), "legacy_positions": True, "host_init": "published",
                  "depths": (1, 2, 2), "strides": (1, 2, 2), "channels": (128, 128, 256), "level_dim": 128,
                  "stride": 2, "head_dim": 64, "convolutions": 2, "legacy_radius": True,
                  "turn": 45.0, "scale": 0.1, "flip": True, "move": 0.5, "balanced": True,
                  "least": 0.1, "most": 500, "nms": "rotated", "overlap": 0.2,
                  "batch_size": 32, "epochs": 20.0, "learning_rate": 5e-3, "weight_decay": 0.05, "decay": "all",
                  "betas": (0.9, 0.99), "clip": 35.0, "clip_by": "norm", "warmup": 0.4, "final": 1e-5,
                  "one_cycle": True, "ema": 0.0, "keep": "last", "evaluate_every": 3862, "checkpoint_every": 3862},
    }  # fmt: skip

    batch_size: BatchSize = 2
    steps: Steps = 400
    learning_rate: LearningRate = 3e-3
    warmup: Warmup = 0.2
    final: Final = 0.01
    weight_decay: WeightDecay = 0.01
    clip: Clip = 10.0
    evaluate_every: EvaluateEvery = 400
    checkpoint_every: CheckpointEvery = 200
    mixer: Mixer = "pom"
    sweeps: int = Field(3, ge=1, le=100, description="scans of a keyframe, itself and those before it; KITTI has one")
    space: tuple[float, ...] = Field(
        (-25.6, -12.8, -1.0, 25.6, 12.8, 3.0),
        description="x, y, z of the low corner and of the high one in metres; x to the front, y to the left",
    )
    voxel: tuple[float, ...] = Field((0.8, 0.8, 4.0), description="its sides in metres; as high as the space: pillars")
    encoder: Counts = Field((32, 32), min_length=1, description="channels over points; the last is DSVT's width")
    heads: Count = Field(4, description="heads of mixers that leave them open")
    hidden: Count = Field(64, description="channels of the MLPs")
    set_size: Count = Field(36, description="voxels of a set")
    blocks: Count = Field(2, description="of DSVT, two layers each")
    window: tuple[Side, Side] = Field((16, 16), description="in voxels; every second block is shifted by half of it")
    legacy_positions: bool = Field(
        False, description="DSVT's positions as its code has them: not from the windows of the sets"
    )
    match_parameters: bool = Field(False, description="size the MLPs so that every mixer has attention's parameters")
    host_init: HostInit = "own"
    depths: tuple[Natural, ...] = Field((0,), description="further blocks of each level of the network over the ground")
    strides: Counts = Field((1,), description="of its levels")
    channels: Counts = Field((32,), description="of its levels")
    level_dim: Count = Field(32, description="channels of each level's output")
    stride: Count = Field(1, description="of the network's output, in voxels")
    head_dim: Count = Field(32, description="channels of the head")
    convolutions: Count = Field(1, description="of each branch of the head")
    legacy_radius: bool = Field(False, description="peaks of true boxes as wide as in CenterPoint's code")
    turn: float = Field(
        5.0, ge=0, le=180, description="rotate training scans about the vertical axis by up to so many degrees"
    )
    scale: Share = Field(0.05, description="training scans change their size by up to this share")
    flip: bool = Field(False, description="exchange left and right, and front and back, half of the time each")
    move: NotNegative = Field(0.0, description="standard deviation in metres by which training scans move, each axis")
    balanced: bool = Field(False, description="draw training scans so that each class is in as many (CBGS)")
    one_cycle: bool = Field(
        False, description="the published schedule: up from a tenth along a cosine, beta 1 from 0.95 to 0.85 and back"
    )
    least: Share = Field(0.05, description="the lowest score of a box")
    most: Count = Field(100, description="boxes of a scan")
    nms: Literal["rotated", "circle", "none"] = Field("circle", description="how boxes beside a better one are dropped")
    overlap: Share = Field(0.2, description="with nms=rotated: seen from above, from which a box is dropped")
    radius: tuple[NotNegative, ...] = Field(
        (0.5,),
        min_length=1,
        description="with nms=circle: metres within which a box is dropped; one, or one for each group",
    )
    question: Streets = "houses"
    scenes: Count = Field(60, description="training drives of the default data, with two keyframes each")
    test_scenes: Count = Field(20, description="its test drives")

    @model_validator(mode="after")
    def _voxels_fill_the_space(self) -> Detect3dRecipe:
        try:
            Extent.of(self.space, self.voxel)
        except OptionError as error:
            raise wrong(error.argument, error.got, error.allowed, error.cure) from error
        return self

    @property
    def height(self) -> int:
        """Voxels above each other."""
        return Extent.of(self.space, self.voxel).shape[2]

    def block_names(self) -> list[str]:
        """The names of DSVT's layers, for plans."""
        return [f"blocks.{block}.{layer}" for block in range(self.blocks) for layer in (0, 1)]
