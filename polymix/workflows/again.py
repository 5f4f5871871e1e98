"""The options of an earlier run, as words of a command that is to be run again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import fields
from typing import Any


def repeated_options(kind: type, settings: Mapping[str, Any], *names: str) -> str:
    """Each option of these names with another value than its default, as " --patch-size 4".

    kind: the dataclass of the settings, which has the defaults. Flags are " --keep-host" and " --no-multi-scale", and
    several values stand with commas between them.
    """
    usual = {field.name: field.default for field in fields(kind)}
    saved = {name: _as_field(settings[name]) for name in names if name in settings}
    given = {name: value for name, value in saved.items() if value != usual[name]}
    return "".join(f" {_words(name.replace('_', '-'), value)}" for name, value in given.items())


def _as_field(value: Any) -> Any:
    """results.json has a list where settings have a tuple."""
    return tuple(value) if isinstance(value, list) else value


def _words(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return f"--{name} {shlex.quote(text)}"
