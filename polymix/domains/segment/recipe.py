"""The options of a training that gives every pixel a class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from polymix.train.option_effects import Beside
from polymix.train.recipe import (
    KEEP,
    CheckpointEvery,
    Count,
    EvaluateEvery,
    Final,
    HostInit,
    LearningRate,
    LogEvery,
    Mixer,
    Recipe,
    Steps,
    wrong,
)

STRIDE = 8  # pixels a side of a token of the host "patches"
HOST_STRIDE = 32  # of the coarsest map of the other hosts
Scale = Annotated[float, Field(gt=0, le=16)]
Factor = Annotated[float, Field(gt=0, le=1e6)]


class SegmentRecipe(Recipe):
    """A model that gives every pixel of a picture a class.

    The data are a folder as ADE20K, Cityscapes or VOC has it, or pictures and label maps of equal names; without one
    they are digits on photographs.
    """

    task: ClassVar[str] = "polymix.domains.segment.task:SegmentTask"
    after_training: ClassVar[tuple[str, ...]] = ("stride",)
    fits_source: ClassVar[tuple[str, ...]] = ("layout",)
    of_default: ClassVar[tuple[str, ...]] = ("question",)
    takes_plan: ClassVar[bool] = True
    only_beside: ClassVar[tuple[Beside, ...]] = (
        *Recipe.only_beside,
        ("host", ("patches",), ("dim", "depth")),
        ("host", ("efficientvit",), ("backbone", "head_width", "head_depth", "head_expand", "head_widen")),
        ("host", ("segformer",), ("size", "host_init")),
        ("schedule", ("cosine",), ("cosine_from",)),
        ("schedule", ("polynomial",), ("power",)),
        ("data", (), ("classes",)),
    )
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tiny": {"steps": 4, "scenes": 12, "test_scenes": 4, "batch_size": 4, "dim": 16, "depth": 1,
                 "evaluate_every": 4},
        # SegFormer-B0 on ADE20K: Xie et al. 2021, Section 4.1.
        "paper": {"host": "segformer", "size": "b0", "crop": 512, "short_side": 512, "batch_size": 16,
                  "steps": 160_000, "learning_rate": 6e-5, "head_rate": 10.0, "betas": (0.9, 0.999),
                  "weight_decay": 0.01, "warmup": 1500 / 160_000, "final": 0.0, "schedule": "polynomial", "power": 1.0,
                  "scale": (0.5, 2.0), "flip": True, "distort": True, "largest_share": 0.75, "clip": None,
                  "host_init": "published", "decay": "all_but_norms", "ema": 0.0, "keep": "last",
                  "evaluate_every": 16_000, "checkpoint_every": 16_000},
    }  # fmt: skip

    steps: Steps = 2400
    learning_rate: LearningRate = 2e-3
    final: Final = 0.02
    evaluate_every: EvaluateEvery = 400
    checkpoint_every: CheckpointEvery = 400
    log_every: LogEvery = 50
    mixer: Mixer = Field("pom", description="mixer of every attention, such as padre:degree=3; keep: the host's own")
    host_init: HostInit = "own"
    match_parameters: bool = Field(False, description="size the mixer so that it has as many parameters as attention")
    host: Literal["patches", "efficientvit", "segformer"] = Field(
        "patches", description="a small encoder over 8 × 8 pixels; EfficientViT-Seg on a model of timm; SegFormer"
    )
    backbone: str = Field(
        "efficientvit_b0", min_length=1, description="of efficientvit: a model of timm with maps of strides 8, 16, 32"
    )
    dim: int = Field(64, ge=4, multiple_of=4, description="channels of patches, a multiple of 4")
    depth: Count = Field(3, description="layers of patches")
    size: Literal["tiny", "b0", "b1", "b2", "b3", "b4", "b5"] = Field(
        "b0", description="of segformer: as published, or tiny"
    )
    head_width: Count = Field(
        32, description="channels of the head of efficientvit; as published, 64, 96 and 128 for b1, b2 and b3"
    )
    head_depth: Count = Field(1, description="MBConv blocks of the head of efficientvit; 3 for b1 to b3")
    head_expand: Count = Field(4, description="how many times wider the head of efficientvit is inside its blocks")
    head_widen: Count | None = Field(
        4, description="and before the classes; None: there is no such layer, as published for ADE20K"
    )
    crop: int = Field(
        32, ge=8, description="side in pixels of what the model sees at once; a multiple of 8 for patches, else of 32"
    )
    stride: Count | None = Field(
        None, description="pixels from one window to the next in pictures larger than the crop; None: ¾ of the crop"
    )
    short_side: Count | None = Field(
        None, description="resize pictures to this short side first, in training and in use; None: leave them"
    )
    scale: tuple[Scale, Scale] = Field(
        (1.0, 1.0), description="smallest and largest factor by which training pictures are resized at random"
    )
    flip: bool = Field(False, description="mirror half of the training pictures")
    distort: bool = Field(
        False, description="change brightness, contrast, saturation and hue of training pictures at random"
    )
    largest_share: float = Field(
        1.0, gt=0, le=1, description="of one class in a crop: up to ten are drawn until none has more; 1: the first"
    )
    schedule: Literal["cosine", "polynomial"] = Field(
        "cosine", description="how the learning rate falls; polynomial: as (1 − done) ** power after the warm-up"
    )
    power: Factor = Field(1.0, description="of the polynomial")
    head_rate: Factor = Field(1.0, description="how many times higher the head's learning rate is")
    classes: int | None = Field(
        None, ge=2, le=255, description="how many there are; None: as the layout names, or as the labels show"
    )
    question: Literal["what", "which"] = Field(
        "what", description="of the default data: which digit a pixel shows, or which of the three is how large"
    )
    scenes: Count = Field(6000, description="training pictures of the default data, at most 128 pixels a side")
    test_scenes: Count = Field(200, description="its test pictures")

    @model_validator(mode="after")
    def _options_fit(self) -> SegmentRecipe:
        multiple = STRIDE if self.host == "patches" else HOST_STRIDE
        if self.crop % multiple:
            raise wrong("crop", self.crop, f"a multiple of {multiple} for {self.host}", "For example, 512.")
        if self.stride is not None and self.stride > self.crop:
            raise wrong("stride", self.stride, f"an integer from 1 to {self.crop}, the crop", "Lower it.")
        if self.scale[0] > self.scale[1]:
            raise wrong("scale", repr(self.scale), "the smaller factor first", "Pass scale=0.5,2, say.")
        if self.mixer == KEEP:
            if self.host == "patches":
                allowed = "a mixer: this host has no attention of its own"
                raise wrong("mixer", "'keep' for host=patches", allowed, "Pass a mixer, such as softmax.")
            for name, value in (("match_parameters", False), ("plan", None)):
                if getattr(self, name) != value:
                    got = f"{getattr(self, name)!r} with mixer=keep"
                    raise wrong(name, got, f"{value}: nothing is replaced", "Choose a mixer.")
        return self

    @property
    def step_between(self) -> int:
        """Pixels from one window to the next."""
        return max(1, self.crop * 3 // 4) if self.stride is None else self.stride
