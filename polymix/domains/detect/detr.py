"""DETR and Conditional DETR of transformers, with mixers for their attention and their published losses."""

from __future__ import annotations

import math
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
from polymix.mixers.registry import missing_capability
from polymix.mixers.spec import parse_mixer
from polymix.train.data.backbones import freeze_start, places_of_maps
from polymix.train.initial import host_linears

if TYPE_CHECKING:
    from polymix.domains.detect.recipe import DetectRecipe

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, by which the backbone's input is scaled
CLASSES = {"detr": "Detr", "conditional_detr": "ConditionalDetr"}
ENCODER = "model.encoder.layers.*.self_attn"
UNIT = 32  # pixels a side of the coarsest token
LEVELS = (4, 8, 16, 32)  # strides of the backbone's maps, of which the host reads the last
MAX_BOXES = 100  # of a picture, as COCO counts them


def build_detr(recipe: DetectRecipe, classes: int) -> nn.Module:
    """The host with fresh weights: the self-attention of its encoder is replaced, other attention by choice.

    From fresh weights the backbone has batch norm that learns. With `init` its statistics and weights are frozen,
    as published (Carion et al. 2020, section 4). Raises MissingExtraError without transformers or timm, OptionError for
    a backbone that returns no maps of the strides 4 to `stride_of_host`.
    """
    transformers = load_library("transformers")
    wider = {} if recipe.stride_of_host == UNIT else {"output_stride": recipe.stride_of_host}
    strides = [stride for stride in LEVELS if stride <= recipe.stride_of_host]
    first = places_of_maps(recipe.backbone, strides, **wider)[0]
    name = CLASSES[recipe.host]
    backbone = transformers.TimmBackboneConfig(
        backbone=recipe.backbone, out_indices=[*range(first, first + len(LEVELS))],
        use_pretrained_backbone=False, **wider,
    )  # fmt: skip
    options: dict[str, Any] = {"class_cost": 1} if recipe.host == "detr" else {}
    config = getattr(transformers, f"{name}Config")(
        backbone_config=backbone, num_labels=classes, num_queries=recipe.queries, d_model=recipe.dim,
        encoder_layers=recipe.depth, decoder_layers=recipe.depth, encoder_attention_heads=recipe.heads,
        decoder_attention_heads=recipe.heads, encoder_ffn_dim=recipe.feedforward, decoder_ffn_dim=recipe.feedforward,
        dropout=recipe.dropout, auxiliary_loss=True, **options,
    )  # fmt: skip
    model: nn.Module = getattr(transformers, f"{name}ForObjectDetection")(config)
    _norm_apart(model)
    thaw(model) if recipe.init is None else freeze(model)
    side = -(-recipe.image_size // recipe.stride_of_host)
    match = "parameters" if recipe.match_parameters else None
    published = recipe.host_init == "published"
    start = "fresh" if published else "inherit"
    convert(model, _encoder_plan(model, recipe), grid=(side, side), match=match, init=start)
    for layers, mixer in (("self_attn", recipe.decoder_mixer), ("encoder_attn", recipe.cross_mixer)):
        if mixer is not None:
            convert(model, {f"*decoder.layers.*.{layers}": parse_mixer(mixer)[1]}, match=match, init=start)
    if published:
        start_as_published(model, conditional=recipe.host == "conditional_detr")
    host: Any = model
    host.loss_function = _Loss(host.loss_function)
    return model


def _norm_apart(model: Any) -> None:
    """The decoder's layers get each other's outputs, and only the heads the normed ones, as in the authors' code.

    With auxiliary_loss=True transformers passes the normed output on to the next layer, and norms the last one twice.
    """
    decoder = model.model.decoder
    for part in (decoder.layernorm, *decoder.layers, getattr(decoder, "query_scale", None)):
        if part is not None:
            part.register_forward_pre_hook(_as_before_the_norm)
    decoder.layernorm.register_forward_hook(_remember)


def _as_before_the_norm(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(getattr(value, "before_the_norm", value) for value in inputs)


def _remember(module: nn.Module, inputs: tuple[Any, ...], normed: Any) -> None:
    normed.before_the_norm = inputs[0]  # with the tensor, as several threads may use the model at once


def start_as_published(model: Any, conditional: bool = False) -> None:
    """Fresh weights as the authors' code has them in all but the backbone and mixers that are not attention.

    Xavier's weights in encoder and decoder, where queries, keys and values of a layer have one matrix; queries of
    deviation 1; and PyTorch's default elsewhere. Conditional DETR's classes start at a probability of 1 %, and its
    boxes at their points of reference.
    """
    for stack, joint in ((model.model.encoder, True), (model.model.decoder, not conditional)):
        linears = set(host_linears(stack))
        for name, layer in stack.named_modules():
            if layer not in linears:
                continue
            nn.Linear.reset_parameters(layer)
            part = joint and name.endswith((".q_proj", ".k_proj", ".v_proj"))
            nn.init.xavier_uniform_(layer.weight, math.sqrt(0.5) if part else 1.0)
            if "_attn." in name and (joint or name.endswith(".o_proj")):
                nn.init.zeros_(layer.bias)
    nn.init.normal_(model.model.query_position_embeddings.weight)
    for layer in (model.model.input_projection, model.class_labels_classifier, *model.bbox_predictor.layers):
        layer.reset_parameters()
    if conditional:
        nn.init.constant_(model.class_labels_classifier.bias, -math.log(99))
        nn.init.zeros_(model.bbox_predictor.layers[-1].weight)
        nn.init.zeros_(model.bbox_predictor.layers[-1].bias)


def _encoder_plan(model: nn.Module, recipe: DetectRecipe) -> dict[str, MixerConfig | str]:
    """The mixer of each layer of the encoder, or "keep". Raises OptionError for a plan that names another layer."""
    names = [name for name, _ in model.named_modules() if fnmatchcase(name, ENCODER)]
    if recipe.plan is None:
        return dict.fromkeys(names, parse_mixer(recipe.mixer)[1])
    chosen = resolve(parse_plan(recipe.plan), names, config_of(recipe.mixer, "mixer"))
    return {name: KEEP if config is None else config for name, config in chosen.items()}


def check_padding(model: nn.Module) -> None:
    """Raise CapabilityError for a mixer that reads the map and takes no mask: pictures of a batch differ in size."""
    for name, part in model.named_modules():
        reads_map = fnmatchcase(name, ENCODER) or name.endswith(".encoder_attn")
        if reads_map and isinstance(part, Adapter) and not part.mixer.capabilities.has("padding"):
            raise missing_capability(part.mixer.name, "padding", "mixer", f"{name}, whose batches have padding")


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
    freeze_start(next(part for part in model.modules() if hasattr(part, "feature_info")))


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


def detr_counts(model: Any, targets: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """What `detr_losses` are divided by, without padding: the weights of the queries' classes, and the boxes."""
    boxes = torch.stack([(~target["iscrowd"]).sum() for target in targets])
    if model.config.model_type != "detr":  # focal losses, as published, per box
        return boxes.sum().expand(2)
    queries = model.config.num_queries
    matched = boxes.clamp_max(queries).sum()
    weights = matched + model.config.eos_coefficient * (queries * len(targets) - matched)
    return torch.stack((weights, boxes.sum().to(weights)))


def detr_losses(model: Any, images: Tensor, targets: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Hungarian matching, then the sums of classes, and of L1 and GIoU with weights 5 and 2, over decoder layers."""
    labels = []
    for target in targets:
        boxes, size = target["boxes"][~target["iscrowd"]], target["size"].flip(0).repeat(2).to(target["boxes"])
        middle, sides = (boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]
        labels.append({"boxes": torch.cat((middle, sides), 1) / size,
                       "class_labels": target["labels"][~target["iscrowd"]]})  # fmt: skip
    output = model(**inputs(images, torch.stack([t["size"] for t in targets])), labels=labels)
    classes = sum(value for name, value in output.loss_dict.items() if name.startswith("loss_ce"))
    own = detr_counts(model, targets)
    return torch.stack((classes, output.loss - classes)) * own.where(own > 0, 1)


def find_objects(model: Any, images: Tensor, sizes: Tensor) -> list[dict[str, Tensor]]:
    """The best boxes of each picture, in its pixels, on the CPU. Queries answer for one object each: no suppression."""
    answers = model(**inputs(images, sizes))
    logits, boxes = answers.logits.float().cpu(), answers.pred_boxes.float().cpu()
    scores = logits.softmax(-1)[..., :-1] if model.config.model_type == "detr" else logits.sigmoid()
    rows = []
    for score, box, size in zip(scores, boxes, sizes, strict=True):
        values, best = score.flatten().topk(min(MAX_BOXES, score.numel()))
        queries, labels = best // score.shape[1], best % score.shape[1]
        middle, half = box[queries, :2], box[queries, 2:] / 2
        corners = torch.cat((middle - half, middle + half), 1) * size.flip(0).repeat(2)
        rows.append({"boxes": corners, "scores": values, "labels": labels})
    return rows
