"""The options of a training that gives every pixel a class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from polymix.errors import OptionError, check_choice, check_int, check_number
from polymix.tasks.recipe import TaskRecipe
from polymix.tasks.scenes import QUESTIONS

HOSTS = ("patches", "efficientvit", "segformer")
SCHEDULES = ("cosine", "polynomial")
STRIDE = 8  # pixels a side of a token of the host "patches"
KEEP = "keep"


@dataclass(frozen=True)
class SegmentRecipe(TaskRecipe):
    """A model that gives every pixel a class. `TaskRecipe` has the options that all tasks share.

    Args:
        data: a folder in one of the layouts "ade20k", "cityscapes", "voc" and "folders"; None: digits on photographs.
        mixer: of every attention, as on the command line: "pom", "padre:degree=3". "keep": the attention of the host.
        match_parameters: choose the mixer's width so that it has as many parameters as attention.
        host: "patches", a small encoder over squares of 8 × 8 pixels; "efficientvit", the head of EfficientViT-Seg on
            a model of timm; "segformer", of transformers.
        backbone: of "efficientvit": the name of a model of timm with maps of strides 8, 16 and 32.
        dim, depth: channels, a multiple of 4, and layers of "patches".
        size: of "segformer": "tiny", or "b0" to "b5" as published.
        head_width, head_depth, head_expand: of EfficientViT-Seg's head: its channels, its MBConv blocks, and how many
            times wider these are inside.
        crop: sides in pixels of what the model sees at once, in training and in use; a multiple of 8, or of 32.
        stride: pixels from one window to the next where a picture is larger than the crop; None: ¾ of the crop.
        short_side: resize pictures to this short side first, in training and in use; None: leave them.
        scale: the smallest and the largest factor by which training pictures are resized, drawn anew each time.
        flip: mirror half of the training pictures.
        distort: change brightness, contrast, saturation and hue of training pictures at random.
        largest_share: of one class in a crop: up to ten crops are drawn until none has more; 1: the first is taken.
        schedule: "cosine", as in other tasks; "polynomial": (1 - done) ** power after the warm-up.
        power: of the polynomial. head_rate: the head's learning rate is so many times higher.
        classes: how many there are; None: as many as the layout names, or as the labels show.
        question: of the default data: "what", which digit a pixel belongs to; "which", whether the digit is the
            smallest, the middle or the largest of its scene.
        scenes, test_scenes: how many the default data has, of at most 128 pixels a side.
    """

    steps: int = 1200
    learning_rate: float = 2e-3
    final: float = 0.02
    evaluate_every: int = 400
    checkpoint_every: int = 400
    log_every: int = 50
    mixer: str = "pom"
    host: str = "patches"
    backbone: str = "efficientvit_b0"
    dim: int = 64
    depth: int = 3
    size: str = "b0"
    head_width: int = 32
    head_depth: int = 1
    head_expand: int = 4
    crop: int = 32
    stride: int | None = None
    short_side: int | None = None
    scale: Sequence[float] = (1.0, 1.0)
    flip: bool = False
    distort: bool = False
    largest_share: float = 1.0
    schedule: str = "cosine"
    power: float = 1.0
    head_rate: float = 1.0
    classes: int | None = None
    question: str = "what"
    scenes: int = 6000
    test_scenes: int = 200
    match_parameters: bool = False

    takes_plan: ClassVar[bool] = True
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tiny": {"steps": 4, "scenes": 12, "test_scenes": 4, "batch_size": 4, "dim": 16, "depth": 1,
                 "evaluate_every": 4},
        # SegFormer-B0 on ADE20K: Xie et al. 2021, Section 4.1.
        "paper": {"host": "segformer", "size": "b0", "crop": 512, "short_side": 512, "batch_size": 16,
                  "steps": 160_000, "learning_rate": 6e-5, "head_rate": 10.0, "betas": (0.9, 0.999),
                  "weight_decay": 0.01, "warmup": 1500 / 160_000, "final": 0.0, "schedule": "polynomial", "power": 1.0,
                  "scale": (0.5, 2.0), "flip": True, "distort": True, "largest_share": 0.75, "clip": 1e9,
                  "evaluate_every": 16_000, "checkpoint_every": 16_000},
    }  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("host", self.host, HOSTS)
        check_choice("size", self.size, ("tiny", *(f"b{place}" for place in range(6))))
        check_choice("schedule", self.schedule, SCHEDULES)
        check_choice("question", self.question, QUESTIONS)
        for name in ("flip", "distort", "match_parameters"):
            check_choice(name, getattr(self, name), (True, False))
        for name in ("depth", "head_width", "head_depth", "head_expand", "scenes", "test_scenes"):
            check_int(name, getattr(self, name), 1)
        check_int("dim", self.dim, 4)
        if self.dim % 4:
            raise OptionError("dim", self.dim, "a multiple of 4", "For example, 64.")
        multiple = STRIDE if self.host == "patches" else 32
        check_int("crop", self.crop, multiple)
        if self.crop % multiple:
            raise OptionError("crop", self.crop, f"a multiple of {multiple} for {self.host}", "For example, 512.")
        if self.stride is not None:
            check_int("stride", self.stride, 1, self.crop)
        if self.short_side is not None:
            check_int("short_side", self.short_side, 1)
        if self.classes is not None:
            check_int("classes", self.classes, 2, 255)
        scale = self.scale if isinstance(self.scale, (tuple, list)) else ()
        if (len(scale) != 2 or not all(type(value) in (int, float) and 0 < value <= 16 for value in scale)
                or scale[0] > scale[1]):  # fmt: skip
            allowed = "two factors above 0, the smaller one first"
            raise OptionError("scale", repr(self.scale), allowed, "Pass scale=0.5,2, say.")
        check_number("largest_share", self.largest_share, 1e-3, 1.0 + 1e-9, "a share of at most 1", 0.75)
        for name, usual in (("power", 1.0), ("head_rate", 10.0)):
            check_number(name, getattr(self, name), 1e-6, 1e6, "a number above 0", usual)
        if self.mixer == KEEP and self.host == "patches":
            cure = "Pass a mixer, such as softmax."
            raise OptionError(
                "mixer", "'keep' for host=patches", "a mixer: this host has no attention of its own", cure
            )
        if self.mixer == KEEP and self.match_parameters:
            got, cure = "True with mixer=keep", "Choose a mixer."
            raise OptionError("match_parameters", got, "False: nothing is replaced", cure)
        if self.mixer == KEEP and self.plan is not None:
            raise OptionError("plan", f"{self.plan!r} with mixer=keep", "None: nothing is replaced", "Choose a mixer.")

    @property
    def step_between(self) -> int:
        """Pixels from one window to the next."""
        return max(1, self.crop * 3 // 4) if self.stride is None else self.stride

    def check_options(self) -> dict[str, Any]:
        return {"classes": self.classes}

    def layers(self) -> Sequence[str]:
        """The names of the blocks of the host "patches", for plans."""
        return [f"blocks.{place}" for place in range(self.depth)]
