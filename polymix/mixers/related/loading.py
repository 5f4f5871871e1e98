"""What every `from_reference` of the related mechanisms needs: the authors' argument names and weights, checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from torch import Tensor

from polymix.errors import OptionError, nearest_first
from polymix.mixers.base import MixerConfig


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


def check_keys(state_dict: Mapping[str, Tensor], wanted: Iterable[str], optional: Iterable[str] = ()) -> None:
    """Raise OptionError unless `state_dict` has every key of `wanted` and none beyond `optional`."""
    need, may = set(wanted), set(optional)
    if not need <= state_dict.keys() <= need | may:
        odd = sorted((need - state_dict.keys()) | (state_dict.keys() - need - may))
        allowed = f"{sorted(need)}" + (f", and perhaps {sorted(may)}" if may else "")
        raise OptionError("state_dict", f"keys {sorted(state_dict)}", allowed, f"Look at {', '.join(odd)}.")
