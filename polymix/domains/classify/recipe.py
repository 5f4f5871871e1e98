"""The options of a training that classifies images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field, model_validator

from polymix.domains.classify.published import DEIT, PUBLISHED
from polymix.train.data.idx import FASHION
from polymix.train.hosts import registered as registered_host
from polymix.train.hosts import with_its_mixer
from polymix.train.option_effects import Beside
from polymix.train.recipe import (
    KEEP,
    BatchSize,
    Count,
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
    wrong,
)

DIGITS = "digits"  # as --data of a comparison
SCENE = 16  # pixels a side of the digit scenes
OWN = ("patch_size", "dim", "depth", "heads", "mlp_ratio", "class_token")  # of our model, which a host of timm has not
C = TypeVar("C", bound="ClassifyRecipe")
Milestone = Annotated[float, Field(gt=0, lt=1)]


class ClassifyRecipe(Recipe):
    """A vision transformer, or a model of timm, that classifies images.

    The data are a folder with a sub-folder of images per class, with CIFAR-100's own files or with idx files, as MNIST
    has them, or fashion-mnist, which is Debian's package; without any they are handwritten digits. A host that
    polymix.timm names, such as qt_vit_b1, also sets the mixer.
    """

    task: ClassVar[str] = "polymix.domains.classify.task:ClassifyTask"
    takes_plan: ClassVar[bool] = True
    times_lengths: ClassVar[bool] = True
    fits_source: ClassVar[tuple[str, ...]] = ("layout",)
    of_default: ClassVar[tuple[str, ...]] = ("default_data",)
    reading: ClassVar[tuple[str, ...]] = ("broken", "allow_pickle")
    names: ClassVar[tuple[str, ...]] = (FASHION,)
    after_training: ClassVar[tuple[str, ...]] = ("crop", "interpolation")
    only_beside: ClassVar[tuple[Beside, ...]] = (
        *Recipe.only_beside,
        ("host", (None,), OWN),
        ("host", (), ("host_init", "host_depth", "sizes", "drop_path", "norm_images")),
        ("drop_path", (), ("drop_path_rises",)),
        ("schedule", ("cosine",), ("final", "cosine_from")),
        ("schedule", ("steps",), ("milestones",)),
        ("optimizer", ("adamw",), ("betas",)),
        ("optimizer", ("sgd",), ("momentum",)),
        ("augment", (True,), ("auto_augment",)),
        ("data", (), ("allow_pickle", "broken")),
        ("mixup", (), ("switch",)),
        ("cutmix", (), ("switch",)),
    )
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tiny": {"steps": 4, "dim": 8, "depth": 1, "evaluate_every": 4}, "paper": DEIT, **PUBLISHED,
    }  # fmt: skip

    batch_size: BatchSize = 64
    steps: Steps = 700
    learning_rate: LearningRate = 2e-3
    warmup: Warmup = 0.2
    final: Final = 0.0
    mixer: Mixer = Field("pom", description="mixer of every block, such as padre:degree=3; keep: the host's own")
    default_data: Literal["digits", "scenes"] = Field(
        "digits", description="without data: scikit-learn's digits, or scenes of four, one of which points at another"
    )
    image_size: Count = Field(16, description="side in pixels to which images are resized and cropped")
    patch_size: Count = Field(2, description="side of a token in pixels, a divisor of the image size")
    dim: Count = Field(32, description="channels")
    depth: int = Field(2, ge=1, le=10_000, description="blocks")
    heads: Count | None = Field(None, description="heads of mixers that leave them open; None: the mixer's default")
    mlp_ratio: Positive = Field(4.0, description="hidden units of the MLP per channel")
    class_token: bool = Field(False, description="classify by a token of its own instead of the mean of all tokens")
    label_smoothing: Share = Field(0.1, description="share of each label that is spread over all classes")
    allow_pickle: bool = Field(False, description="read cifar-100-python, which can run any code: trusted files alone")
    host: str | None = Field(
        None, min_length=1, description="a model of timm, such as deit_tiny_patch16_224; None: our own transformer"
    )
    host_depth: Count | None = Field(None, description="blocks of the host, where timm takes depth; None: its own")
    match_parameters: bool = Field(False, description="size the mixer so that it has as many parameters as attention")
    host_init: HostInit = "own"
    drop_path: Share = Field(0.0, description="highest rate at which the host's residual branches are dropped")
    drop_path_rises: bool = Field(False, description="raise the rates from 0 after the warm-up to their own at the end")
    optimizer: Literal["adamw", "sgd"] = Field("adamw", description="sgd: with Nesterov's momentum")
    momentum: Share = Field(0.9, description="of sgd")
    learning_rate_for: Count | None = Field(
        None, description="batch for which the learning rate holds; it is scaled to the batch size; None: it is not"
    )
    schedule: Literal["cosine", "steps"] = Field(
        "cosine", description="how the learning rate falls; steps: to a tenth at each milestone"
    )
    milestones: tuple[Milestone, ...] = Field((), description="of schedule=steps, shares of the training")
    loss: Literal["cross_entropy", "bce"] = Field("cross_entropy", description="bce: a binary one for each class")
    stream: bool | None = Field(
        None,
        description="decode pictures when used; None: with augment, crop or interpolation, or if too many",
    )
    broken: Literal["skip", "refuse"] = Field("skip", description="what becomes of pictures that cannot be read")
    augment: bool = Field(False, description="train on random crops and mirror images, by timm")
    auto_augment: str | None = Field(None, description="timm's string, such as rand-m9-mstd0.5-inc1; None: off")
    mixup: NotNegative = Field(0.0, description="parameter of mixup's Beta distribution; 0: off")
    cutmix: NotNegative = Field(0.0, description="parameter of cutmix's Beta distribution; 0: off")
    switch: Fraction = Field(0.5, description="share of cutmix where mixup is on too")
    erasing: Fraction = Field(0.0, description="share of the images in which a random rectangle becomes noise")
    repeats: int = Field(1, ge=1, le=100, description="how often an image comes in a row, each time augmented anew")
    sizes: tuple[Count, ...] | None = Field(
        None, description="sides of which each batch gets one by chance; None: the image size"
    )
    norm_images: Natural = Field(
        0, description="images by which batch norms are estimated anew before each evaluation; 0: none"
    )
    crop: float = Field(1.0, gt=0, le=1, description="share of the side of a test picture that is kept")
    interpolation: Literal["bilinear", "bicubic"] = Field("bilinear", description="of resized pictures")

    @model_validator(mode="before")
    @classmethod
    def _host_of_polymix(cls, options: dict[str, Any]) -> dict[str, Any]:
        """A host that `polymix.timm` names brings its mixer."""
        registered = registered_host(options.get("host"))
        if registered is None:
            return options
        return with_its_mixer(options, "host", registered) | ({"match_parameters": True} if registered[2] else {})

    @model_validator(mode="after")
    def _options_fit(self) -> ClassifyRecipe:
        if self.image_size % self.patch_size:
            got = f"{self.patch_size} with image_size={self.image_size}"
            raise wrong("patch_size", got, "a divisor of the image size", "Change one of the two.")
        if self.sizes is not None and not self.sizes:
            raise wrong("sizes", repr(self.sizes), "sides in pixels, or None", "Pass sizes=128,160, say.")
        for name, ignored, other, cure in (
            ("milestones", self.schedule == "steps" and not self.milestones, "schedule=steps", "milestones=…"),
            ("stream", self.stream is False and self.looks_again, "augment, crop or interpolation", "stream=True"),
            ("mixer", self.host is None and self.mixer == KEEP, "no host", "host=deit_tiny_patch16_224"),
        ):
            if ignored:
                raise wrong(name, f"{getattr(self, name)!r} with {other}", "options that fit", f"Use {cure}.")
        if (self.mixup or self.cutmix) and self.part_size % 2:
            got = f"{self.batch_size} with accumulate={self.accumulate} and mixup or cutmix"
            raise wrong("batch_size", got, "an even number of images at once", "They are mixed in pairs.")
        return self

    @classmethod
    def for_comparison(cls, data: str | None, options: Mapping[str, Any], quick: bool) -> dict[str, Any]:
        """A small transformer of three blocks, on scenes, "digits", "fashion-mnist" or a folder; tested once."""
        chosen: dict[str, Any] = {"evaluate_every": None, "data": None if data == DIGITS else data, "image_size": 32}
        if options.get("host") is None:
            chosen |= {"dim": 64, "depth": 3, "heads": 4, "mlp_ratio": 2.0, "patch_size": 2 if data == DIGITS else 4}
        epochs: float = 8 if quick else 30
        if data is None:
            chosen |= {"default_data": "scenes", "image_size": SCENE, "learning_rate": 3e-3}
            epochs = 2 if quick else 9  # by 6 attention is not at its best: docs/research/tried.md
        if data == DIGITS:
            chosen |= {"image_size": 8}
        if data == FASHION:  # 60,000 pictures
            chosen |= {"image_size": 28}
            epochs = 0.2 if quick else 1
        return chosen if options.get("steps") is not None else {**chosen, "epochs": epochs}

    def changed(self: C, **options: Any) -> C:
        registered = registered_host(options.get("host"))
        if registered is not None:  # in place of the mixer that this recipe has
            options.setdefault("mixer", registered[0])
        return super().changed(**options)

    @property
    def looks_again(self) -> bool:
        """Whether pictures are not used as they would lie in memory."""
        return self.augment or self.crop != 1 or self.interpolation != "bilinear"

    @property
    def scaled_rate(self) -> float:
        """The highest learning rate, for this batch size."""
        share = 1.0 if self.learning_rate_for is None else self.batch_size / self.learning_rate_for
        return self.learning_rate * share
