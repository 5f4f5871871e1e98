"""torchvision's Mask R-CNN with small settings, and a mixer inserted into its backbone."""

from __future__ import annotations

from typing import Any

from torch import nn

from polymix.errors import OptionError
from polymix.tasks.boxes.data import DetectionData
from polymix.tasks.boxes.detectors import INSERTED, check_mixer, insert_mixer, load_torchvision
from polymix.tasks.instances.recipe import InstancesRecipe

HEADS = ("roi_heads.box_predictor.", "roi_heads.mask_predictor.mask_fcn_logits.", *INSERTED)


def build(recipe: InstancesRecipe, data: DetectionData) -> nn.Module:
    """The detector with fresh weights.

    With `recipe.init` batch norm, the stem and the first stage of the backbone are frozen, as published; from fresh
    weights they learn, because the first statistics would normalise nothing.
    """
    load_torchvision()
    from torchvision.models import get_model
    from torchvision.models.detection import MaskRCNN
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.backbone_utils import _resnet_fpn_extractor
    from torchvision.ops import FrozenBatchNorm2d

    options: dict[str, Any] = {"min_size": recipe.image_size, "max_size": recipe.image_size}
    if recipe.detector == "small":
        for mode, before, after in (("train", 200, 100), ("test", 100, 50)):
            options |= {f"rpn_pre_nms_top_n_{mode}": before, f"rpn_post_nms_top_n_{mode}": after}
        smallest = max(8, recipe.image_size // 8)
        anchors = AnchorGenerator(tuple((smallest * 2**level,) for level in range(5)), ((0.5, 1.0, 2.0),) * 5)
        options |= {"rpn_anchor_generator": anchors, "box_batch_size_per_image": 64}
    norm, learning = (nn.BatchNorm2d, 5) if recipe.init is None else (FrozenBatchNorm2d, 3)
    backbone = _resnet_fpn_extractor(get_model(recipe.backbone, weights=None, norm_layer=norm), learning)
    model: nn.Module = MaskRCNN(backbone, len(data.classes) + 1, **options)
    insert_mixer(model, recipe.backbone, recipe.mixer, recipe.image_size)
    return model


def check(recipe: InstancesRecipe) -> None:
    """Raise OptionError about options that contradict, before any picture is read."""
    check_mixer(recipe.mixer)
    if (recipe.data or recipe.annotations_file) and recipe.question != "what":
        raise OptionError("question", f"{recipe.question!r} with data", "it without data", "Leave it out.")


def host_name(recipe: InstancesRecipe) -> str:
    """What results call the host."""
    return f"Mask R-CNN, {recipe.backbone}"
