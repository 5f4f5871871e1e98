"""The model that a recipe asks for."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from polymix.convert.adapters.libraries import no_bars
from polymix.errors import OptionError, nearest_first
from polymix.models.language import PRESETS, PolymixGPTConfig, PolymixLlamaConfig, preset  # first: it cures torchvision
from polymix.tasks.text.recipe import TextRecipe

from transformers import AutoModelForCausalLM, PretrainedConfig  # isort: skip

_FAMILIES = {"gpt": PolymixGPTConfig, "llama": PolymixLlamaConfig}


def model_config(recipe: TextRecipe, vocab: int, end: int | None = None, padding: int | None = None) -> Any:
    """Its config with the recipe's options and `vocab` tokens, of which one ends a text and one pads.

    Raises OptionError: an option that it does not have, a context beyond its positions, packing that it cannot.
    """
    wanted, options = recipe.model, {**recipe.options, "vocab_size": vocab}
    if isinstance(wanted, str) and wanted in _FAMILIES:
        kind: Any = _FAMILIES[wanted]
        options.setdefault("max_position_embeddings", recipe.context)
        given: dict[str, Any] = {}
    else:
        config = preset(wanted) if isinstance(wanted, str) and wanted in PRESETS else wanted
        if not isinstance(config, PretrainedConfig):
            known = ", ".join([*_FAMILIES, *nearest_first(str(wanted), PRESETS)])
            raise OptionError("model", repr(wanted), f"{known}, or a config of transformers", "Choose one.")
        kind, given = type(config), config.to_dict()
    names = {*kind().to_dict(), *kind.attribute_map}
    for name in options:
        if name not in names:
            own = {*recipe.to_dict(), *names} - set(PretrainedConfig().to_dict())  # without what every config has
            allowed = ", ".join(nearest_first(name, own)[:8]) + " …"
            cure = "help(polymix.tasks.text.TextRecipe) lists all."
            raise OptionError(name, "no option of the recipe or its model", allowed, cure)
    options |= {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end if padding is None else padding}
    named = isinstance(wanted, str) and wanted in PRESETS
    made = preset(wanted, **options) if named else kind.from_dict(given | options)
    longest = getattr(made, "max_position_embeddings", None)
    if longest is not None and getattr(made, "positions", "learned") == "learned" and recipe.context > longest:
        got = f"{recipe.context} with max_position_embeddings={longest}"
        raise OptionError("context", got, f"at most {longest}", "Set max_position_embeddings too.")
    if recipe.packing == "segments" and not isinstance(made, tuple(_FAMILIES.values())):
        raise OptionError(
            "packing", f"segments for {made.model_type}", "stream", "polymix's own models keep them apart."
        )
    return made


def build(config: Any) -> Any:
    """With fresh weights."""
    return AutoModelForCausalLM.from_config(copy.deepcopy(config))


def save(model: Any, tokenizer: Any, out: Path) -> None:
    """As transformers' Auto classes load it."""
    with no_bars():
        model.save_pretrained(out)
        if tokenizer is not None:
            tokenizer.save_pretrained(out)
