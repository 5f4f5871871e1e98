"""Mixers as people type them: "padre:degree=3", "padre-3", "pom:degree=3:expand=1", "grid=64x64"."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

from polymix.errors import OptionError
from polymix.mixers.base import MixerConfig
from polymix.mixers.registry import check_options, config_class

DEFAULT = "softmax,padre-2,padre-3,pom,qt,poly_sa,poly_nl,linear_floor"
_TUPLES = ("grid", "terms")
_STRUCTURES = ("token", "channel", "A", "B", "C", "D", "U", "V")
_WORDS: dict[str, Any] = {"none": None, "true": True, "false": False}


def parse_value(option: str, text: str) -> Any:
    """A number, true, false, none, 64x64 for a tuple, or a word; grid and terms are tuples whatever comes."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if re.fullmatch(r"\d+(x\d+)+", text):
        return tuple(map(int, text.split("x")))
    if re.fullmatch(r"[+-]?\d+", text):
        return (int(text),) if option in _TUPLES else int(text)
    try:
        return float(text)
    except ValueError:
        return tuple(text.split("/")) if "/" in text else text


def parse_options(words: list[str]) -> dict[str, Any]:
    """["degree=3", "grid=64x64"] -> {"degree": 3, "grid": (64, 64)}."""
    options = {}
    for word in words:
        option, sign, value = word.partition("=")
        if not sign or not option or not value:
            raise OptionError(word, "no option", "option=value, such as degree=3", "Write = without spaces.")
        if option in options:
            raise OptionError(option, "given twice", "once", "Drop one of them.")
        options[option] = parse_value(option, value)
    return options


def parse_mixer(text: str) -> tuple[str, MixerConfig]:
    """ "padre:degree=3" or its short form "padre-3" -> (label, config)."""
    short = re.fullmatch(r"(\w+)-(\d+)", text.strip())
    if short:
        text = f"{short[1]}:degree={short[2]}"
    name, *words = text.strip().split(":")
    config = config_class(name)
    options = parse_options(_with_structures(words, {f.name for f in fields(config)}))
    for reserved in ("grid", "num_prefix_tokens"):
        if reserved in options:
            raise OptionError(reserved, text, "a mixer without it: the host decides", "Leave it out of --mixers.")
    check_options(config, options)
    built = config(**options)
    label = f"{name}-{options['degree']}" if list(options) == ["degree"] else text.strip()
    return label, built


def _with_structures(words: list[str], known: set[str]) -> list[str]:
    """["token=monarch", "blocks=8"] -> ["token=monarch:blocks=8"]: what a mixer does not know is its structure's."""
    joined: list[str] = []
    for word in words:
        before = joined[-1].partition("=")[0] if joined else ""
        if before in _STRUCTURES and before in known and word.partition("=")[0] not in known:
            joined[-1] += ":" + word
        else:
            joined.append(word)
    return joined


def parse_mixers(text: str) -> dict[str, MixerConfig]:
    """A comma-separated list of mixers by label. Attention is always among them: it is what all are compared with."""
    mixers: dict[str, MixerConfig] = {}
    for part in text.split(","):
        if not part.strip():
            raise OptionError("--mixers", repr(text), "names separated by commas", "Remove the empty one.")
        label, config = parse_mixer(part)
        if label in mixers:
            raise OptionError("--mixers", f"{label} twice", "different mixers", "Drop one of them.")
        mixers[label] = config
    if "softmax" not in mixers:
        mixers = {**dict([parse_mixer("softmax")]), **mixers}
    return mixers


def mixer_config(said: dict[str, Any]) -> MixerConfig:
    """The config that `MixerConfig.to_dict` gave, read from JSON, which has lists for tuples."""
    options = {key: _tuples(value) for key, value in said.items() if key != "name"}
    kind = config_class(said["name"])
    check_options(kind, options)
    return kind(**options)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
