"""Mixers by name, what each can do, and which can do what another cannot."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from polymix.errors import CapabilityError, OptionError, UnknownNameError, nearest_first

ATTENTION, FLOOR = "softmax", "linear_floor"  # the yardstick, and the mixer that mixes nothing
_CONFIGS: dict[str, Any] = {}
C = TypeVar("C", bound=type[Any])


@dataclass(frozen=True)
class Capabilities:
    """What a mixer can do: on the class with the right options, on an instance as it was built."""

    causal: bool = False  # a token may see its past alone
    cross: bool = False  # a separate context
    masks: frozenset[str] = frozenset()  # of "padding", "arbitrary", "block_causal", "segments"
    recurrent: bool = False  # prefill and step, with a state whose size does not depend on N
    any_length: bool = True  # one set of weights serves every N
    grids: tuple[int, ...] = ()  # how many axes its grid may have; () where positions play no part

    def has(self, name: str) -> bool:
        """Whether a capability, or a kind of mask, is there."""
        return name in self.masks or bool(getattr(self, name, False))


def _load_related() -> None:
    """Register the related mechanisms when a question first needs them, so that no import of polymix waits for them."""
    importlib.import_module("polymix.mixers.related")


def register(mixer: type[Any]) -> Callable[[C], C]:
    """Class decorator for a config: its `name` builds `mixer` from then on. A name can be taken once.

    The mixer's docstring gets the config's `cost_formula` as its last line.
    """

    def add(config: C) -> C:
        if not mixer.__module__.startswith("polymix."):
            _load_related()  # their names are taken
        if config.name in _CONFIGS:
            raise OptionError("name", config.name, "a name not yet registered", "Choose another name.")
        config.mixer = mixer
        mixer.__doc__ = f"{(mixer.__doc__ or '').rstrip()}\n\n    Cost: {config.cost_formula} multiply-adds.\n    "
        _CONFIGS[config.name] = config
        return config

    return add


def list_mixers() -> tuple[str, ...]:
    """The names that `create_mixer` knows."""
    _load_related()
    return tuple(_CONFIGS)


def config_class(name: str) -> Any:
    """The config dataclass behind a name."""
    if name not in _CONFIGS:
        _load_related()
    if not isinstance(name, str) or name not in _CONFIGS:
        known = ", ".join(nearest_first(str(name), _CONFIGS))
        raise UnknownNameError("name", repr(name), known, "The nearest names come first.")
    return _CONFIGS[name]


def mixer_class(name: str) -> Any:
    """The module class behind a name."""
    return config_class(name).mixer


def check_options(config: type[Any], options: dict[str, Any]) -> None:
    """Raise OptionError for an option that `config` does not have."""
    known = {f.name for f in fields(config)}
    for option in options:
        if option not in known:
            near = ", ".join(nearest_first(option, known))
            raise OptionError(
                option, "an unknown option", f"the options of {config.name}: {near}", "Check the spelling."
            )


def lacks(name: str, capability: str, argument: str, wanted: str) -> CapabilityError:
    """The error for an argument that the mixer `name`, as built, cannot serve; it names those that can."""
    _load_related()
    able = [other for other, config in _CONFIGS.items() if config.mixer.capabilities.has(capability) and other != name]
    own = name in _CONFIGS and _CONFIGS[name].mixer.capabilities.has(capability)
    cure = f"Build {name} with other options, or use one of those." if own else "Use one of those."
    got = f"{wanted}, which this {name} cannot do"
    return CapabilityError(argument, got, f"a mixer that can: {', '.join(able) or 'there is none'}", cure)
