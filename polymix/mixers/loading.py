"""Loading the weights of the authors' own code, shared by every `from_reference`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from torch import Tensor, nn

from polymix.errors import OptionError, UnknownOptionError, nearest_first
from polymix.mixers.config import MixerConfig


def translate(config: type[MixerConfig], options: Mapping[str, Any], names: Mapping[str, str | None]) -> dict[str, Any]:
    """Options of `config`, given by the authors' argument names, by ours, or by a mixture of both.

    `names` maps each argument of the authors to our option. It maps to None what the weights tell (widths, bias
    flags) and what the authors accept and ignore.

    Raises:
        OptionError: an option has neither an authors' name nor one of ours.
    """
    ours = {f.name for f in fields(config)}
    translated: dict[str, Any] = {}
    for name, value in options.items():
        if name in names:
            target = names[name]
            if target is not None:
                translated[target] = value
        elif name in ours:
            translated[name] = value
        else:
            allowed = f"the authors' arguments and ours: {', '.join(nearest_first(name, ours | set(names)))}"
            raise UnknownOptionError(name, allowed)
    return translated


def options_beyond_weights(
    options: Mapping[str, Any], from_weights: Mapping[str, Any], *, unset: tuple[Any, ...] = ()
) -> dict[str, Any]:
    """`options` without the ones whose values the weights tell.

    `from_weights` holds those values. An option in `unset` counts as not given.

    Raises:
        OptionError: an option contradicts the weights.
    """
    for name, value in from_weights.items():
        if name in options and options[name] not in unset and options[name] != value:
            raise OptionError(name, repr(options[name]), f"{value!r}, as in the weights", f"Leave {name} out.")
    return {name: value for name, value in options.items() if name not in from_weights}


def check_keys(
    state_dict: Mapping[str, Tensor], keys: Iterable[str], optional: Iterable[str] = (), also: str = ""
) -> None:
    """Raise OptionError unless `state_dict` has all `keys`, and no others but those in `optional`.

    `also` is added to the cure: what else to check besides the keys.
    """
    required, allowed = set(keys), set(keys) | set(optional)
    if not required <= state_dict.keys() <= allowed:
        wrong = sorted((required - state_dict.keys()) | (state_dict.keys() - allowed))
        expected = f"keys {sorted(required)}" + (f", optionally {sorted(optional)}" if allowed > required else "")
        raise OptionError("state_dict", f"keys {sorted(state_dict)}", expected, f"Check {', '.join(wrong)}{also}.")


def load(
    module: nn.Module, weights: Mapping[str, Tensor], cure: str = "Check the options against the weights."
) -> None:
    """Load weights into a module.

    Raises:
        OptionError: a weight is missing, or its shape does not fit the options.
    """
    for key, value in module.state_dict().items():
        if key not in weights or weights[key].shape != value.shape:
            got = f"{key} of shape {tuple(weights[key].shape)}" if key in weights else f"no {key}"
            raise OptionError("state_dict", got, f"{key} of shape {tuple(value.shape)}", cure)
    module.load_state_dict(dict(weights))


def attention_projections(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a public attention, qkv.* and proj.*, as those of a `Heads` (qkv) and a Dense (proj).

    If only proj has a bias, that of qkv is zero.
    """
    weight = state_dict["qkv.weight"]
    weights = {"qkv.qkv.weight": weight, "proj.weight": state_dict["proj.weight"]}
    if "proj.bias" in state_dict:
        weights["proj.bias"] = state_dict["proj.bias"]
        weights["qkv.qkv.bias"] = state_dict.get("qkv.bias", weight.new_zeros(weight.shape[0]))
    return weights
