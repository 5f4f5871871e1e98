"""transformers, 4.45 or newer: how its models are rebuilt, and adapters for language models and encoders."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from polymix.convert.adapters.libraries import load_library, local_files
from polymix.convert.adapters.transformers import (
    causal,
    detection,
    encoders,
    families,
    images,
    sam,
    segmentation,
    swiftformer,
    swin,
)
from polymix.convert.adapters.transformers.families import any_adapter
from polymix.convert.find import image_size
from polymix.convert.model_recipes import Recipe, class_path, decode, encode, model_class
from polymix.errors import OptionError

__all__ = [
    "any_adapter", "build_model", "causal", "detection", "encoders", "examples", "families", "images", "read_recipes",
    "sam", "segmentation", "swiftformer", "swin",
]  # fmt: skip


def read_recipes(model: Any) -> Iterator[Recipe]:
    """The model's config, its attention implementation and its generation config."""
    generation = getattr(model, "generation_config", None)
    yield {
        "class": class_path(model), "config": encode(json.loads(model.config.to_json_string(use_diff=False))),
        "attention": _attention(model.config),
        "generation": None if generation is None else encode(json.loads(generation.to_json_string(use_diff=False))),
    }  # fmt: skip


def _attention(config: Any) -> Any:
    """The attention implementation of the model, and of its parts that have their own config."""
    parts = {key: getattr(config, key, None) for key in getattr(config, "sub_configs", {})}
    names = {key: getattr(part, "_attn_implementation", None) for key, part in {"": config, **parts}.items()}
    return names if parts else names[""]


def build_model(recipe: Recipe, _: dict[str, Any]) -> nn.Module:
    """The model of a config, with untrained weights."""
    kind = model_class(recipe)
    _check_local(recipe)
    config = kind.config_class.from_dict(decode(recipe["config"]))
    if recipe["attention"] is not None:
        config._attn_implementation = recipe["attention"]
    with local_files():
        model = kind(config)
    if recipe["generation"] is not None:
        model.generation_config = load_library("transformers").GenerationConfig.from_dict(decode(recipe["generation"]))
    return model


def _check_local(value: Any, key: str = "") -> None:
    """Raise OptionError for an attention implementation that names a repository: transformers would download it."""
    if isinstance(value, dict):
        for name, part in value.items():
            _check_local(part, key if key == "attention" else name)
    elif isinstance(value, str) and "/" in value and (key == "attention" or key.endswith("_implementation")):
        raise OptionError(
            "host", f"{key}={value!r}", "an implementation that transformers has", "polymix downloads nothing."
        )


PIXELS = 64  # of a side, where the config of a model of any size states none


def examples(model: Any) -> Iterator[dict[str, Any]]:
    """Small inputs that a model may take: token ids, pictures, sound, all of them together first."""
    config, name = model.config, getattr(model, "main_input_name", "input_ids")
    takes = inspect.signature(model.forward).parameters
    weight, drawn = next(model.parameters()), torch.Generator().manual_seed(0)  # the caller's numbers stay as they are
    ids = torch.tensor([[5, 6, 4, 3, 1, 7], [1, 2, 3, 6, 4, 5]], device=weight.device)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=drawn).to(weight)

    sound = getattr(config, "audio_config", None) or getattr(config, "encoder", None) or config
    parts: dict[str, Any] = {}
    vision = getattr(config, "vision_config", None) or config
    if "pixel_values" in takes:
        size = image_size(vision) or (PIXELS, PIXELS)
        frames = getattr(config, "num_frames", None)  # of a video
        parts["pixel_values"] = numbers(2, *([frames] if frames else []), getattr(vision, "num_channels", 3), *size)
    bands = getattr(sound, "num_mel_bins", None) or getattr(sound, "input_feat_per_channel", None)
    if "input_features" in takes and bands:
        whisper = "num_mel_bins" in sound.to_dict() and hasattr(sound, "max_source_positions")
        parts["input_features"] = numbers(2, *((bands, 2 * sound.max_source_positions) if whisper else (64, bands)))
    if "input_values" in takes:
        parts["input_values"] = numbers(2, 8000)
    if "past_values" in takes:
        parts["past_values"] = numbers(2, config.context_length, getattr(config, "num_input_channels", 1))
    decoder = {"decoder_input_ids": ids} if "decoder_input_ids" in takes else {}
    if "input_ids" in takes:
        yield {**parts, "input_ids": ids, **decoder}
        yield {"input_ids": ids, **decoder}
    if parts:
        yield {**parts, **decoder}
        yield parts
    if name in parts:
        yield {name: parts[name]}
