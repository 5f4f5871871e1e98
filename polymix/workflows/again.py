"""The options of an earlier run, as words of a command that is to be run again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import fields
from typing import Any


def words(kind: type, settings: Mapping[str, Any], *names: str) -> str:
    """Each option of these names with another value than its default, as " --patch-size 4".

    kind: the dataclass of the settings, which has the defaults. A flag that is set is its name alone.
    """
    usual = {field.name: field.default for field in fields(kind)}
    return "".join(
        f" --{name.replace('_', '-')}{'' if settings[name] is True else f' {shlex.quote(str(settings[name]))}'}"
        for name in names if settings.get(name, usual[name]) != usual[name]
    )  # fmt: skip
