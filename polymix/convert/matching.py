"""Matching parameters: the width at which a mixer has as many of them as the attention that it replaces."""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from polymix.errors import OptionError
from polymix.mixers import MixerConfig
from polymix.mixers.registry import config_class, list_mixers

EQUAL_WITHIN, MATCHED_WITHIN = 0.01, 0.05  # relative differences in parameters
ATTENTION = "softmax"
_FAST_MULTIPLE = 8  # channels: other widths are slower


def matched(config: MixerConfig, dim: int, parameters: int) -> MixerConfig:
    """The config whose number of parameters is nearest to `parameters`, by its width option.

    A multiple of 8 inner channels is preferred if it comes within 1 %. A mixer without a width option stays as it is if
    it is within 5 %.

    Args:
        config: the mixer's, complete but for its width.
        dim: number of channels.
        parameters: of the attention, without the parts that the adapter keeps.
    Raises:
        OptionError: the mixer has another number of parameters and no width option, or the width was chosen already.
    """
    option = config.width_option
    if option is None:
        sized = config
    else:
        default = type(config).__dataclass_fields__[option].default
        if getattr(config, option) != default:
            got = f"'parameters' with {option}={getattr(config, option)} for {config.name}"
            raise OptionError("match", got, f"one of the two: the width follows from {option}", f"Leave {option} out.")
        units = (math.lcm(_FAST_MULTIPLE, config.width_unit), config.width_unit)
        nearest = (_nearest(config, dim, parameters, unit) for unit in dict.fromkeys(units))
        sized = min(nearest, key=lambda candidate: max(EQUAL_WITHIN, _distance(candidate, dim, parameters)))
    if _distance(sized, dim, parameters) > MATCHED_WITHIN:
        got = f"'parameters' for {config.name}, which has {_count(sized, dim):,} where the attention has {parameters:,}"
        capable = ", ".join(f"{name} ({width})" for name, width in widths().items())
        raise OptionError(
            "match", got, f"a mixer whose width is an option: {capable}", "Leave match out, or use these."
        )
    return sized


def matched_to_attention(config: MixerConfig, dim: int) -> MixerConfig:
    """`matched` for attention of `dim` channels. Raises OptionError as it does."""
    return matched(config, dim, _count(config_class(ATTENTION)(), dim))


def widths() -> dict[str, str]:
    """The mixers whose width is an option, and that option's name."""
    options = {name: config_class(name).width_option for name in list_mixers()}
    return {name: option for name, option in options.items() if option is not None}


def _nearest(config: MixerConfig, dim: int, parameters: int, unit: int) -> MixerConfig:
    """The nearest of the widths that are multiples of `unit`, by bisection: more channels are more parameters."""
    low, high = 1, 2
    while _count(config.with_width(high * unit, dim), dim) < parameters:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if _count(config.with_width(middle * unit, dim), dim) < parameters:
            low = middle
        else:
            high = middle
    both = (config.with_width(count * unit, dim) for count in (low, high))
    return min(both, key=lambda candidate: _distance(candidate, dim, parameters))


def _distance(config: MixerConfig, dim: int, parameters: int) -> float:
    return abs(_count(config, dim) / parameters - 1)


@lru_cache(maxsize=1024)
def _count(config: MixerConfig, dim: int) -> int:
    """The number of parameters, without allocating them."""
    with torch.random.fork_rng(devices=[]):
        return sum(p.numel() for p in config.build(dim, device="meta").parameters())
