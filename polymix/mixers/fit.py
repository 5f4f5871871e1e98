"""A config made to fit what holds the mixer: its grid, its tokens in front, its heads."""

from __future__ import annotations

from typing import Any

from polymix.errors import OptionError
from polymix.mixers.base import MixerConfig
from polymix.mixers.registry import mixer_class


def fit_to_grid(config: MixerConfig, grid: tuple[int, ...], num_prefix_tokens: int = 0) -> MixerConfig:
    """The config with the host's grid and prefix tokens, where it takes them and they play a part."""
    causal = getattr(config, "causal", False) or mixer_class(config.name).causal_by_build
    if causal and num_prefix_tokens:
        got = f"a causal {config.name} with a class token in front, which would see itself alone"
        raise OptionError("mixer", got, "a mixer that is not causal", "Use causal=False or class_token=False.")
    if causal or not hasattr(config, "grid") or not getattr(config, "placed", True):
        return config
    if config.grid not in (None, grid):
        raise OptionError("grid", config.grid, f"None or the host's {grid}", "Leave it to the host.")
    if hasattr(config, "num_prefix_tokens"):
        return config.changed(grid=grid, num_prefix_tokens=num_prefix_tokens)
    if num_prefix_tokens:
        got = f"a {config.name}, which has no place for a class token,"
        raise OptionError("mixer", got, "a mixer with num_prefix_tokens, or without a grid", "Use class_token=False.")
    return config.changed(grid=grid)


def call_options(config: MixerConfig, grid: tuple[int, ...]) -> dict[str, Any]:
    """What a mixer must be told in every call: the grid, where it was not built for one but counts rows and columns."""
    return {"grid": grid} if getattr(config, "rotary", None) == "2d" else {}


def with_heads(config: MixerConfig, heads: int) -> MixerConfig:
    """The config with `heads`, where it has heads and leaves their number open."""
    return config.changed(heads=heads) if getattr(config, "heads", 1) is None else config


def fit_to_text(config: MixerConfig, heads: int, theta: float | None) -> MixerConfig:
    """The config as a layer of a causal language model: in order, with its heads, turned to the base `theta` if any."""
    config = with_heads(config, heads)
    if hasattr(config, "causal"):
        config = config.changed(causal=True)
    if theta is not None and getattr(config, "rotary", 0) is None and getattr(config, "decay", None) is None:
        config = config.changed(rotary="1d" if config.name == "pom" else theta)
    return config
