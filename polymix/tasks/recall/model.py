"""The small language model that a recipe asks for."""

from __future__ import annotations

from typing import Any

from polymix.limits import check_memory, check_model
from polymix.models.language import PolymixGPTConfig, PolymixGPTForCausalLM
from polymix.tasks.recall.data import Streamed
from polymix.tasks.recall.recipe import RecallRecipe


def config(recipe: RecallRecipe) -> PolymixGPTConfig:
    """The model's config."""
    longest = max(task.length for task in recipe.tasks())
    return PolymixGPTConfig(
        vocab_size=recipe.vocab, hidden_size=recipe.hidden_size, num_layers=recipe.num_layers,
        num_heads=recipe.num_heads, mixers=list(recipe.mixers), positions=recipe.positions,
        short_conv=recipe.short_conv, max_position_embeddings=longest,
    )  # fmt: skip


def check(recipe: RecallRecipe) -> None:
    """Raise what `build` would raise about the recipe."""
    options = config(recipe)
    size = check_model(lambda: PolymixGPTForCausalLM(options), "recipe", "its model")
    check_memory("recipe", "its model with gradients and the optimizer's state", 4 * size)


def build(recipe: RecallRecipe, data: Streamed) -> Any:
    """The model with fresh weights."""
    return PolymixGPTForCausalLM(config(recipe))
