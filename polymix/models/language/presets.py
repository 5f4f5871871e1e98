"""The papers' language models by name, and parameters made to match (PM-068)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers

from polymix.errors import UnknownNameError, nearest_first
from polymix.models.language.config import PolymixConfig, PolymixGPTConfig, PolymixLlamaConfig

_LLAMA = {"hidden_size": 1024, "num_layers": 20, "num_heads": 16}
# Name: the family, its options, and the parameters that the paper tells.
PRESETS: Mapping[str, tuple[type[PolymixConfig], dict[str, Any], str]] = {
    "gpt2-s": (PolymixGPTConfig, {"mixers": ["softmax"]}, "125 M (PM-029)"),
    "gppom2-s": (PolymixGPTConfig, {"mixers": ["pom"]}, "as GPT2-S (PM-031, PM-068)"),
    "gppom2-s-hybrid": (PolymixGPTConfig, {"mixers": ["pom", "local"]}, "as GPT2-S (PM-032, PM-068)"),
    "llama-300m": (PolymixLlamaConfig, {**_LLAMA, "mixers": ["softmax"]}, "about 300 M (PD-068)"),
    "llama-300m-padre": (PolymixLlamaConfig, {**_LLAMA, "mixers": ["padre"]}, "about 300 M (PD-068)"),
}


def preset(name: str, **changes: Any) -> PolymixConfig:
    """A config of the papers by name, with other options; its feed-forward is sized so that the model has the
    parameters of the same one with attention. Raises UnknownNameError, which lists the names."""
    if name not in PRESETS:
        raise UnknownNameError("preset", repr(name), ", ".join(nearest_first(name, PRESETS)), "Pick one of these.")
    family, options, _ = PRESETS[name]
    config = family(**{**options, **changes})
    return config if "intermediate_size" in changes else matched(config)


def parameters(config: PolymixConfig) -> int:
    """How many a model of this config has, tied ones once; nothing is allocated."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())


def matched(config: PolymixConfig, like: PolymixConfig | None = None, multiple: int = 16) -> PolymixConfig:
    """The config with the intermediate_size, a multiple of `multiple`, whose parameters come nearest to
    those of `like`, or else of the same model with attention in every layer.
    """
    kind, options = type(config), config.to_diff_dict()
    like = kind(**{**options, "mixers": ["softmax"]}) if like is None else like
    one, two = (parameters(kind(**{**options, "intermediate_size": size})) for size in (multiple, 2 * multiple))
    steps = max(1, round((parameters(like) - one) / (two - one)) + 1)
    return kind(**{**options, "intermediate_size": steps * multiple})
