"""Weights of the public attention modules, whose projections are one `qkv` and one `proj`, under our names."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def projections(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`Heads` as qkv and a Dense as proj, from qkv.*, proj.*; a bias that qkv lacks is zero where proj has one."""
    weight = state_dict["qkv.weight"]
    found = {"qkv.qkv.weight": weight, "proj.weight": state_dict["proj.weight"]}
    if "proj.bias" in state_dict:
        found["proj.bias"] = state_dict["proj.bias"]
        found["qkv.qkv.bias"] = state_dict.get("qkv.bias", weight.new_zeros(weight.shape[0]))
    return found
