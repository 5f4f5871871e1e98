"""The options of a training on point clouds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from polymix.errors import OptionError, check_choice, check_int, check_number
from polymix.models.points import ORDERS
from polymix.tasks.recipe import TaskRecipe

MOST_CLASSES = 255
# Wu et al. 2024, outdoors, and Pointcept's configuration for nuScenes; none is published for SemanticKITTI.
_PAPER: Mapping[str, Any] = {
    "voxel": 0.05, "depths": (2, 2, 2, 6, 2), "channels": (32, 64, 128, 256, 512), "heads": (2, 4, 8, 16, 32),
    "decoder_depths": (2, 2, 2, 2), "decoder_channels": (64, 64, 128, 256), "decoder_heads": (4, 4, 8, 16),
    "window": 1024, "orders": ORDERS, "cpe": True, "drop_path": 0.3, "batch_size": 12, "epochs": 50.0,
    "learning_rate": 2e-3, "block_rate": 0.1, "weight_decay": 0.005, "warmup": 0.04, "final": 1e-4, "one_cycle": True,
    "betas": (0.9, 0.999), "scale": 0.1, "jitter": 0.005, "evaluate_every": 1595, "checkpoint_every": 1595,
}  # fmt: skip
# The same indoors: Pointcept's configuration for ScanNet.
_ROOMS: Mapping[str, Any] = {
    **_PAPER, "voxel": 0.02, "epochs": 800.0, "learning_rate": 6e-3, "weight_decay": 0.05, "warmup": 0.05,
    "tilt": math.pi / 64, "elastic": True, "drop": True, "mix": 0.8, "colour": True, "crop": 102_400,
    "evaluate_every": 1000, "checkpoint_every": 1000,
}  # fmt: skip


@dataclass(frozen=True)
class PointsRecipe(TaskRecipe):
    """PTv3, which names the class of every point. `TaskRecipe` has the options that all tasks share.

    Args:
        data: a folder of SemanticKITTI, nuScenes-lidarseg or Pointcept's arrays; None: scans of a made LiDAR.
        mixer: of every block, as on the command line: "pom", "padre:degree=3".
        voxel: side of a voxel in metres.
        depths, channels, heads: of the encoder's stages, which double the voxels. decoder_depths, decoder_channels,
            decoder_heads: of the decoder's, one fewer, the finest first. heads are for mixers that leave them open.
        window: points of a sequence along the curve, or one number for each stage, the finest first; 0: whole clouds.
        whole: how many of the finest stages have whole clouds as sequences, whatever `window` says.
        orders: the curves: "z", "z-trans", "hilbert", "hilbert-trans".
        shuffle: put the curves in random order in training.
        cpe: convolutional position encodings, as published. They mix neighbours by themselves.
        drop_path: probability of leaving out a branch of the last block.
        lovasz: weight of the Lovász-softmax loss beside cross-entropy.
        block_rate: learning rate of the blocks as a share of the others'.
        turn: rotate training clouds about the vertical axis by any angle. flip: exchange left and right, and front and
            back, half of the time each. scale: sizes change by up to this share. jitter: noise in metres.
        tilt: rotate about the two level axes by up to so many radians. elastic: stretch the cloud at random.
        drop: leave out a fifth of the points, a fifth of the time. mix: how often clouds are laid over each other two
            by two (Mix3D). colour: change contrast and colours. crop: so many voxels of a training cloud, those nearest
            to a random one; 0: all.
        one_cycle: the schedule as published: the rate rises from a tenth along a cosine, and AdamW's first beta goes
            from 0.95 to 0.85 and back, whatever `betas` says.
        piece: points of a scan that are computed at once in evaluation and prediction; larger scans go in pieces, each
            with a rim of its neighbours.
        scans, test_scans: how many the default data has.
    """

    batch_size: int = 2
    steps: int = 400
    learning_rate: float = 3e-3
    warmup: float = 0.1
    final: float = 0.01
    weight_decay: float = 0.01
    evaluate_every: int = 400
    checkpoint_every: int = 200
    mixer: str = "pom"
    voxel: float = 0.4
    depths: Sequence[int] = (1, 1, 2)
    channels: Sequence[int] = (16, 32, 64)
    heads: Sequence[int] = (2, 4, 8)
    decoder_depths: Sequence[int] = (1, 1)
    decoder_channels: Sequence[int] = (32, 32)
    decoder_heads: Sequence[int] = (2, 4)
    window: int | Sequence[int] = 128
    whole: int = 0
    orders: Sequence[str] = ("z", "z-trans")
    shuffle: bool = True
    cpe: bool = False
    drop_path: float = 0.0
    lovasz: float = 1.0
    block_rate: float = 1.0
    turn: bool = True
    flip: bool = True
    scale: float = 0.05
    jitter: float = 0.0
    tilt: float = 0.0
    elastic: bool = False
    drop: bool = False
    mix: float = 0.0
    colour: bool = False
    crop: int = 0
    one_cycle: bool = False
    piece: int = 500_000
    scans: int = 60
    test_scans: int = 16

    takes_plan: ClassVar[bool] = True
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tiny": {"steps": 2, "evaluate_every": 2, "voxel": 1.0, "depths": (1, 1), "channels": (8, 8), "heads": (2, 2),
                 "decoder_depths": (1,), "decoder_channels": (8,), "decoder_heads": (2,), "window": 32, "scans": 4,
                 "test_scans": 2},
        "paper": _PAPER,
        "rooms": _ROOMS,
    }  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("voxel", self.voxel, 1e-6, math.inf, "a number above 0", 0.05)
        stages = len(self.depths)
        for name, count, low in (
            ("depths", stages, 0), ("channels", stages, 1), ("heads", stages, 1), ("decoder_depths", stages - 1, 0),
            ("decoder_channels", stages - 1, 1), ("decoder_heads", stages - 1, 1),
        ):  # fmt: skip
            values = getattr(self, name)
            if len(values) != count or not count:
                raise OptionError(name, repr(values), f"{count} numbers for {stages} depths", "Change one of the two.")
            for value in values:
                check_int(name, value, low)
        windows = [self.window] if isinstance(self.window, int) else list(self.window)
        if not isinstance(self.window, int) and len(windows) != stages:
            raise OptionError(
                "window", repr(self.window), f"one number, or {stages} for {stages} depths", "Change one."
            )
        for window in windows:
            check_int("window", window, 0)
        check_int("whole", self.whole, 0, stages)
        check_int("crop", self.crop, 0)
        check_int("piece", self.piece, 1)
        for name in ("shuffle", "cpe", "turn", "flip", "elastic", "drop", "colour", "one_cycle"):
            check_choice(name, getattr(self, name), (True, False))
        if not self.orders:
            raise OptionError("orders", repr(self.orders), f"some of {', '.join(ORDERS)}", "Pass at least one.")
        for order in self.orders:
            check_choice("orders", order, ORDERS)
        check_number("block_rate", self.block_rate, 1e-9, math.inf, "a number above 0", 1)
        for name, high in (
            ("lovasz", math.inf),
            ("jitter", math.inf),
            ("scale", 1.0),
            ("drop_path", 1.0),
            ("tilt", math.pi),
            ("mix", 1.0 + 1e-9),
        ):
            check_number(name, getattr(self, name), 0.0, high, "a number of at least 0", 0)
        for name in ("scans", "test_scans"):
            check_int(name, getattr(self, name), 1)

    def check_options(self) -> dict[str, Any]:
        """The side of a voxel, less what `scale` and `tilt` may add to a scan."""
        return {"voxel": self.voxel / ((1 + self.scale) * (math.sqrt(2) if self.tilt else 1.0))}

    def layers(self) -> Sequence[str]:
        """The names of the blocks, for plans."""
        parts = (("encoder", self.depths), ("decoder", self.decoder_depths[::-1]))
        return [f"{part}.{stage}.{place}" for part, depths in parts for stage, depth in enumerate(depths)
                for place in range(depth)]  # fmt: skip

    def windows(self) -> list[int | None]:
        """The points of a sequence in each stage, the finest first; None: whole clouds."""
        stages = range(len(self.depths))
        windows = [self.window for _ in stages] if isinstance(self.window, int) else self.window
        return [None if stage < self.whole else windows[stage] or None for stage in stages]
