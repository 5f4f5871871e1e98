"""What every `from_reference` needs: the authors' argument names and weights, checked, and loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from torch import Tensor, nn

from polymix.errors import OptionError, nearest_first
from polymix.mixers.config import MixerConfig


def translate(config: type[MixerConfig], options: Mapping[str, Any], names: Mapping[str, str | None]) -> dict[str, Any]:
    """Options of `config` from the authors' constructor arguments, ours, or a mixture of both.

    `names` maps each argument of the authors to our option, or to None where the weights themselves settle it
    (widths, bias flags) or where the authors accept and ignore it.
    """
    ours = {f.name for f in fields(config)}
    found: dict[str, Any] = {}
    for name, value in options.items():
        if name in names:
            target = names[name]
            if target is not None:
                found[target] = value
        elif name in ours:
            found[name] = value
        else:
            known = ", ".join(nearest_first(name, ours | set(names)))
            raise OptionError(name, "an unknown option", f"the authors' arguments or ours: {known}", "")
    return found


def settle(options: Mapping[str, Any], found: Mapping[str, Any], *, unsaid: tuple[Any, ...] = ()) -> dict[str, Any]:
    """`options` without those that the weights settle, `found`; OptionError where the two disagree.

    Values in `unsaid` leave the answer to the weights, as an option that is not given does.
    """
    for name, value in found.items():
        if name in options and options[name] not in unsaid and options[name] != value:
            raise OptionError(name, repr(options[name]), f"{value!r}, as the weights have it", f"Leave {name} out.")
    return {name: value for name, value in options.items() if name not in found}


def check_keys(
    state_dict: Mapping[str, Tensor], wanted: Iterable[str], optional: Iterable[str] = (), also: str = ""
) -> None:
    """Raise OptionError unless `state_dict` has every key of `wanted` and none beyond `optional`.

    `also` ends the cure: what else than the keys may be wrong.
    """
    need, may = set(wanted), set(optional)
    if not need <= state_dict.keys() <= need | may:
        odd = sorted((need - state_dict.keys()) | (state_dict.keys() - need - may))
        allowed = f"{sorted(need)}" + (f", and perhaps {sorted(may)}" if may else "")
        raise OptionError("state_dict", f"keys {sorted(state_dict)}", allowed, f"Look at {', '.join(odd)}{also}.")


def load(
    module: nn.Module, weights: Mapping[str, Tensor], cure: str = "Check the options against the weights."
) -> None:
    """load_state_dict, with an OptionError that names a weight that is missing or of another shape than the options
    ask for."""
    for key, value in module.state_dict().items():
        if key not in weights or weights[key].shape != value.shape:
            got = f"{key} of shape {tuple(weights[key].shape)}" if key in weights else f"no {key}"
            raise OptionError("state_dict", got, str(tuple(value.shape)), cure)
    module.load_state_dict(dict(weights))


def attention_projections(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a public attention, qkv.* and proj.*, as those of a `Heads` (qkv) and a Dense (proj).

    If only proj has a bias, that of qkv is zero.
    """
    weight = state_dict["qkv.weight"]
    found = {"qkv.qkv.weight": weight, "proj.weight": state_dict["proj.weight"]}
    if "proj.bias" in state_dict:
        found["proj.bias"] = state_dict["proj.bias"]
        found["qkv.qkv.bias"] = state_dict.get("qkv.bias", weight.new_zeros(weight.shape[0]))
    return found
