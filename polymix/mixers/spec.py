"""Mixers on the command line: "padre:degree=3", "padre-3:grid=16x16", "pom:degree=3:expand=1"."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from polymix.errors import OptionError, UnknownNameError
from polymix.mixers.config import MixerConfig
from polymix.mixers.registry import ATTENTION, check_options, config_class
from polymix.options import parse_options

DEFAULT = "softmax,padre-2,padre-3,pom,qt,poly_sa,poly_nl,linear_floor"
_STRUCTURES = ("token", "channel", "A", "B", "C", "D", "U", "V")


def parse_mixer(text: str, *, standalone: bool = False) -> tuple[str, MixerConfig]:
    """Label and config of a mixer as typed: "padre:degree=3", or in short "padre-3".

    standalone: the mixer has no host, so that "grid=16x16" and "num_prefix_tokens=1" are allowed.

    Raises:
        UnknownNameError, OptionError: the name, an option or a value is wrong.
    """
    if not isinstance(text, str):
        raise OptionError("mixer", repr(text), "a text such as 'padre:degree=3'", "Pass a name, with options after it.")
    short = re.fullmatch(r"(\w+)-(\d+)(:.*)?", text.strip())
    if short:
        text = f"{short[1]}:degree={short[2]}{short[3] or ''}"
    name, *words = text.strip().split(":")
    try:
        config = config_class(name)
    except UnknownNameError as error:  # it is the mixer's, not that of whatever takes one
        raise UnknownNameError("mixer", error.got, error.allowed, error.cure) from error
    options = parse_options(_with_structures(words, {f.name for f in fields(config)}), config.annotations())
    for reserved in ("grid", "num_prefix_tokens"):
        if reserved in options and not standalone:
            raise OptionError(reserved, text, "a mixer without this option", "Leave it out: the host decides it.")
    check_options(config, options)
    built = config(**options)
    label = f"{name}-{options['degree']}" if list(options) == ["degree"] else text.strip()
    return label, built


def parse_words(name: str, words: Sequence[str], others: Sequence[str]) -> tuple[MixerConfig, dict[str, Any]]:
    """The config of a mixer whose options stand apart from its name: "padre-3" and ["grid=16x16", "dim=192"].

    The options `others`, such as "dim", are not the mixer's. They are returned beside it.
    """
    own = [word for word in words if word.partition("=")[0] not in others]
    rest = parse_options([word for word in words if word.partition("=")[0] in others])
    return parse_mixer(":".join((name, *own)), standalone=True)[1], rest


def _with_structures(words: list[str], names: set[str]) -> list[str]:
    """Join a structure's options to it: ["token=monarch", "blocks=8"] -> ["token=monarch:blocks=8"].

    An option that the mixer does not have belongs to the structure before it.
    """
    joined: list[str] = []
    for word in words:
        previous = joined[-1].partition("=")[0] if joined else ""
        if previous in _STRUCTURES and previous in names and word.partition("=")[0] not in names:
            joined[-1] += ":" + word
        else:
            joined.append(word)
    return joined


def parse_mixers(text: str) -> dict[str, MixerConfig]:
    """The mixers of a comma-separated list, by label. Attention, the baseline, is added in front if it is missing."""
    mixers: dict[str, MixerConfig] = {}
    for part in text.split(","):
        if not part.strip():
            raise OptionError("--mixers", repr(text), "names separated by commas", "Remove the empty name.")
        label, config = parse_mixer(part)
        if label in mixers:
            raise OptionError("--mixers", f"{label} twice", "different mixers", "Remove one of them.")
        mixers[label] = config
    if ATTENTION not in mixers:
        mixers = {**dict([parse_mixer(ATTENTION)]), **mixers}
    return mixers


def mixer_config(saved: dict[str, Any]) -> MixerConfig:
    """The config that `MixerConfig.to_dict` saved as JSON. Lists become tuples again."""
    options = {key: _tuples(value) for key, value in saved.items() if key != "name"}
    kind = config_class(saved["name"])
    check_options(kind, options)
    return kind(**options)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
