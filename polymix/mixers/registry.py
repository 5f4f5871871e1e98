"""Mixers by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from polymix.errors import CapabilityError, OptionError, UnknownNameError, nearest_first

if TYPE_CHECKING:
    from polymix.mixers.base import MixerConfig, TokenMixer

_CONFIGS: dict[str, type[MixerConfig]] = {}
_MIXERS: dict[str, type[TokenMixer]] = {}
C = TypeVar("C", bound="type[MixerConfig]")


def _load_related() -> None:
    """Register the related mechanisms, on the first question that they may be the answer to: nobody else waits for
    them at import."""
    importlib.import_module("polymix.mixers.related")


def register(mixer: type[TokenMixer]) -> Callable[[C], C]:
    """Class decorator for a config: its `name` builds `mixer` from then on. A name can be taken once."""

    def add(config: C) -> C:
        if not mixer.__module__.startswith("polymix."):
            _load_related()  # their names are taken
        if config.name in _CONFIGS:
            raise OptionError("name", config.name, "a name not yet registered", "Choose another name.")
        _CONFIGS[config.name], _MIXERS[config.name] = config, mixer
        return config

    return add


def list_mixers() -> tuple[str, ...]:
    """The names that `create_mixer` knows."""
    _load_related()
    return tuple(_CONFIGS)


def config_class(name: str) -> type[MixerConfig]:
    """The config dataclass behind a name."""
    if name not in _CONFIGS:
        _load_related()
    if not isinstance(name, str) or name not in _CONFIGS:
        known = ", ".join(nearest_first(str(name), _CONFIGS))
        raise UnknownNameError("name", repr(name), known, "Pick one of these; the nearest stand first.")
    return _CONFIGS[name]


def mixer_class(name: str) -> type[TokenMixer]:
    """The module class behind a name."""
    config_class(name)
    return _MIXERS[name]


def check_options(config: type[MixerConfig], options: dict[str, Any]) -> None:
    """Raise OptionError for an option that `config` does not have."""
    known = {f.name for f in fields(config)}
    for option in options:
        if option not in known:
            near = ", ".join(nearest_first(option, known))
            raise OptionError(
                option, "an unknown option", f"the options of {config.name}: {near}", "Check the spelling."
            )


def create_mixer(
    name: str, dim: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None, **options: Any
) -> TokenMixer:
    """Build a mixer by name: create_mixer("padre", dim=192, degree=3, grid=(14, 14)).

    Raises UnknownNameError for a name, and OptionError for an option, that is not known or makes no sense.
    """
    config = config_class(name)
    check_options(config, options)
    return config(**options).build(dim, device=device, dtype=dtype)


def lacks(mixer: TokenMixer, capability: str, argument: str, wanted: str) -> CapabilityError:
    """The error for an argument that a mixer cannot serve as built, naming those that can."""
    _load_related()
    able = [name for name, other in _MIXERS.items() if other.capabilities.has(capability) and name != mixer.name]
    cure = "Build it with other options." if type(mixer).capabilities.has(capability) else "Use one of those."
    return CapabilityError(
        argument, f"{wanted}, which this {mixer.name} cannot do", f"that with {', '.join(able) or 'no mixer'}", cure
    )
