"""timm: how its models are rebuilt, and adapters for ViT and its relatives, Swin, SAM, pyramids and hybrids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from polymix.convert.adapter import register_refusal
from polymix.convert.adapters.libraries import load_library
from polymix.convert.adapters.timm import blocks, hybrids, maps, sam, swin, variants, vit
from polymix.convert.model_recipes import Recipe, build_class, encode, is_plain, known_arguments
from polymix.errors import OptionError

register_refusal("it computes attention by einsum", "timm.layers.attention2d.MultiQueryAttentionV2")
register_refusal(
    "it mixes channels, not tokens", "timm.models.davit.ChannelAttention", "timm.models.davit.ChannelAttentionV2",
)  # fmt: skip
register_refusal(
    "it mixes rows and columns by matrices for a map of one size", "timm.layers.non_local_attn.BatNonLocalAttn"
)
register_refusal("it is a convolution", "timm.models.nextvit.ConvAttention")

__all__ = ["blocks", "build_model", "hybrids", "maps", "read_recipes", "sam", "swin", "variants", "vit"]


def read_recipes(model: Any) -> Iterator[Recipe]:
    """The architecture's name, with the arguments that timm kept or that can be read off the model.

    Of a model of polymix.timm it is that of the host, whose layers the recipe replaces.
    """
    stated = getattr(model, "pretrained_cfg", None) or {}
    name = stated.get("polymix_host") or stated.get("architecture")
    head = _classifier(model)
    first = next((part for part in model.modules() if isinstance(part, nn.Conv2d)), None)
    drops = [part.drop_prob for part in model.modules() if type(part).__name__ == "DropPath"]
    arguments = {
        "num_classes": getattr(head, "out_features", getattr(model, "num_classes", None)),
        "in_chans": getattr(first, "in_channels", None),
        "img_size": getattr(getattr(model, "patch_embed", None), "img_size", None),
        "global_pool": getattr(model, "global_pool", None),
        "drop_path_rate": max(drops, default=None),
    }
    stated_arguments = {key: value for key, value in getattr(model, "_model_args", {}).items() if is_plain(value)}
    if name:
        yield {"name": name, "kwargs": encode({**stated_arguments, **known_arguments(model, arguments)})}


def _classifier(model: Any) -> Any:
    """The classifier, where timm tells it: its method fails where attention is both pooling and head (timm 1.0.31)."""
    try:
        return model.get_classifier()
    except AttributeError:
        return None


def build_model(recipe: Recipe, kwargs: dict[str, Any]) -> nn.Module:
    """An architecture by name, or a class, with untrained weights."""
    if "class" in recipe:
        return build_class(recipe, kwargs)
    timm = load_library("timm")
    if not timm.is_model(recipe["name"]):
        raise OptionError("host", recipe["name"], "an architecture that timm lists", "polymix downloads nothing.")
    return timm.create_model(
        recipe["name"], pretrained=False, pretrained_cfg=None, pretrained_cfg_overlay=None, checkpoint_path="",
        cache_dir=None, **kwargs,
    )  # fmt: skip
