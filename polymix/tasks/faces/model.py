"""torchvision's RetinaNet for faces, and a mixer inserted into its backbone."""

from __future__ import annotations

from torch import nn

from polymix.tasks.boxes.detectors import INSERTED, check_mixer, insert_mixer, load_torchvision
from polymix.tasks.faces.data import FaceData
from polymix.tasks.faces.recipe import FacesRecipe

MOST = 750  # faces found in a picture
HEADS = ("head.", *INSERTED)


def build(recipe: FacesRecipe, data: FaceData) -> nn.Module:
    """The detector with fresh weights: three square anchors at each place of each level."""
    load_torchvision()
    from torchvision.models import get_model
    from torchvision.models.detection import RetinaNet
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.backbone_utils import BackboneWithFPN
    from torchvision.ops.feature_pyramid_network import LastLevelP6P7

    body, channels = get_model(recipe.backbone, weights=None), recipe.channels
    layers = {f"layer{layer}": str(layer) for layer in recipe.layers}
    widths = [body.inplanes >> (4 - layer) for layer in recipe.layers]
    backbone = BackboneWithFPN(body, layers, widths, channels, LastLevelP6P7(channels, channels))
    levels = len(recipe.layers) + 2
    sizes = tuple(
        tuple(round(recipe.smallest_anchor * 2 ** (level + third / 3)) for third in range(3)) for level in range(levels)
    )
    model: nn.Module = RetinaNet(
        backbone, 1, min_size=recipe.image_size, max_size=recipe.image_size, score_thresh=0.01, nms_thresh=0.4,
        anchor_generator=AnchorGenerator(sizes, ((1.0,),) * levels), detections_per_img=MOST,
    )  # fmt: skip
    insert_mixer(model, recipe.backbone, recipe.mixer, recipe.image_size)
    return model


def check(recipe: FacesRecipe) -> None:
    """Raise an error about the mixer before any picture is read."""
    check_mixer(recipe.mixer)


def host_name(recipe: FacesRecipe) -> str:
    """What results call the host."""
    return f"RetinaNet, {recipe.backbone}"
