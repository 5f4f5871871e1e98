"""The language model that a recipe asks for, and how it is saved."""

from __future__ import annotations

import copy
import shlex
from pathlib import Path
from typing import Any

from polymix.convert.adapters.libraries import local_files
from polymix.errors import OptionError, nearest_first
from polymix.limits import check_memory, check_model
from polymix.models.language import PRESETS, PolymixGPTConfig, PolymixLlamaConfig, preset  # first: it cures torchvision
from polymix.tasks.text.data import VOCAB, TextData
from polymix.tasks.text.recipe import FAMILIES, TextRecipe

from transformers import AutoModelForCausalLM, PretrainedConfig  # isort: skip

_FAMILIES = dict(zip(FAMILIES, (PolymixGPTConfig, PolymixLlamaConfig), strict=True))


def check(recipe: TextRecipe) -> None:
    """Raise what `build` would raise about the recipe, before any text is read."""
    config = model_config(recipe, recipe.vocab or VOCAB)
    size = check_model(lambda: AutoModelForCausalLM.from_config(copy.deepcopy(config)), "recipe", "its model")
    check_memory("recipe", "its model with gradients and the optimizer's state", 4 * size)


def build(recipe: TextRecipe, data: TextData) -> Any:
    """The model with fresh weights."""
    padding = None if data.tokenizer is None else data.tokenizer.pad_token_id
    return AutoModelForCausalLM.from_config(copy.deepcopy(model_config(recipe, data.vocab, data.end, padding)))


def settings(model: Any) -> dict[str, Any]:
    """The options of the model's config that a resumed run must not change."""
    return model.config.to_diff_dict()


def save(model: Any, data: TextData, folder: Path) -> None:
    """Save the model and its tokenizer as transformers' Auto classes load them."""
    with local_files():
        model.save_pretrained(folder)
        if data.tokenizer is not None:
            data.tokenizer.save_pretrained(folder)


def usage(recipe: TextRecipe, data: TextData, folder: Path) -> list[str]:
    """Python lines that load the model, for the report."""
    return [
        "import polymix.models.language  # makes the classes known to transformers",
        "from transformers import pipeline", "",
        f"print(pipeline('text-generation', {str(folder)!r})('The ')[0]['generated_text'])",
    ]  # fmt: skip


def next_commands(recipe: TextRecipe, data: TextData, folder: Path) -> list[tuple[str, str]]:
    """What to run next, and why, for the report."""
    command = f"polymix generate {shlex.quote(folder.name)} --prompt 'Once upon a time' --stream"
    return [("Let the model write, in the folder above this one:", command)]


def model_config(recipe: TextRecipe, vocab: int, end: int | None = None, padding: int | None = None) -> Any:
    """The model's config with the recipe's options and `vocab` tokens, one of which ends a text and one pads.

    Raises OptionError: the config has no such option, fewer positions than the context, or no packing by segments.
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
            raise OptionError(name, "an unknown option", allowed, cure)
    options |= {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end if padding is None else padding}
    named = isinstance(wanted, str) and wanted in PRESETS
    made = preset(wanted, **options) if named else kind.from_dict(given | options)
    longest = getattr(made, "max_position_embeddings", None)
    if longest is not None and getattr(made, "positions", "learned") == "learned" and recipe.context > longest:
        got = f"{recipe.context} with max_position_embeddings={longest}"
        raise OptionError("context", got, f"at most {longest}", "Set max_position_embeddings too.")
    if recipe.packing == "segments" and not isinstance(made, tuple(_FAMILIES.values())):
        raise OptionError(
            "packing", f"segments for {made.model_type}", "stream", "Only polymix's own models keep segments apart."
        )
    return made
