"""The options of a training that finds objects and their masks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field, model_validator

from polymix.train.data.boxes.options import (
    LAST_OF_RES4,
    NO_BLOCK,
    ImageSize,
    PicturesRecipe,
    Question,
    Scenes,
    TestScenes,
)
from polymix.train.hosts import registered as registered_host
from polymix.train.hosts import with_its_mixer
from polymix.train.option_effects import Beside
from polymix.train.recipe import BatchSize, EvaluateEvery, LearningRate, Steps, wrong

LAYERS = ((1, 2, 3), (1, 2, 3, 4), (2, 3), (2, 3, 4))
R = TypeVar("R", bound="InstancesRecipe")


class InstancesRecipe(PicturesRecipe):
    """torchvision's Mask R-CNN with a mixer before the last block of Res4, as Poly-NL (section 4.2) places it.

    In a backbone of timm the mixer takes the place of attention; a name of polymix.timm, such as qt_vit_b0, also sets
    the mixer. The data are a folder in COCO's or VOC's layout, or a wheel of stardist; without one they are digits
    on photographs.
    """

    task: ClassVar[str] = "polymix.domains.instances.task:InstancesTask"
    without_mixer: ClassVar[str | None] = NO_BLOCK
    with_masks: ClassVar[bool] = True
    only_beside: ClassVar[tuple[Beside, ...]] = (
        *PicturesRecipe.only_beside,
        ("milestones", ((),), ("final", "cosine_from")),
        ("optimizer", ("adamw",), ("betas",)),
        ("detector", ("small",), ("layers", "channels")),
    )
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tiny": {"steps": 2, "batch_size": 2, "scenes": 4, "test_scenes": 2, "channels": 8, "image_size": 64},
        # torchvision's references/detection, whose model is the baseline of Poly-NL's Table 1b; 26 epochs of COCO.
        "paper": {
            "mixer": "poly_nl:reduction=4", "backbone": "resnet50", "detector": "published", "image_size": 1344,
            "short_sides": (800,),
            "long_side": 1333, "flip": True, "crops": False, "batch_size": 16, "epochs": 26.0, "optimizer": "sgd",
            "learning_rate": 0.02, "weight_decay": 1e-4, "decay": "all", "clip": None, "warmup": 1000 / 190_580,
            "milestones": (16 / 26, 22 / 26), "ema": 0.0, "keep": "last", "evaluate_every": 7330,
            "checkpoint_every": 7330,
        },
    }  # fmt: skip

    steps: Steps = 200
    batch_size: BatchSize = 4
    learning_rate: LearningRate = 1e-3
    evaluate_every: EvaluateEvery = 200
    question: Question = "bar"
    scenes: Scenes = 1000
    test_scenes: TestScenes = 50
    image_size: ImageSize = 160
    mixer: str = Field(
        "poly_nl:reduction=4",
        min_length=1,
        description="inserted before the last block of Res4 of a ResNet; in attention's place in other backbones; none:"
        " the backbone as it is",
    )
    backbone: str = Field(
        "resnet18",
        min_length=1,
        description="below a feature pyramid: resnet18 or resnet50 of torchvision, or a model of timm or polymix.timm"
        " with maps of the strides of `layers`; with init, its norms, stem and first stage are frozen",
    )
    layers: tuple[int, ...] = Field(
        (1, 2, 3),
        description="of the backbone, of strides 4 to 32, from which the small detector's feature pyramid is built:"
        " from 1 or 2 on, to 3 or 4; a ResNet ends with the last of them",
    )
    channels: int = Field(
        64, ge=8, description="of the small detector's feature pyramid and heads; torchvision has 256"
    )
    detector: Literal["small", "published"] = Field(
        "small",
        description="anchors by image_size and few proposals; or torchvision's reference: layers 1 to 4, 256 channels,"
        " anchors of 32 to 512 pixels, 2,000 proposals in training and 1,000 in use, 512 boxes of a picture",
    )
    optimizer: Literal["adamw", "sgd"] = Field("adamw", description="sgd has a momentum of 0.9")
    milestones: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = Field(
        (), description="shares of the steps after which the learning rate is a tenth; none: it falls as a cosine"
    )

    @model_validator(mode="before")
    @classmethod
    def _backbone_of_polymix(cls, options: dict[str, Any]) -> dict[str, Any]:
        """A backbone that `polymix.timm` names brings its mixer."""
        registered = registered_host(_not_of_torchvision(options.get("backbone")))
        if registered is None or registered[2]:
            return options
        return with_its_mixer(options, "backbone", registered)

    @model_validator(mode="after")
    def _pyramid_fits(self) -> InstancesRecipe:
        if self.layers not in LAYERS:
            got, allowed = ",".join(map(str, self.layers)), "1,2,3 or 1,2,3,4 or 2,3 or 2,3,4"
            raise wrong("layers", got, allowed, "The block is in layer 3.")
        return self

    @model_validator(mode="after")
    def _milestones_rise(self) -> InstancesRecipe:
        if list(self.milestones) != sorted(set(self.milestones)):
            raise wrong("milestones", self.milestones, "rising shares of the steps", "For example, 0.6,0.8.")
        return self

    def changed(self: R, **options: Any) -> R:
        registered = registered_host(_not_of_torchvision(options.get("backbone")))
        if registered is not None:  # in place of the mixer that this recipe has
            options.setdefault("mixer", registered[0])
        return super().changed(**options)


def _not_of_torchvision(backbone: Any) -> Any:
    """The name of a backbone that timm may have; None for torchvision's, for which timm is not needed."""
    return None if not isinstance(backbone, str) or backbone in LAST_OF_RES4 else backbone
