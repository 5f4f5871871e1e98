"""DETR and Conditional DETR of transformers, with mixers for their attention and their published losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from polymix.convert import convert
from polymix.convert.adapter import Adapter
from polymix.convert.adapters.libraries import load_library
from polymix.convert.plan import KEEP, config_of, parse_plan, resolve
from polymix.mixers import MixerConfig
from polymix.mixers.registry import lacks
from polymix.mixers.spec import parse_mixer

if TYPE_CHECKING:
    from polymix.tasks.detect.recipe import DetectRecipe

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, by which the backbone's input is scaled
CLASSES = {"detr": "Detr", "conditional_detr": "ConditionalDetr"}
ENCODER = "model.encoder.layers.*.self_attn"
UNIT = 32  # pixels a side of the coarsest token
MOST = 100  # boxes of a picture, as COCO counts them


def build_detr(recipe: DetectRecipe, classes: int) -> nn.Module:
    """The host with fresh weights: the self-attention of its encoder is replaced, other attention by choice.

    From fresh weights the backbone has batch norm that learns. With `init` its statistics and weights are frozen,
    as published (Carion et al. 2020, section 4). Raises MissingExtraError without transformers or timm.
    """
    transformers = load_library("transformers")
    load_library("timm")
    name = CLASSES[recipe.host]
    backbone = transformers.TimmBackboneConfig(
        backbone=recipe.backbone, out_indices=[1, 2, 3, 4], output_stride=recipe.stride_of_host,
        use_pretrained_backbone=False,
    )  # fmt: skip
    options: dict[str, Any] = {"class_cost": 1} if recipe.host == "detr" else {}
    config = getattr(transformers, f"{name}Config")(
        backbone_config=backbone, num_labels=classes, num_queries=recipe.queries, d_model=recipe.dim,
        encoder_layers=recipe.depth, decoder_layers=recipe.depth, encoder_attention_heads=recipe.heads,
        decoder_attention_heads=recipe.heads, encoder_ffn_dim=recipe.feedforward, decoder_ffn_dim=recipe.feedforward,
        dropout=recipe.dropout, auxiliary_loss=True, **options,
    )  # fmt: skip
    model: nn.Module = getattr(transformers, f"{name}ForObjectDetection")(config)
    thaw(model) if recipe.init is None else freeze(model)
    side = -(-recipe.image_size // recipe.stride_of_host)
    match = "parameters" if recipe.match_parameters else None
    convert(model, _encoder_plan(model, recipe), grid=(side, side), match=match)
    for layers, mixer in (("self_attn", recipe.decoder_mixer), ("encoder_attn", recipe.cross_mixer)):
        if mixer is not None:
            convert(model, {f"*decoder.layers.*.{layers}": parse_mixer(mixer)[1]}, match=match)
    given: Any = model
    given.loss_function = _Loss(given.loss_function)
    return model


def _encoder_plan(model: nn.Module, recipe: DetectRecipe) -> dict[str, MixerConfig | str]:
    """The mixer of each layer of the encoder, or "keep". Raises OptionError for a plan that names another layer."""
    names = [name for name, _ in model.named_modules() if fnmatchcase(name, ENCODER)]
    if recipe.plan is None:
        return dict.fromkeys(names, parse_mixer(recipe.mixer)[1])
    found = resolve(parse_plan(recipe.plan), names, config_of(recipe.mixer, "mixer"))
    return {name: KEEP if config is None else config for name, config in found.items()}


def check_padding(model: nn.Module) -> None:
    """Raise CapabilityError for a mixer that reads the map and takes no mask: pictures of a batch differ in size."""
    for name, part in model.named_modules():
        reads_map = fnmatchcase(name, ENCODER) or name.endswith(".encoder_attn")
        if reads_map and isinstance(part, Adapter) and not part.mixer.capabilities.has("padding"):
            raise lacks(part.mixer.name, "padding", "mixer", f"{name}, whose batches have padding")


class _Loss:
    """The loss of the host in float32, also under autocast: matching needs numpy, which has no bfloat16."""

    def __init__(self, published: Any) -> None:
        self.published = published

    def __call__(self, logits: Tensor, labels: Any, device: Any, boxes: Tensor, config: Any, *others: Any) -> Any:
        with torch.autocast(logits.device.type, enabled=False):
            rest = [part.float() if isinstance(part, Tensor) else part for part in others]
            return self.published(logits.float(), labels, device, boxes.float(), config, *rest)


def thaw(model: nn.Module) -> None:
    """Frozen batch norm becomes batch norm, and all weights learn: fresh statistics would normalise nothing."""
    for parent in list(model.modules()):
        children: list[tuple[str, Any]] = list(parent.named_children())
        for name, child in children:
            if type(child).__name__.endswith("FrozenBatchNorm2d"):
                setattr(parent, name, nn.BatchNorm2d(child.weight.numel(), device=child.weight.device))
    model.requires_grad_(True)


def freeze(model: nn.Module) -> None:
    """The backbone's stem and first stage do not learn, as published."""
    for name, parameter in model.named_parameters():
        if ".backbone." in name and not any(f"layer{stage}." in name for stage in (2, 3, 4)):
            parameter.requires_grad_(False)


def inputs(images: Tensor, sizes: Tensor) -> dict[str, Tensor]:
    """What the host takes: pictures (B, 3, H, W) of bytes scaled as ImageNet's, and a mask of the pixels not padded.

    Padding that no picture of the batch needs is cut off, down to multiples of 32 pixels.

    Args:
        sizes: (B, 2), height and width of each picture without padding.
    """
    mean, std = (images.new_tensor(values, dtype=torch.float32)[:, None, None] for values in (MEAN, STD))
    sizes = sizes.to(images.device)
    height, width = (-(-side // UNIT) * UNIT for side in sizes.amax(0).tolist())
    images = images[..., :height, :width]
    rows, columns = (torch.arange(side, device=images.device) for side in images.shape[2:])
    mask = (rows[:, None] < sizes[:, :1, None]) & (columns < sizes[:, 1:, None])
    return {"pixel_values": (images.float() / 255 - mean) / std * mask[:, None], "pixel_mask": mask.long()}


def detr_loss(model: Any, images: Tensor, targets: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Hungarian matching, then classes, L1 and GIoU with weights 1, 5 and 2, after each decoder layer; no crowds."""
    labels = []
    for target in targets:
        boxes, size = target["boxes"][~target["iscrowd"]], target["size"].flip(0).repeat(2).to(target["boxes"])
        middle, sides = (boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]
        labels.append({"boxes": torch.cat((middle, sides), 1) / size,
                       "class_labels": target["labels"][~target["iscrowd"]]})  # fmt: skip
    loss: Tensor = model(**inputs(images, torch.stack([t["size"] for t in targets])), labels=labels).loss
    return loss


def find_objects(model: Any, images: Tensor, sizes: Tensor) -> list[dict[str, Tensor]]:
    """The best boxes of each picture, in its pixels, on the CPU. Queries answer for one object each: no suppression."""
    found = model(**inputs(images, sizes))
    logits, boxes = found.logits.float().cpu(), found.pred_boxes.float().cpu()
    scores = logits.softmax(-1)[..., :-1] if model.config.model_type == "detr" else logits.sigmoid()
    rows = []
    for score, box, size in zip(scores, boxes, sizes, strict=True):
        values, best = score.flatten().topk(min(MOST, score.numel()))
        queries, labels = best // score.shape[1], best % score.shape[1]
        middle, half = box[queries, :2], box[queries, 2:] / 2
        corners = torch.cat((middle - half, middle + half), 1) * size.flip(0).repeat(2)
        rows.append({"boxes": corners, "scores": values, "labels": labels})
    return rows
