"""Values that a config file can hold: Python's plain ones, tuples among them, and configs of mixers."""

from __future__ import annotations

import math
from typing import Any

from polymix.mixers import MixerConfig
from polymix.mixers.spec import mixer_config

_SCALARS = (type(None), bool, int, float, str)


def is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(type(key) is str and not key.startswith("__") and is_plain(part) for key, part in value.items())
    if type(value) in (tuple, list):
        return all(map(is_plain, value))
    return type(value) in _SCALARS or isinstance(value, MixerConfig)


def encode(value: Any) -> Any:
    """A plain value as JSON has it."""
    if isinstance(value, MixerConfig):
        return {"__mixer__": value.to_dict()}
    if isinstance(value, dict):
        return {key: encode(part) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        parts = [encode(part) for part in value]
        return {"__tuple__": parts} if isinstance(value, tuple) else parts
    return {"__float__": repr(value)} if isinstance(value, float) and not math.isfinite(value) else value


def decode(value: Any) -> Any:
    """What `encode` was given."""
    if isinstance(value, list):
        return [decode(part) for part in value]
    if not isinstance(value, dict):
        return value
    if "__mixer__" in value:
        return mixer_config(value["__mixer__"])
    if "__tuple__" in value:
        return tuple(map(decode, value["__tuple__"]))
    return float(value["__float__"]) if "__float__" in value else {key: decode(part) for key, part in value.items()}
