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
from polymix.train.data.boxes.detectors import insert_mixer, resnet_pyramid
from polymix.train.data.boxes.options import LAST_OF_RES4, NO_BLOCK
from polymix.train.data.vision import torchvision

PUBLISHED = ((1, 2, 3, 4), 256)  # layers and channels of torchvision's feature pyramid


def build_mask_rcnn(recipe: InstancesRecipe, classes: int) -> nn.Module:
    """The detector with fresh weights.

    With `recipe.init` batch norm, the stem and the first stage of the backbone are frozen, as published; from fresh
    weights they learn, because the first statistics would normalise nothing.
    """
    detection = torchvision("models.detection")
    options: dict[str, Any] = {"min_size": recipe.image_size, "max_size": recipe.image_size}
    layers, channels = pyramid_of(recipe)
    if recipe.detector == "small":
        for mode, before, after in (("train", 200, 100), ("test", 100, 50)):
            options |= {f"rpn_pre_nms_top_n_{mode}": before, f"rpn_post_nms_top_n_{mode}": after}
        smallest = max(8, recipe.image_size // 8)
        generator = torchvision("models.detection.anchor_utils").AnchorGenerator
        levels = range(len(layers) + 1)
        anchors = generator(tuple((smallest * 2**level,) for level in levels), ((0.5, 1.0, 2.0),) * len(levels))
        options |= {"rpn_anchor_generator": anchors, "box_batch_size_per_image": 64}
    in_resnet = recipe.backbone in LAST_OF_RES4
    backbone = _resnet(recipe) if in_resnet else TimmPyramid(recipe)
    options |= _heads(channels, classes + 1)
    model: nn.Module = detection.MaskRCNN(backbone, **options)
    if in_resnet:
        insert_mixer(model, recipe.backbone, recipe.mixer, recipe.image_size, fresh=recipe.init is None)
    return model


def pyramid_of(recipe: InstancesRecipe) -> tuple[tuple[int, ...], int]:
    """From which layers the feature pyramid is built, and its channels."""
    return PUBLISHED if recipe.detector == "published" else (recipe.layers, recipe.channels)


def _heads(channels: int, classes: int) -> dict[str, nn.Module]:
    """Heads for boxes and masks as wide as the pyramid; with 256 channels they are torchvision's own."""
    boxes, masks = torchvision("models.detection.faster_rcnn"), torchvision("models.detection.mask_rcnn")
    pooled, hidden = 7 * 7 * channels, 4 * channels
    return {
        "box_head": boxes.TwoMLPHead(pooled, hidden), "box_predictor": boxes.FastRCNNPredictor(hidden, classes),
        "mask_head": masks.MaskRCNNHeads(channels, (channels,) * 4, 1),
        "mask_predictor": masks.MaskRCNNPredictor(channels, channels, classes),
    }  # fmt: skip


def _resnet(recipe: InstancesRecipe) -> nn.Module:
    """A ResNet of torchvision below its feature pyramid."""
    norm = nn.BatchNorm2d if recipe.init is None else torchvision("ops").FrozenBatchNorm2d
    body = torchvision("models").get_model(recipe.backbone, weights=None, norm_layer=norm)
    if recipe.init is not None:
        for part in (body.conv1, body.layer1):
            part.requires_grad_(False)
    return resnet_pyramid(body, *pyramid_of(recipe), torchvision("ops.feature_pyramid_network").LastLevelMaxPool())


class TimmPyramid(nn.Module):
    """A model of timm with the recipe's mixer in attention's place, below torchvision's feature pyramid.

    Raises OptionError for a backbone that returns no maps of the recipe's strides, or whose layers up to the last of
    them have no attention for the mixer.
    """

    def __init__(self, recipe: InstancesRecipe) -> None:
        super().__init__()
        layers, channels = pyramid_of(recipe)
        places = places_of_maps(recipe.backbone, [2 ** (layer + 1) for layer in layers])
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
        self.out_channels = channels
        self.fpn = pyramid.FeaturePyramidNetwork(
            list(self.body.feature_info.channels()), channels, pyramid.LastLevelMaxPool()
        )

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Images (B, 3, H, W) to maps of `out_channels` channels, by name; the last has twice the largest stride."""
        maps: dict[str, Tensor] = self.fpn({str(place): x for place, x in enumerate(self.body(images))})
        return maps
