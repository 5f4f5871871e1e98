"""polymix list."""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import asdict, fields
from typing import Any

from polymix.cli.shared import AsJson, print_json
from polymix.numbers import terminal_width

_NAMES = 14  # characters of the longest name and the spaces after it


def command(as_json: AsJson = False) -> None:
    """List all mixers, each with a sentence. polymix show NAME has what one can do, what it costs, and its options.

    Example: polymix list
    """
    from polymix.mixers.registry import ATTENTION, FLOOR, config_class, list_mixers, mixer_class

    if as_json:
        print_json({name: _describe(mixer_class(name), config_class(name)) for name in list_mixers()})
        return
    related = [name for name in list_mixers() if ".related." in mixer_class(name).__module__]
    own = [name for name in list_mixers() if name not in (*related, ATTENTION, FLOOR)]
    parts = {"Polynomial mixers": own, "To compare with": [ATTENTION, FLOOR], "From other papers": related}
    width = terminal_width()
    for place, (title, names) in enumerate(parts.items()):
        print("\n" * (place > 0) + title)
        for name in names:
            first = f"  {name:<{_NAMES}}"
            below = " " * len(first) if width > 3 * _NAMES else "    "
            text = first + sentence(mixer_class(name))
            print(textwrap.fill(text, width, subsequent_indent=below, break_on_hyphens=False))
    print()
    print(textwrap.fill("polymix show NAME: what a mixer can do, what it costs, and its options.", width))


def sentence(mixer: type[Any]) -> str:
    """What a mixer is: the first sentence of its documentation."""
    return (inspect.getdoc(mixer) or "").partition("\n")[0]


def _describe(mixer: type[Any], config: Any) -> dict[str, Any]:
    can = mixer.capabilities
    return {
        "is": sentence(mixer),
        "capabilities": {**asdict(can), "masks": sorted(can.masks)},
        "cost": config.cost_formula,
        "options": {f.name: f.default for f in fields(config)},
    }
