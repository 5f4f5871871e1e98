"""The options of a training on images: a whole run, and the schedule by which models are compared."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from polymix.errors import OptionError, check_choice, check_int, check_number
from polymix.tasks.classify.published import DEIT, PUBLISHED
from polymix.tasks.recipe import TaskRecipe, check_milestones

OPTIMIZERS, SCHEDULES, LOSSES = ("adamw", "sgd"), ("cosine", "steps"), ("cross_entropy", "bce")
BROKEN = ("skip", "refuse")
INTERPOLATIONS = ("bilinear", "bicubic")
OWN = ("patch_size", "dim", "depth", "mlp_ratio", "class_token")  # options of our model, which a host of timm has not


@dataclass(frozen=True)
class ImageRecipe(TaskRecipe):
    """A vision transformer that classifies images. `TaskRecipe` has the options that all tasks share.

    Args:
        data: a folder with one sub-folder of images per class; None: scikit-learn's handwritten digits.
        mixer: of every block, as on the command line: "pom", "padre:degree=3".
        image_size, patch_size: in pixels. Images are resized and cropped to squares.
        dim, depth, mlp_ratio: channels, blocks, and hidden units of the MLP per channel.
        class_token: classify by a token of its own instead of the mean of all tokens.
        label_smoothing: share of each label that is spread over all classes.
        allow_pickle: read pickled data sets (cifar-100-python), which can run any code.
        host: a model of timm, such as "deit_tiny_patch16_224", with the mixer in place of its attention; "keep" as
            mixer leaves it as it is. None: our own vision transformer. A name of `import polymix.timm`, such as
            "qt_vit_b1", also chooses the mixer. patch_size, dim, depth, mlp_ratio and class_token are the host's.
        host_depth: blocks of the host, where timm takes `depth`; None: its own.
        match_parameters: choose the mixer's width so that it has as many parameters as attention, as the papers do.
        drop_path: highest rate at which the host's residual branches are dropped in training.
        optimizer: "adamw" or "sgd" with Nesterov's momentum. momentum: of "sgd".
        learning_rate_for: the batch for which learning_rate holds; it is scaled to batch_size. None: it is not scaled.
        schedule: "cosine", or "steps": the rate falls to a tenth at each of milestones, shares of the training.
        loss: "cross_entropy" or "bce", a binary cross-entropy per class.
        stream: decode pictures when they are used, instead of keeping them in memory. None: with augment, crop or
            interpolation, or if they do not fit.
        broken: "skip" leaves unreadable pictures out and names them; "refuse" raises a DataError.
        augment: train on random crops and mirror images, by timm.
        auto_augment: timm's string for RandAugment, such as "rand-m9-mstd0.5-inc1"; None: off.
        mixup, cutmix: parameters of their Beta distributions; 0: off. switch: share of cutmix where both are on.
        erasing: share of the images in which a random rectangle becomes noise.
        repeats: how often an image comes in a row, each time augmented anew. An epoch has as many samples as before.
        sizes: sides of which each batch gets one by chance; None: image_size.
        norm_images: images on which batch norms are estimated anew before each evaluation; 0: none.
        crop: share of the side of a test picture that is kept. interpolation: "bilinear" or "bicubic".
    Raises:
        OptionError: an option is out of range, or means nothing without another one.
    """

    batch_size: int = 64
    steps: int = 700
    learning_rate: float = 2e-3
    warmup: float = 0.2
    final: float = 0.0
    mixer: str = "pom"
    image_size: int = 16
    patch_size: int = 2
    dim: int = 32
    depth: int = 2
    mlp_ratio: float = 4.0
    class_token: bool = False
    label_smoothing: float = 0.1
    allow_pickle: bool = False
    host: str | None = None
    host_depth: int | None = None
    match_parameters: bool = False
    drop_path: float = 0.0
    optimizer: str = "adamw"
    momentum: float = 0.9
    learning_rate_for: int | None = None
    schedule: str = "cosine"
    milestones: Sequence[float] = ()
    loss: str = "cross_entropy"
    stream: bool | None = None
    broken: str = "skip"
    augment: bool = False
    auto_augment: str | None = None
    mixup: float = 0.0
    cutmix: float = 0.0
    switch: float = 0.5
    erasing: float = 0.0
    repeats: int = 1
    sizes: Sequence[int] | None = None
    norm_images: int = 0
    crop: float = 1.0
    interpolation: str = "bilinear"

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tiny": {"steps": 4, "dim": 8, "depth": 1, "evaluate_every": 4}, "paper": DEIT, **PUBLISHED,
    }  # fmt: skip
    takes_plan: ClassVar[bool] = True
    trains_control: ClassVar[bool] = False  # the digits are solved without mixing; `polymix compare` shows it

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("image_size", "patch_size", "dim", "depth"):
            check_int(name, getattr(self, name), 1)
        if self.image_size % self.patch_size:
            got = f"{self.patch_size} with image_size={self.image_size}"
            raise OptionError("patch_size", got, "a divisor of the image size", "Change one of the two.")
        for name in ("allow_pickle", "class_token", "augment", "match_parameters"):
            check_choice(name, getattr(self, name), (True, False))
        check_number("mlp_ratio", self.mlp_ratio, 1 / self.dim, math.inf, "a number that leaves a hidden unit", 4)
        for name in ("label_smoothing", "momentum", "drop_path"):
            check_number(name, getattr(self, name), 0.0, 1.0, "a share below 1", 0.1)
        for name in ("switch", "erasing"):
            check_number(name, getattr(self, name), 0.0, 1.0 + 1e-9, "a share of at most 1", 0.25)
        for name in ("mixup", "cutmix"):
            check_number(name, getattr(self, name), 0.0, math.inf, "a number of at least 0", 0.8)
        check_number("crop", self.crop, 1e-3, 1.0 + 1e-9, "a share of at most 1", 0.875)
        for name, allowed in (
            ("optimizer", OPTIMIZERS), ("schedule", SCHEDULES), ("loss", LOSSES), ("stream", (None, True, False)),
            ("broken", BROKEN), ("interpolation", INTERPOLATIONS),
        ):  # fmt: skip
            check_choice(name, getattr(self, name), allowed)
        check_int("repeats", self.repeats, 1, 100)
        check_int("norm_images", self.norm_images, 0)
        for name in ("host_depth", "learning_rate_for"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1)
        self._check_lists()
        self._check_together()

    def _check_lists(self) -> None:
        """Raise OptionError for milestones and sizes that are out of range."""
        check_milestones(self.milestones)
        if self.sizes is not None:
            if not isinstance(self.sizes, (tuple, list)) or not self.sizes:
                raise OptionError("sizes", repr(self.sizes), "sides in pixels, or None", "Pass (128, 160), say.")
            for side in self.sizes:
                check_int("sizes", side, 1)

    def _check_together(self) -> None:
        """Raise OptionError for options that would be ignored, or that exclude each other."""
        alone = [
            ("milestones", self.schedule == "cosine" and len(self.milestones) > 0, "schedule=cosine", "schedule=steps"),
            ("milestones", self.schedule == "steps" and not len(self.milestones), "schedule=steps", "milestones=…"),
            ("auto_augment", self.auto_augment is not None and not self.augment, "augment=False", "augment=True"),
            ("stream", self.stream is False and self.looks_again, "augment, crop or interpolation", "stream=True"),
            ("mixer", self.host is None and self.mixer == "keep", "no host", "host=deit_tiny_patch16_224"),
            ("sizes", self.host is None and self.sizes is not None, "no host", "host=efficientvit_b1"),
            ("drop_path", self.host is None and self.drop_path > 0, "no host", "host=deit_tiny_patch16_224"),
            ("host_depth", self.host is None and self.host_depth is not None, "no host", "depth"),
            ("norm_images", self.host is None and self.norm_images > 0, "no host", "host=efficientvit_b1"),
        ]
        for name, wrong, other, cure in alone:
            if wrong:
                raise OptionError(name, f"{getattr(self, name)!r} with {other}", "options that fit", f"Use {cure}.")
        defaults = type(self).__dataclass_fields__
        given = [name for name in OWN if getattr(self, name) != defaults[name].default]
        if self.host is not None and given:
            got = f"{getattr(self, given[0])} with host={self.host}"
            raise OptionError(given[0], got, "no such option", "The host has its own; leave it out.")
        if (self.mixup or self.cutmix) and self.part_size % 2:
            got = f"{self.batch_size} with accumulate={self.accumulate} and mixup or cutmix"
            raise OptionError("batch_size", got, "an even number of images at once", "They are mixed in pairs.")

    @property
    def looks_again(self) -> bool:
        """Whether pictures are not used as they would lie in memory."""
        return self.augment or self.crop != 1 or self.interpolation != "bilinear"

    @property
    def scaled_rate(self) -> float:
        """The highest learning rate, for this batch size."""
        share = 1.0 if self.learning_rate_for is None else self.batch_size / self.learning_rate_for
        return self.learning_rate * share

    def check_options(self) -> dict[str, Any]:
        return {"allow_pickle": self.allow_pickle}

    def with_options(self: ImageRecipe, options: Mapping[str, Any]) -> ImageRecipe:
        """As `TaskRecipe.with_options`. A host that `import polymix.timm` names also sets its mixer.

        Raises OptionError where another mixer is named, too.
        """
        host = options.get("host")
        if isinstance(host, str) and (named := _registered(host)) is not None:
            mixer, of, matched = named
            if options.get("mixer", mixer) != mixer:
                got = f"{options['mixer']!r} with host={host}"
                raise OptionError("mixer", got, repr(mixer), f"Use host={of} for another mixer.")
            options = {**options, "mixer": mixer, "host": of, **({"match_parameters": True} if matched else {})}
        return super().with_options(options)


def _registered(name: str) -> tuple[str, str, bool] | None:
    """The mixer, the host and whether parameters are matched, of a name of polymix.timm; None for other names."""
    from polymix.timm import names

    return names().get(name)


@dataclass(frozen=True)
class Schedule:
    """How every model of a comparison is trained: AdamW, warm-up and cosine decay, cross-entropy.

    Args:
        epochs, batch_size: passes through the images, and images per step.
        learning_rate: the highest one. warmup: share of the steps in which it rises.
        weight_decay: of AdamW.
        label_smoothing: share of each label that is spread over all classes.
    """

    epochs: int = 30
    batch_size: int = 64
    learning_rate: float = 2e-3
    weight_decay: float = 0.05
    warmup: float = 0.2
    label_smoothing: float = 0.1

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
