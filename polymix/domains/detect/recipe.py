"""The options of a training that finds objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from polymix.train.data.boxes.options import PicturesRecipe, Question, Scenes
from polymix.train.option_effects import Beside
from polymix.train.recipe import (
    CheckpointEvery,
    Count,
    EvaluateEvery,
    Final,
    HostInit,
    LearningRate,
    LogEvery,
    Mixer,
    NotNegative,
    Share,
    Steps,
    wrong,
)

DETR = ("detr", "conditional_detr")
STRIDES = {"dense": (8,), **dict.fromkeys(DETR, (32, 16))}  # the first is the default
DIM_MULTIPLE = 16  # of channels: the dense host's stem halves them, and its group norms have 8 groups


class DetectRecipe(PicturesRecipe):
    """A detector: a stem that makes tokens of pixels, an encoder of mixers and a dense head; or DETR.

    The data are a folder in COCO's or VOC's layout; without one they are digits on photographs.
    """

    task: ClassVar[str] = "polymix.domains.detect.task:DetectTask"
    takes_plan: ClassVar[bool] = True
    only_beside: ClassVar[tuple[Beside, ...]] = (
        *PicturesRecipe.only_beside,
        ("host", DETR, ("backbone", "queries", "heads", "feedforward", "dropout", "decoder_mixer", "cross_mixer",
                        "backbone_learning_rate", "drop_at", "host_init")),
        ("host", ("dense",), ("stem", "final", "cosine_from")),
    )  # fmt: skip
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tiny": {"steps": 4, "evaluate_every": 4, "scenes": 16, "test_scenes": 8, "batch_size": 8, "dim": 16,
                 "depth": 1},
        # Carion et al. 2020, section 4 and appendix A.4, as PADRe trains it (section 4.2).
        "paper": {
            "host": "detr", "image_size": 1344, "batch_size": 16, "epochs": 300.0, "learning_rate": 1e-4,
            "backbone_learning_rate": 1e-5, "drop_at": 2 / 3, "weight_decay": 1e-4, "decay": "all", "clip": 0.1,
            "betas": (0.9, 0.999), "warmup": 0.0, "ema": 0.0, "keep": "last", "backbone": "resnet50", "stride": 32,
            "dim": 256, "depth": 6, "queries": 100, "heads": 8, "feedforward": 2048, "dropout": 0.1,
            "match_parameters": False, "host_init": "published", "short_sides": tuple(range(480, 801, 32)),
            "long_side": 1333, "flip": True, "crops": True,
        },
    }  # fmt: skip

    steps: Steps = 3000
    learning_rate: LearningRate = 2e-3
    final: Final = 0.02
    scenes: Scenes = 6000
    evaluate_every: EvaluateEvery = 1000
    checkpoint_every: CheckpointEvery = 500
    log_every: LogEvery = 50
    mixer: Mixer = "softmax"
    question: Question = "same"
    dim: Count = Field(64, description="channels of the encoder, a multiple of 16; of DETR's decoder too")
    depth: Count = Field(3, description="layers of the encoder; of DETR's decoder too")
    host: Literal["dense", "detr", "conditional_detr"] = Field(
        "dense", description="the encoder with a dense head, or a detector of transformers"
    )
    stem: Literal["patches", "convolutions"] | None = Field(
        None,
        description="of dense: patches, so that only mixers join squares of 8 × 8 pixels, or convolutions, which see"
        " 43 × 43; None: patches where the question is same, else convolutions",
    )
    stride: int | None = Field(
        None, ge=1, description="pixels a side of a token: 8 for dense; 32, or 16 with four times the tokens, for DETR"
    )
    backbone: str = Field(
        "resnet50",
        min_length=1,
        description="of DETR: a model of timm or polymix.timm with maps of strides 4 to 32",
    )
    queries: Count = Field(100, description="of DETR: boxes of a picture")
    heads: Count = Field(8, description="of DETR: heads of its attention, a divisor of dim")
    feedforward: Count = Field(2048, description="of DETR: hidden units of its MLPs")
    dropout: Share = Field(0.1, description="of DETR")
    match_parameters: bool = Field(False, description="give the mixer as many parameters as attention has")
    decoder_mixer: str | None = Field(
        None, min_length=1, description="of DETR's decoder, between queries; None: attention"
    )
    cross_mixer: str | None = Field(
        None, min_length=1, description="of DETR's decoder, from queries to the picture; None: attention"
    )
    host_init: HostInit = "own"
    backbone_learning_rate: NotNegative = Field(1e-5, description="of DETR's backbone")
    drop_at: float = Field(2 / 3, ge=0, le=1, description="share of DETR's steps after which rates are a tenth")

    @model_validator(mode="after")
    def _options_fit_the_host(self) -> DetectRecipe:
        if self.dim % DIM_MULTIPLE:
            raise wrong("dim", self.dim, f"a multiple of {DIM_MULTIPLE}", "For example, 64.")
        strides = STRIDES[self.host]
        if self.stride not in (None, *strides):
            allowed = f"{' or '.join(map(str, strides))} with host={self.host}"
            raise wrong("stride", self.stride, allowed, "Leave it out.")
        if self.host in DETR and self.dim % self.heads:
            raise wrong("heads", self.heads, f"a divisor of dim={self.dim}", "Change one of the two.")
        return self

    @property
    def stem_of_host(self) -> str:
        """What makes the tokens of the host "dense"."""
        return self.stem or ("patches" if self.synthetic and self.question == "same" else "convolutions")

    @property
    def stride_of_host(self) -> int:
        """Pixels a side of a token."""
        return self.stride or STRIDES[self.host][0]
