"""torchvision's Mask R-CNN with small settings, on a ResNet with a mixer inserted or on a backbone of timm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from polymix.convert import convert
from polymix.convert.adapters.libraries import load_library
from polymix.domains.instances.recipe import InstancesRecipe
from polymix.mixers.spec import parse_mixer
from polymix.train.data.backbones import freeze_start, places_of_maps
from polymix.train.data.boxes.detectors import insert_mixer
from polymix.train.data.boxes.options import LAST_OF_RES4, NO_BLOCK
from polymix.train.data.vision import torchvision

STRIDES = (4, 8, 16, 32)  # of the maps below the feature pyramid
CHANNELS = 256  # of the feature pyramid, as torchvision has it


def build_mask_rcnn(recipe: InstancesRecipe, classes: int) -> nn.Module:
    """The detector with fresh weights.

    With `recipe.init` batch norm, the stem and the first stage of the backbone are frozen, as published; from fresh
    weights they learn, because the first statistics would normalise nothing.
    """
    detection = torchvision("models.detection")
    options: dict[str, Any] = {"min_size": recipe.image_size, "max_size": recipe.image_size}
    if recipe.detector == "small":
        for mode, before, after in (("train", 200, 100), ("test", 100, 50)):
            options |= {f"rpn_pre_nms_top_n_{mode}": before, f"rpn_post_nms_top_n_{mode}": after}
        smallest = max(8, recipe.image_size // 8)
        generator = torchvision("models.detection.anchor_utils").AnchorGenerator
        anchors = generator(tuple((smallest * 2**level,) for level in range(5)), ((0.5, 1.0, 2.0),) * 5)
        options |= {"rpn_anchor_generator": anchors, "box_batch_size_per_image": 64}
    in_resnet = recipe.backbone in LAST_OF_RES4
    backbone = _resnet(recipe) if in_resnet else TimmPyramid(recipe)
    model: nn.Module = detection.MaskRCNN(backbone, classes + 1, **options)
    if in_resnet:
        insert_mixer(model, recipe.backbone, recipe.mixer, recipe.image_size)
    return model


def _resnet(recipe: InstancesRecipe) -> nn.Module:
    """A ResNet of torchvision below its feature pyramid."""
    frozen = torchvision("ops").FrozenBatchNorm2d
    norm, learning = (nn.BatchNorm2d, 5) if recipe.init is None else (frozen, 3)
    extractor = torchvision("models.detection.backbone_utils")._resnet_fpn_extractor
    body = torchvision("models").get_model(recipe.backbone, weights=None, norm_layer=norm)
    pyramid: nn.Module = extractor(body, learning)
    return pyramid


class TimmPyramid(nn.Module):
    """A model of timm with the recipe's mixer in attention's place, below torchvision's feature pyramid.

    Raises OptionError for a backbone that returns no maps of strides 4 to 32, or that has no attention for the mixer.
    """

    def __init__(self, recipe: InstancesRecipe) -> None:
        super().__init__()
        places = places_of_maps(recipe.backbone, STRIDES)
        timm = load_library("timm")
        self.body = timm.create_model(recipe.backbone, pretrained=False, features_only=True, out_indices=places)
        if recipe.mixer != NO_BLOCK:
            image = torch.zeros(1, 3, recipe.image_size, recipe.image_size)
            convert(self.body.eval(), parse_mixer(recipe.mixer)[1], input=image, init="fresh")
        if recipe.init is not None:
            freeze_start(self.body)
            self.body = load_library("timm.layers").freeze_batch_norm_2d(self.body)
        self.body.train()
        pyramid = torchvision("ops.feature_pyramid_network")
        self.out_channels = CHANNELS
        self.fpn = pyramid.FeaturePyramidNetwork(
            list(self.body.feature_info.channels()), CHANNELS, pyramid.LastLevelMaxPool()
        )

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Images (B, 3, H, W) to maps of CHANNELS channels and strides 4 to 64, by name."""
        maps: dict[str, Tensor] = self.fpn({str(place): x for place, x in enumerate(self.body(images))})
        return maps
