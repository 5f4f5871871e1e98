"""polymix list."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from polymix.cli.shared import AsJson, print_json


def command(as_json: AsJson = False) -> None:
    """List all mixers: what they can do, what they cost (in multiply-adds), and their options.

    Example: polymix list
    """
    from polymix.mixers.registry import config_class, list_mixers, mixer_class

    if as_json:
        print_json({name: _describe(mixer_class(name).capabilities, config_class(name)) for name in list_mixers()})
        return
    parts = (("can do", 2), ("cost", 2), ("options (default)", 3))  # the last is wide enough for every option's name
    columns = (Column(text, ratio=share, overflow="fold") for text, share in parts)
    table = Table(Column("mixer", no_wrap=True), *columns, show_lines=True, expand=True)
    for name in list_mixers():
        mixer, config = mixer_class(name), config_class(name)
        can = mixer.capabilities
        able = [word for word in ("causal", "cross", "recurrent", "any_length") if getattr(can, word)]
        able += [f"{'/'.join(map(str, can.grids))}-D"] if can.grids else []
        options = ", ".join(f"{f.name}={f.default}" for f in fields(config))
        able += [f"masks: {', '.join(sorted(can.masks))}"] if can.masks else []
        table.add_row(name, ", ".join(able), config.cost_formula, options)
    Console().print(table)


def _describe(can: Any, config: Any) -> dict[str, Any]:
    return {
        "capabilities": {**asdict(can), "masks": sorted(can.masks)},
        "cost": config.cost_formula,
        "options": {f.name: f.default for f in fields(config)},
    }
