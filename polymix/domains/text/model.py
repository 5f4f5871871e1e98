"""The language model that a recipe asks for."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polymix.convert.adapters.libraries import load_whole
from polymix.domains.text.recipe import FAMILIES, TextRecipe
from polymix.errors import CapabilityError, OptionError, UnknownOptionError, nearest_first, shown
from polymix.models.language import PRESETS, PolymixGPTConfig, PolymixLlamaConfig, preset  # first: it cures torchvision
from polymix.models.language.layers import CausalLayer
from polymix.parallel.mix import refuse

from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig  # isort: skip

_FAMILIES = dict(zip(FAMILIES, (PolymixGPTConfig, PolymixLlamaConfig), strict=True))


def build_model(config: Any) -> Any:
    """A causal language model with fresh weights."""
    return AutoModelForCausalLM.from_config(copy.deepcopy(config))


def load_model(folder: Path, argument: str) -> nn.Module:
    """The language model in a folder of transformers' save_pretrained. argument: the folder's name in messages."""
    model: nn.Module = load_whole(AutoModelForCausalLM, folder, argument)[0]
    return model


def check_split(config: Any, packing: str) -> None:
    """Raise CapabilityError or OptionError where the processes of a sequence cannot share this model's layers."""
    with torch.device("meta"):
        model = build_model(config)
    layers = [part for part in model.modules() if isinstance(part, CausalLayer)]
    if not layers:
        got = f"more than 1 for a model of {config.model_type}"
        raise OptionError("sequence_parallel", got, "a model whose layers are mixers of polymix", "Pass 1.")
    for layer in layers:
        refuse(layer.mixer, None, 1, {"segments": True if packing == "segments" else None})
        if layer.unsplit is not None:
            raise CapabilityError("sequence_parallel", layer.unsplit, "layers without it", "Leave it out.")


def model_config(recipe: TextRecipe, vocab: int, end: int | None = None, padding: int | None = None) -> Any:
    """The model's config with the recipe's options and `vocab` tokens, one of which ends a text and one pads.

    Raises OptionError: the config has no such option, fewer positions than the context, or no packing by segments.
    """
    model, options = recipe.model, {**recipe.model_options, "vocab_size": vocab}
    if isinstance(model, Mapping):  # as results.json has a config
        model = AutoConfig.for_model(**model)
    if isinstance(model, str) and model in _FAMILIES:
        kind: Any = _FAMILIES[model]
        options.setdefault("max_position_embeddings", recipe.context)
        base: dict[str, Any] = {}
    else:
        config = preset(model) if isinstance(model, str) and model in PRESETS else model
        if not isinstance(config, PretrainedConfig):
            known = ", ".join([*_FAMILIES, *nearest_first(shown(model), PRESETS)])
            raise OptionError("model", shown(model), f"{known}, or a config of transformers", "Choose one.")
        kind, base = type(config), config.to_dict()
    names = {*kind().to_dict(), *kind.attribute_map}
    for name in options:
        if name not in names:
            own = {*recipe.to_dict(), *names} - set(PretrainedConfig().to_dict())  # without what every config has
            allowed = ", ".join(nearest_first(name, own)[:8]) + " …"
            cure = "polymix train text --help lists those of the recipe."
            raise UnknownOptionError(name, allowed, cure)
    options |= {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end if padding is None else padding}
    named = isinstance(model, str) and model in PRESETS
    made = preset(model, **options) if named else kind.from_dict(base | options)
    longest = getattr(made, "max_position_embeddings", None)
    if longest is not None and getattr(made, "positions", "learned") == "learned" and recipe.context > longest:
        got = f"{recipe.context} with max_position_embeddings={longest}"
        raise OptionError("context", got, f"at most {longest}", "Set max_position_embeddings too.")
    if recipe.packing == "segments" and not isinstance(made, tuple(_FAMILIES.values())):
        raise OptionError(
            "packing", f"segments for {made.model_type}", "stream", "Only polymix's own models keep segments apart."
        )
    return made
