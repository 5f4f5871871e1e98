"""transformers, 4.45 or newer: how its models are rebuilt, and adapters for language models and encoders."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from torch import nn

from polymix.convert.adapters.libraries import load_library, local_files
from polymix.convert.adapters.transformers import (
    causal,
    detection,
    encoders,
    images,
    sam,
    segmentation,
    swiftformer,
    swin,
)
from polymix.convert.model_recipes import Recipe, class_path, decode, encode, model_class
from polymix.errors import OptionError

__all__ = [
    "build_model", "causal", "detection", "encoders", "images", "read_recipes", "sam", "segmentation", "swiftformer",
    "swin",
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
