"""DETR and Conditional DETR of transformers, with mixers for their attention and their published losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from polymix.convert import convert
from polymix.convert.adapters.libraries import load_library
from polymix.mixers.spec import parse_mixer

if TYPE_CHECKING:
    from polymix.tasks.detect.recipe import DetectRecipe

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, by which the backbone's input is scaled
CLASSES = {"detr": "Detr", "conditional_detr": "ConditionalDetr"}
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
    plan: dict[str, Any] = {"*encoder.layers.*.self_attn": parse_mixer(recipe.mixer)[1]}
    if recipe.decoder_mixer is not None:
        plan["*decoder.layers.*.self_attn"] = parse_mixer(recipe.decoder_mixer)[1]
    if recipe.cross_mixer is not None:
        plan["*decoder.layers.*.encoder_attn"] = parse_mixer(recipe.cross_mixer)[1]
    convert(model, plan)
    given: Any = model
    given.loss_function = _Loss(given.loss_function)
    return model


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
    """What the host takes: pictures (B, 3, S, S) of bytes scaled as ImageNet's, and a mask of the pixels not padded.

    Args:
        sizes: (B, 2), height and width of each picture without padding.
    """
    mean, std = (images.new_tensor(values, dtype=torch.float32)[:, None, None] for values in (MEAN, STD))
    place = torch.arange(images.shape[-1], device=images.device)
    sizes = sizes.to(images.device)
    mask = (place[:, None] < sizes[:, :1, None]) & (place < sizes[:, 1:, None])
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
