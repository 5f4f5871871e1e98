"""Weights of the public attention modules, whose projections are one `qkv` and one `proj`, under our names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from polymix.errors import OptionError


def settle(options: dict[str, Any], name: str, value: Any) -> None:
    """Put an option that the weights decide among `options`; an error where another value was asked for."""
    if options.setdefault(name, value) != value:
        raise OptionError(name, repr(options[name]), f"{value!r}, as the weights have it", f"Leave {name} out.")


def projections(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`Heads` as qkv and a Dense as proj, from qkv.*, proj.*; a bias that qkv lacks is zero where proj has one."""
    weight = state_dict["qkv.weight"]
    found = {"qkv.qkv.weight": weight, "proj.weight": state_dict["proj.weight"]}
    if "proj.bias" in state_dict:
        found["proj.bias"] = state_dict["proj.bias"]
        found["qkv.qkv.bias"] = state_dict.get("qkv.bias", weight.new_zeros(weight.shape[0]))
    return found


def load(mixer: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """load_state_dict, with an OptionError that names a weight of another shape than the options ask for."""
    for name, value in mixer.state_dict().items():
        if name in weights and weights[name].shape != value.shape:
            got = f"{name} of shape {tuple(weights[name].shape)}"
            raise OptionError("state_dict", got, str(tuple(value.shape)), "Check the options against the weights.")
    mixer.load_state_dict(dict(weights))
