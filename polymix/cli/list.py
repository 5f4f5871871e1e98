"""polymix list."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from polymix.cli.shared import AsJson, print_json
from polymix.numbers import stacked

_COLUMNS = 80  # characters across, below which columns are too narrow for the options' names


def command(as_json: AsJson = False) -> None:
    """List all mixers: what they can do, what they cost (in multiply-adds), and their options.

    Example: polymix list
    """
    from polymix.mixers.registry import config_class, list_mixers, mixer_class

    if as_json:
        print_json({name: _describe(mixer_class(name).capabilities, config_class(name)) for name in list_mixers()})
        return
    headings = ("mixer", "can do", "cost", "options (default)")
    rows = [(name, *_cells(mixer_class(name).capabilities, config_class(name))) for name in list_mixers()]
    console = Console()
    if console.width < _COLUMNS:
        for row in rows:
            for line in stacked(headings, row, console.width):
                console.print(line, markup=False, highlight=False)
        return
    columns = (Column(text, ratio=share, overflow="fold") for text, share in zip(headings[1:], (2, 2, 3), strict=True))
    table = Table(Column(headings[0], no_wrap=True), *columns, show_lines=True, expand=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _cells(can: Any, config: Any) -> tuple[str, str, str]:
    """What a mixer can do, its cost, and its options."""
    able = [word for word in ("causal", "cross", "recurrent", "any_length") if getattr(can, word)]
    able += [f"{'/'.join(map(str, can.grids))}-D"] if can.grids else []
    able += [f"masks: {', '.join(sorted(can.masks))}"] if can.masks else []
    return ", ".join(able), config.cost_formula, ", ".join(f"{f.name}={f.default}" for f in fields(config))


def _describe(can: Any, config: Any) -> dict[str, Any]:
    return {
        "capabilities": {**asdict(can), "masks": sorted(can.masks)},
        "cost": config.cost_formula,
        "options": {f.name: f.default for f in fields(config)},
    }
