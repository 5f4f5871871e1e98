"""torchvision's RetinaNet for faces, and a mixer inserted into its backbone."""

from __future__ import annotations

from torch import nn

from polymix.domains.faces.recipe import FacesRecipe
from polymix.train.data.boxes.detectors import insert_mixer, resnet_pyramid
from polymix.train.data.vision import torchvision

MAX_FACES = 750  # found in a picture
MIN_SCORE = 0.01  # of a face that the measurement counts
MAX_OVERLAP = 0.4  # IoU above which the face of a lower score is dropped


def build_retinanet(recipe: FacesRecipe) -> nn.Module:
    """The detector with fresh weights: three square anchors at each place of each level."""
    detection = torchvision("models.detection")
    anchors, pyramid = torchvision("models.detection.anchor_utils"), torchvision("ops.feature_pyramid_network")
    body, channels = torchvision("models").get_model(recipe.backbone, weights=None), recipe.channels
    backbone = resnet_pyramid(body, recipe.layers, channels, pyramid.LastLevelP6P7(channels, channels))
    levels = len(recipe.layers) + 2
    sizes = tuple(
        tuple(round(recipe.smallest_anchor * 2 ** (level + third / 3)) for third in range(3)) for level in range(levels)
    )
    model: nn.Module = detection.RetinaNet(
        backbone, 1, min_size=recipe.image_size, max_size=recipe.image_size, score_thresh=MIN_SCORE,
        nms_thresh=MAX_OVERLAP, anchor_generator=anchors.AnchorGenerator(sizes, ((1.0,),) * levels),
        detections_per_img=MAX_FACES,
    )  # fmt: skip
    insert_mixer(model, recipe.backbone, recipe.mixer, recipe.image_size, fresh=recipe.init is None)
    return model
