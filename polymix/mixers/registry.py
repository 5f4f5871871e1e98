"""The registry of mixers: names, configs, classes and capabilities."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from polymix.errors import CapabilityError, OptionError, UnknownNameError, UnknownOptionError, nearest_first

ATTENTION, FLOOR = "softmax", "linear_floor"  # the mixer to compare with, and the one that mixes nothing
_CONFIGS: dict[str, Any] = {}
_LAZY_MODULES: list[str] = []  # modules that register more mixers, imported when a name is first needed
C = TypeVar("C", bound=type[Any])


@dataclass(frozen=True)
class Capabilities:
    """What a mixer can do: on the class with suitable options, on an instance as it was built."""

    causal: bool = False  # a token can be limited to its past
    cross: bool = False  # reads a separate context
    keys: bool = False  # its context has as many tokens as x, in the same places: keys of their own
    values: bool = False  # can compute values from another input than keys, as attention(x + positions, x) does
    masks: frozenset[str] = frozenset()  # of "padding", "arbitrary", "block_causal", "segments"
    recurrent: bool = False  # has prefill and step, with a state of fixed size
    # With causal=True, NaN and Inf in later tokens never reach earlier outputs. They may reach gradients of earlier
    # tokens, even of a loss of earlier outputs alone. Other causal mixers give later tokens the weight zero in a
    # product or a Fourier transform. In both, 0 · NaN is NaN.
    isolates_future: bool = False
    # With segments, NaN, Inf and values of 1e20 in other segments reach neither outputs nor gradients of tokens.
    # Attention gives them the weight zero in a product.
    isolates_segments: bool = False
    # How a sequence is split among processes: "sum" (its parts add up to one state), "scan" (the same, in order only),
    # "halo" (each part needs its neighbours' edges), "channels" (each process takes some channels of all tokens),
    # "gather" (each process gets the keys and values of all tokens).
    sequence: str | None = None
    any_length: bool = True  # the same weights work for every N
    grids: tuple[int, ...] = ()  # how many axes its grid may have; () if positions do not matter

    def has(self, name: str) -> bool:
        """Whether the mixer has this capability or takes this kind of mask."""
        return name in self.masks or bool(getattr(self, name, False))


def register_later(module: str) -> None:
    """Import `module`, which registers more mixers, only when a name is first needed: `import polymix` stays fast."""
    _LAZY_MODULES.append(module)


def _register_all() -> None:
    for module in _LAZY_MODULES:
        importlib.import_module(module)


def register(mixer: type[Any]) -> Callable[[C], C]:
    """Class decorator for a config: register `mixer` under the config's `name`, which must be new.

    Adds the config's `cost_formula` to the mixer's docstring. With a preset the config takes the options that its
    `forms` have for it.
    """

    def add(config: C) -> C:
        if not mixer.__module__.startswith("polymix."):
            _register_all()  # these names are taken
        if config.name in _CONFIGS:
            raise OptionError("name", config.name, "a name not yet registered", "Choose another name.")
        config.mixer = mixer
        with_preset(config)
        mixer.__doc__ = f"{(mixer.__doc__ or '').rstrip()}\n\n    Cost: {config.cost_formula}, in multiply-adds.\n    "
        _CONFIGS[config.name] = config
        return config

    return add


def with_preset(config: type[Any]) -> None:
    """Make the config's constructor take the options of `config.forms[preset]`, unless they are given."""
    plain = config.__init__

    @functools.wraps(plain)
    def init(self: Any, **options: Any) -> None:
        preset = options.get("preset")  # compared as text alone: an array has no truth value
        plain(self, **{**(type(self).forms.get(preset, {}) if isinstance(preset, str) else {}), **options})

    config.__init__ = init


def list_mixers() -> tuple[str, ...]:
    """The names of all registered mixers, for `create_mixer`."""
    _register_all()
    return tuple(_CONFIGS)


def config_class(name: str) -> Any:
    """The config dataclass of a mixer.

    Raises:
        UnknownNameError: no mixer has this name.
    """
    if not isinstance(name, str) or name not in _CONFIGS:
        _register_all()
    if not isinstance(name, str) or name not in _CONFIGS:
        bare, options, _ = str(name).partition(":")
        cure = "Pass its options by keyword." if options else "Choose one of these; the nearest come first."
        raise UnknownNameError("name", repr(name), ", ".join(nearest_first(bare, _CONFIGS)), cure)
    return _CONFIGS[name]


def mixer_class(name: str) -> Any:
    """The module class of a mixer. Raises UnknownNameError as `config_class` does."""
    return config_class(name).mixer


def check_options(config: type[Any], options: dict[str, Any]) -> None:
    """Raise OptionError if `config` does not have one of the options."""
    names = {f.name for f in fields(config)}
    for option in options:
        if option not in names:
            near = ", ".join(nearest_first(option, names))
            raise UnknownOptionError(option, f"the options of {config.name}: {near}")


def missing_capability(name: str, capability: str, argument: str, request: str) -> CapabilityError:
    """The error to raise if mixer `name`, as built, lacks a capability; it names the mixers that have it.

    It does not name the control, which is no cure. `request` says in words what the argument asked for.
    """
    _register_all()
    capable = [other for other, config in _CONFIGS.items() if config.mixer.capabilities.has(capability)]
    others = ", ".join(other for other in capable if other not in (name, FLOOR)) or "there is none"
    cure = f"Build {name} with other options, or use one of those." if name in capable else "Use one of those."
    return CapabilityError(argument, f"{request}, which this {name} cannot do", f"a mixer that can: {others}", cure)
