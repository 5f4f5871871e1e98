"""The options of a training that finds objects."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from polymix.errors import OptionError, check_choice, check_int, check_number
from polymix.tasks.boxes.options import PicturesRecipe
from polymix.tasks.scenes import SAME

HOSTS = ("dense", "detr", "conditional_detr")
STEMS = ("patches", "convolutions")
STRIDES = {"dense": (8,), "detr": (32, 16), "conditional_detr": (32, 16)}  # the first is the default
OF_DETR = ("backbone", "queries", "heads", "feedforward", "dropout", "decoder_mixer", "cross_mixer",
           "backbone_learning_rate", "drop_at")  # fmt: skip


@dataclass(frozen=True)
class DetectRecipe(PicturesRecipe):
    """A detector: a stem that makes tokens of pixels, an encoder of mixers and a dense head.

    `PicturesRecipe` has the options of the data, and `TaskRecipe` those that all tasks share.

    Args:
        mixer: of every encoder layer, as on the command line: "softmax", "padre:degree=3".
        dim, depth: channels, a multiple of 16, and layers of the encoder; of DETR's decoder too.
        host: "dense", the encoder with a dense head; "detr" or "conditional_detr", those of transformers.
        stem: of "dense": "patches", three 2 × 2 convolutions, so that only mixers join squares of 8 × 8 pixels; or
            "convolutions", which see 43 × 43 pixels. None: patches where the question is "same", else convolutions.
        stride: pixels a side of a token. 8 for "dense"; 32 or 16, which has four times the tokens, for the others.
        backbone: of DETR, a ResNet of timm.
        queries, heads, feedforward, dropout: of DETR: its boxes, heads of attention, hidden units of an MLP, dropout.
        match_parameters: choose the mixer's width so that it has as many parameters as attention.
        decoder_mixer, cross_mixer: of DETR's decoder, between queries and from queries to the picture; None: attention.
        backbone_learning_rate: of DETR's backbone.
        drop_at: share of DETR's steps after which learning rates are a tenth.
    """

    steps: int = 3000
    learning_rate: float = 2e-3
    final: float = 0.02
    scenes: int = 6000
    evaluate_every: int = 1000
    checkpoint_every: int = 500
    log_every: int = 50
    mixer: str = "softmax"
    dim: int = 64
    depth: int = 3
    host: str = "dense"
    stem: str | None = None
    question: str = SAME
    stride: int | None = None
    backbone: str = "resnet50"
    queries: int = 100
    heads: int = 8
    feedforward: int = 2048
    dropout: float = 0.1
    match_parameters: bool = False
    decoder_mixer: str | None = None
    cross_mixer: str | None = None
    backbone_learning_rate: float = 1e-5
    drop_at: float = 2 / 3

    takes_plan: ClassVar[bool] = True
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tiny": {"steps": 4, "scenes": 16, "test_scenes": 8, "batch_size": 8, "dim": 16, "depth": 1},
        "paper": {
            "host": "detr", "image_size": 1344, "batch_size": 16, "epochs": 300, "learning_rate": 1e-4,
            "weight_decay": 1e-4, "clip": 0.1, "betas": (0.9, 0.999), "warmup": 0.0, "dim": 256, "depth": 6,
            "short_sides": tuple(range(480, 801, 32)), "long_side": 1333, "flip": True, "crops": True,
        },
    }  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("match_parameters", self.match_parameters, (True, False))
        check_int("depth", self.depth, 1)
        check_int("dim", self.dim, 16)
        if self.dim % 16:
            raise OptionError("dim", self.dim, "a multiple of 16", "For example, 64.")
        check_choice("host", self.host, HOSTS)
        if self.stem is not None:
            check_choice("stem", self.stem, STEMS)
            if self.host != "dense":
                raise OptionError(
                    "stem", f"{self.stem!r} with host={self.host}", "None: it has a backbone", "Leave it out."
                )
        if self.stride is not None:
            check_choice("stride", self.stride, STRIDES[self.host])
        for name in ("queries", "heads", "feedforward"):
            check_int(name, getattr(self, name), 1)
        check_number("dropout", self.dropout, 0.0, 1.0, "a share below 1", 0.1)
        check_number("drop_at", self.drop_at, 0.0, 1.0 + 1e-9, "a share of the steps", 2 / 3)
        check_number("backbone_learning_rate", self.backbone_learning_rate, 0.0, math.inf, "at least 0", 1e-5)
        if self.host == "dense":
            changed = [name for name in OF_DETR if getattr(self, name) != type(self).__dataclass_fields__[name].default]
            if changed:
                raise OptionError(changed[0], 'it with host="dense"', "a host that has it", "Pass host=detr.")
        elif self.final != type(self).final:
            raise OptionError("final", f"{self.final} with DETR", "drop_at, which DETR's schedule has", "Leave it out.")
        elif self.dim % self.heads:
            raise OptionError("heads", self.heads, f"a divisor of dim={self.dim}", "Change one of the two.")

    def layers(self) -> Sequence[str]:
        """The names of the encoder layers of the host "dense", for plans."""
        return [f"blocks.{place}" for place in range(self.depth)]

    @property
    def stem_of_host(self) -> str:
        """What makes the tokens of the host "dense"."""
        return self.stem or STEMS[not (self.makes_data and self.question == SAME)]

    @property
    def stride_of_host(self) -> int:
        """Pixels a side of a token."""
        return self.stride or STRIDES[self.host][0]
