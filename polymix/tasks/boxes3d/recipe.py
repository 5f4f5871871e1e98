"""The options of a training on boxes in LiDAR scans."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from polymix.errors import OptionError, check_choice, check_int, check_number
from polymix.models.points.center_head import NMS
from polymix.models.points.pillars import Extent
from polymix.tasks.recipe import TaskRecipe

MOST_SWEEPS = 100


@dataclass(frozen=True)
class Boxes3dRecipe(TaskRecipe):
    """CenterPoint with DSVT, which finds boxes in scans. `TaskRecipe` has the options that all tasks share.

    Args:
        data: a folder of nuScenes or of KITTI's detection set; None: drives of a made LiDAR.
        mixer: of every layer of DSVT, as on the command line: "pom", "padre:degree=3".
        sweeps: scans of a keyframe, itself and those before it. KITTI has one.
        space: (x, y, z, x, y, z) in metres, the low corner first, in the vehicle's frame: x to the front, y to the
            left.
        voxel: sides of a voxel in metres; as high as the space: pillars.
        encoder: channels of the layers over points; the last is DSVT's width.
        heads: of mixers that leave them open. hidden: channels of the MLPs. set_size: voxels of a set.
        blocks: of DSVT, two layers each. window: its sides along x and y, in voxels; every second block is shifted by
            half of it.
        depths, strides, channels: of the network over the ground. out: channels of each of its levels. stride: of its
            output, in voxels.
        head_dim, convolutions: of the head.
        turn: training scans turn about the vertical axis by up to so many degrees. scale: sizes change by up to this
            share. flip: exchange left and right, and front and back, half of the time each.
        one_cycle: the schedule as published: the rate rises from a tenth along a cosine, and AdamW's first beta goes
            from 0.95 to 0.85 and back, whatever `betas` says.
        least: the lowest score of a box. most: boxes of a sample. nms: "rotated", "circle" or "none"; `overlap` or
            `radius` in metres from which a box is dropped beside a better one.
        scenes, test_scenes: drives of the default data, with two keyframes each.
    """

    batch_size: int = 2
    steps: int = 400
    learning_rate: float = 3e-3
    warmup: float = 0.2
    final: float = 0.01
    weight_decay: float = 0.01
    clip: float = 10.0
    evaluate_every: int = 400
    checkpoint_every: int = 200
    mixer: str = "pom"
    sweeps: int = 3
    space: Sequence[float] = (-25.6, -12.8, -1.0, 25.6, 12.8, 3.0)
    voxel: Sequence[float] = (0.4, 0.4, 4.0)
    encoder: Sequence[int] = (32, 32)
    heads: int = 4
    hidden: int = 64
    set_size: int = 36
    blocks: int = 2
    window: Sequence[int] = (12, 12)
    depths: Sequence[int] = (0,)
    strides: Sequence[int] = (1,)
    channels: Sequence[int] = (32,)
    out: int = 32
    stride: int = 1
    head_dim: int = 32
    convolutions: int = 1
    turn: float = 5.0
    scale: float = 0.05
    flip: bool = False
    one_cycle: bool = False
    least: float = 0.05
    most: int = 100
    nms: str = "circle"
    overlap: float = 0.2
    radius: float = 0.5
    scenes: int = 60
    test_scenes: int = 20

    takes_plan: ClassVar[bool] = True
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tiny": {"steps": 2, "evaluate_every": 2, "voxel": (1.6, 1.6, 4.0), "encoder": (8, 8), "heads": 2, "hidden": 8,
                 "set_size": 12, "blocks": 1, "window": (6, 6), "channels": (8,), "out": 8, "head_dim": 8, "scenes": 2,
                 "test_scenes": 1, "sweeps": 2},
        # DSVT for nuScenes, which PADRe takes over; the head is CenterPoint's in place of TransFusion's.
        "paper": {"sweeps": 10, "space": (-54.0, -54.0, -3.0, 54.0, 54.0, 5.0), "voxel": (0.3, 0.3, 8.0),
                  "encoder": (128, 128), "heads": 8, "hidden": 256, "set_size": 90, "blocks": 4, "window": (30, 30),
                  "depths": (1, 2, 2), "strides": (1, 2, 2), "channels": (128, 128, 256), "out": 128, "stride": 2,
                  "head_dim": 64, "convolutions": 2, "turn": 45.0, "scale": 0.1, "flip": True, "most": 500,
                  "nms": "rotated", "batch_size": 32, "epochs": 20.0, "learning_rate": 5e-3, "weight_decay": 0.05,
                  "clip": 35.0, "warmup": 0.4, "final": 1e-5, "one_cycle": True, "evaluate_every": 879,
                  "checkpoint_every": 879},
    }  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("sweeps", self.sweeps, 1, MOST_SWEEPS)
        Extent.of(self.space, self.voxel)
        for name in ("heads", "hidden", "set_size", "blocks", "out", "stride", "head_dim", "convolutions", "scenes",
                     "test_scenes", "most"):  # fmt: skip
            check_int(name, getattr(self, name), 1)
        if not self.encoder:
            raise OptionError("encoder", "()", "channels of one layer or more", "For example, (32, 32).")
        if len(self.window) != 2:
            raise OptionError("window", repr(self.window), "two sides in voxels", "For example, (12, 12).")
        for side in self.window:
            check_int("window", side, 2)
        check_choice("flip", self.flip, (True, False))
        check_choice("one_cycle", self.one_cycle, (True, False))
        check_choice("nms", self.nms, NMS)
        for name, high, allowed in (
            ("turn", 180.1, "degrees, at most 180"), ("scale", 1.0, "a share below 1"),
            ("least", 1.0, "a share below 1"), ("overlap", 1.0, "a share below 1"), ("radius", math.inf, "metres"),
        ):  # fmt: skip
            check_number(name, getattr(self, name), 0.0, high, allowed, 0.1)

    def check_options(self) -> dict[str, Any]:
        """The sweeps that a keyframe is joined from."""
        return {"sweeps": self.sweeps}

    def layers(self) -> list[str]:
        """The names of DSVT's layers, for plans."""
        return [f"blocks.{block}.{layer}" for block in range(self.blocks) for layer in (0, 1)]
