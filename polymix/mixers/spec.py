"""Mixers as people type them: "padre:degree=3", "padre-3", "pom:degree=3:expand=1", "grid=64x64"."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

from polymix._io import parse_options
from polymix.errors import OptionError
from polymix.mixers.config import MixerConfig
from polymix.mixers.registry import ATTENTION, check_options, config_class

DEFAULT = "softmax,padre-2,padre-3,pom,qt,poly_sa,poly_nl,linear_floor"
_STRUCTURES = ("token", "channel", "A", "B", "C", "D", "U", "V")


def parse_mixer(text: str) -> tuple[str, MixerConfig]:
    """ "padre:degree=3" or its short form "padre-3" -> (label, config)."""
    short = re.fullmatch(r"(\w+)-(\d+)", text.strip())
    if short:
        text = f"{short[1]}:degree={short[2]}"
    name, *words = text.strip().split(":")
    config = config_class(name)
    options = parse_options(_with_structures(words, {f.name for f in fields(config)}), config.annotations())
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
    if ATTENTION not in mixers:
        mixers = {**dict([parse_mixer(ATTENTION)]), **mixers}
    return mixers


def mixer_config(said: dict[str, Any]) -> MixerConfig:
    """The config that `MixerConfig.to_dict` gave, read from JSON, which has lists for tuples."""
    options = {key: _tuples(value) for key, value in said.items() if key != "name"}
    kind = config_class(said["name"])
    check_options(kind, options)
    return kind(**options)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
