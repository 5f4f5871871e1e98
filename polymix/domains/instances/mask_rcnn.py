"""torchvision's Mask R-CNN with small settings, and a mixer inserted into its backbone."""

from __future__ import annotations

from typing import Any

from torch import nn

from polymix.domains.instances.recipe import InstancesRecipe
from polymix.train.data.boxes.detectors import insert_mixer
from polymix.train.data.vision import torchvision


def build_mask_rcnn(recipe: InstancesRecipe, classes: int) -> nn.Module:
    """The detector with fresh weights.

    With `recipe.init` batch norm, the stem and the first stage of the backbone are frozen, as published; from fresh
    weights they learn, because the first statistics would normalise nothing.
    """
    models, detection = torchvision("models"), torchvision("models.detection")
    options: dict[str, Any] = {"min_size": recipe.image_size, "max_size": recipe.image_size}
    if recipe.detector == "small":
        for mode, before, after in (("train", 200, 100), ("test", 100, 50)):
            options |= {f"rpn_pre_nms_top_n_{mode}": before, f"rpn_post_nms_top_n_{mode}": after}
        smallest = max(8, recipe.image_size // 8)
        generator = torchvision("models.detection.anchor_utils").AnchorGenerator
        anchors = generator(tuple((smallest * 2**level,) for level in range(5)), ((0.5, 1.0, 2.0),) * 5)
        options |= {"rpn_anchor_generator": anchors, "box_batch_size_per_image": 64}
    frozen = torchvision("ops").FrozenBatchNorm2d
    norm, learning = (nn.BatchNorm2d, 5) if recipe.init is None else (frozen, 3)
    extractor = torchvision("models.detection.backbone_utils")._resnet_fpn_extractor
    backbone = extractor(models.get_model(recipe.backbone, weights=None, norm_layer=norm), learning)
    model: nn.Module = detection.MaskRCNN(backbone, classes + 1, **options)
    insert_mixer(model, recipe.backbone, recipe.mixer, recipe.image_size)
    return model
