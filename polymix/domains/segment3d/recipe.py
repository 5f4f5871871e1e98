"""The options of a training that names the class of every point of a scan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from polymix.train.data.scans.options import Streets
from polymix.train.option_effects import Beside
from polymix.train.recipe import (
    BatchSize,
    CheckpointEvery,
    Count,
    EvaluateEvery,
    Final,
    Fraction,
    HostInit,
    LearningRate,
    Mixer,
    Natural,
    NotNegative,
    Positive,
    Recipe,
    Share,
    Steps,
    Warmup,
    WeightDecay,
    wrong,
)

MAX_CLASSES = 255
ORDERS = ("z", "z-trans", "hilbert", "hilbert-trans")
Order = Literal["z", "z-trans", "hilbert", "hilbert-trans"]
Counts = tuple[Count, ...]
Depths = tuple[Natural, ...]
# PTv3's sizes, and Pointcept's configuration for nuScenes; none is published for SemanticKITTI, of which an epoch is
# 1,595 steps.
_PAPER: Mapping[str, Any] = {
    "mixer": "pom", "voxel": 0.05, "coordinates": "metres", "depths": (2, 2, 2, 6, 2),
    "channels": (32, 64, 128, 256, 512), "heads": (2, 4, 8, 16, 32), "decoder_depths": (2, 2, 2, 2),
    "decoder_channels": (64, 64, 128, 256), "decoder_heads": (4, 4, 8, 16), "window": 1024, "whole": 0,
    "orders": ORDERS, "shuffle": True, "fit_curves": True, "legacy_unpooling": True, "cpe": True, "drop_path": 0.3,
    "host_init": "published", "lovasz": 1.0, "batch_size": 12, "epochs": 50.0, "learning_rate": 2e-3, "block_rate": 0.1,
    "weight_decay": 0.005, "decay": "all", "warmup": 0.04, "final": 1e-3, "one_cycle": True, "betas": (0.9, 0.999),
    "clip": None, "ema": 0.0, "keep": "best", "turn": True, "turned": 0.5, "flip": True, "scale": 0.1, "jitter": 0.005,
    "tilt": 0.0, "elastic": False, "drop": False, "random_points": True, "mix": 0.8, "colour": False, "crop": 0,
    "evaluate_every": 1595, "checkpoint_every": 1595,
}  # fmt: skip
# The same indoors: Pointcept's configuration for ScanNet, which goes eight times over the scenes between evaluations.
_ROOMS: Mapping[str, Any] = {
    **_PAPER, "voxel": 0.02, "coordinates": "none", "epochs": 800.0, "learning_rate": 6e-3, "weight_decay": 0.05,
    "warmup": 0.05, "final": 1e-4, "tilt": math.pi / 64, "elastic": True, "drop": True, "colour": True,
    "crop": 102_400, "evaluate_every": 800, "checkpoint_every": 800,
}  # fmt: skip


def _single(value: Any) -> Any:
    """The number of a list of one, as words of the command line are lists."""
    return value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value


class Segment3dRecipe(Recipe):
    """PTv3, which names the class of every point of a LiDAR scan or a room.

    The data are a folder of SemanticKITTI, nuScenes-lidarseg or Pointcept's arrays; without one they are scans of a
    virtual LiDAR.
    """

    task: ClassVar[str] = "polymix.domains.segment3d.task:Segment3dTask"
    after_training: ClassVar[tuple[str, ...]] = ("piece",)
    takes_plan: ClassVar[bool] = True
    of_default: ClassVar[tuple[str, ...]] = ("question",)
    only_beside: ClassVar[tuple[Beside, ...]] = (
        *Recipe.only_beside,
        ("cpe", (True,), ("legacy_unpooling",)),
        ("one_cycle", (False,), ("cosine_from",)),
    )
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tiny": {"steps": 2, "evaluate_every": 2, "voxel": 1.0, "depths": (1, 1), "channels": (8, 8), "heads": (2, 2),
                 "decoder_depths": (1,), "decoder_channels": (8,), "decoder_heads": (2,), "window": 32, "scans": 4,
                 "test_scans": 2},
        "paper": _PAPER,
        "rooms": _ROOMS,
    }  # fmt: skip

    batch_size: BatchSize = 2
    steps: Steps = 400
    learning_rate: LearningRate = 3e-3
    warmup: Warmup = 0.1
    final: Final = 0.01
    weight_decay: WeightDecay = 0.01
    evaluate_every: EvaluateEvery = 400
    checkpoint_every: CheckpointEvery = 200
    mixer: Mixer = "pom"
    voxel: float = Field(0.4, ge=1e-6, description="side of a voxel in metres")
    coordinates: Literal["centred", "metres", "none"] = Field(
        "centred",
        description="how places are features: from the middle, in 10 m; x, y and z as they are; not at all",
    )
    depths: Depths = Field((1, 1, 2), min_length=1, description="blocks of the encoder's stages, which double voxels")
    channels: Counts = Field((16, 32, 64), description="of the encoder's stages")
    heads: Counts = Field((2, 4, 8), description="of the encoder's stages, for mixers that leave them open")
    decoder_depths: Depths = Field((1, 1), description="blocks of the decoder's stages, one fewer, the finest first")
    decoder_channels: Counts = Field((32, 32), description="of the decoder's stages")
    decoder_heads: Counts = Field((2, 4), description="of the decoder's stages")
    window: Annotated[Natural | tuple[Natural, ...], BeforeValidator(_single)] = Field(
        128,
        description="points of a sequence along the curve, or one a stage, the finest first; 0: whole clouds",
    )
    whole: Natural = Field(0, description="so many of the finest stages have whole clouds as sequences")
    orders: tuple[Order, ...] = Field(("z", "z-trans"), min_length=1, description=f"curves: {', '.join(ORDERS)}")
    shuffle: bool = Field(True, description="put the curves in random order in training")
    fit_curves: bool = Field(False, description="curves as deep as a batch needs, as published; False: of 16 levels")
    legacy_unpooling: bool = Field(
        False, description="position encodings after an unpooling read the encoder's features alone, as in v3m1"
    )
    host_init: HostInit = "own"
    cpe: bool = Field(False, description="position encodings by convolutions, as published; they mix neighbours too")
    match_parameters: bool = Field(False, description="size the MLPs so that every mixer has attention's parameters")
    drop_path: Share = Field(0.0, description="probability of leaving out a branch of the last block")
    lovasz: NotNegative = Field(1.0, description="weight of the Lovász-softmax loss beside cross-entropy")
    block_rate: Positive = Field(1.0, description="learning rate of the blocks as a share of the others'")
    turn: bool = Field(True, description="rotate training clouds about the vertical axis by any angle")
    turned: Fraction = Field(1.0, description="how often each rotation (turn, tilt) is done; 0.5 as published")
    flip: bool = Field(True, description="exchange left and right, and front and back, half of the time each")
    scale: Share = Field(0.05, description="training clouds change their size by up to this share")
    jitter: NotNegative = Field(0.0, description="noise of the places in metres")
    tilt: float = Field(0.0, ge=0, lt=math.pi, description="rotate about the level axes by up to so many radians")
    elastic: bool = Field(False, description="stretch training clouds at random")
    drop: bool = Field(False, description="leave out a fifth of the points, a fifth of the time")
    random_points: bool = Field(False, description="a random point of each voxel in training; False: the first")
    mix: Fraction = Field(0.0, description="how often clouds are laid over each other two by two (Mix3D)")
    colour: bool = Field(False, description="change contrast and colours")
    crop: Natural = Field(0, description="voxels of a training cloud, those nearest to a random one; 0: all")
    one_cycle: bool = Field(
        False, description="the published schedule: up from a tenth along a cosine, beta 1 from 0.95 to 0.85 and back"
    )
    piece: Count = Field(500_000, description="points that are predicted at once; larger scans go in pieces")
    question: Streets = "houses"
    scans: Count = Field(60, description="training scans of the default data")
    test_scans: Count = Field(16, description="its test scans")

    @model_validator(mode="after")
    def _stages_fit(self) -> Segment3dRecipe:
        stages = len(self.depths)
        for name, count in (("channels", stages), ("heads", stages), ("decoder_depths", stages - 1),
                            ("decoder_channels", stages - 1), ("decoder_heads", stages - 1)):  # fmt: skip
            values = getattr(self, name)
            if len(values) != count:
                raise wrong(name, repr(values), f"{count} numbers for {stages} depths", "Change one of the two.")
        if isinstance(self.window, tuple) and len(self.window) != stages:
            allowed = f"one number, or {stages} for {stages} depths"
            raise wrong("window", repr(self.window), allowed, "Change one of the two.")
        if self.whole > stages:
            raise wrong("whole", self.whole, f"at most {stages}, the number of depths", "Pass fewer.")
        return self

    @property
    def smallest_voxel(self) -> float:
        """The side of a voxel in metres, less what `scale` and `tilt` may add to a scan."""
        return self.voxel / ((1 + self.scale) * (math.sqrt(2) if self.tilt else 1.0))

    def block_names(self) -> Sequence[str]:
        """The names of the blocks, for plans."""
        parts = (("encoder", self.depths), ("decoder", self.decoder_depths[::-1]))
        return [f"{part}.{stage}.{place}" for part, depths in parts for stage, depth in enumerate(depths)
                for place in range(depth)]  # fmt: skip

    def windows(self) -> list[int | None]:
        """The points of a sequence in each stage, the finest first; None: whole clouds."""
        stages = range(len(self.depths))
        windows = [self.window for _ in stages] if isinstance(self.window, int) else self.window
        return [None if stage < self.whole else windows[stage] or None for stage in stages]
