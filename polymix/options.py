"""Options as text: "degree=3", "grid=64x64"."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from polymix.errors import OptionError

_WORDS: dict[str, Any] = {"none": None, "true": True, "false": False}


def parse_value(text: str, annotation: str = "") -> Any:
    """Parse an option's value from the command line.

    "none", "true" and "false" become None, True and False; numbers become int or float; "64x64", "2,3" and "a/b"
    become tuples; anything else stays text. For a sequence of texts, commas separate the texts.

    Args:
        text: the value as typed.
        annotation: the option's type, such as "tuple[int, ...] | None". If it allows only text, `text` stays text.
            If it allows only a tuple, a single value becomes a tuple of one.
    """
    if annotation in ("Sequence[str]", "tuple[str, ...]", "list[str]"):
        return tuple(text.split(","))
    kinds = {kind.strip() for kind in re.sub(r"\[[^\]]*\]", "", annotation).split("|")} - {"", "None"}
    if kinds == {"str"}:
        return None if text.lower() == "none" and "None" in annotation else text
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if re.fullmatch(r"\d+(x\d+)+", text):
        return tuple(map(int, text.split("x")))
    for separator in (",", "/"):
        if separator in text:
            return tuple(_number(part) for part in text.split(separator))
    return (_number(text),) if kinds and kinds <= {"tuple", "list", "Sequence"} else _number(text)


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def parse_options(words: Sequence[str], annotations: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Parse options such as ["degree=3", "grid=64x64"] into {"degree": 3, "grid": (64, 64)}.

    Args:
        words: one "option=value" each.
        annotations: the type of each option; see `parse_value`.
    Raises:
        OptionError: a word is not of the form option=value, or an option appears twice.
    """
    options: dict[str, Any] = {}
    for word in words:
        option, sign, value = word.partition("=")
        if not sign or not option or not value:
            cure = "Write it without spaces around the =."
            raise OptionError(word, repr(word), "option=value, such as degree=3", cure)
        if option in options:
            raise OptionError(option, "the option twice", "the option once", "Remove one of them.")
        options[option] = parse_value(value, (annotations or {}).get(option, ""))
    return options
