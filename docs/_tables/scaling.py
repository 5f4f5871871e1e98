"""The tables of loss against size, from benchmarks/results/scaling.json."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import Any

from .figures import RESULTS, load, over_seeds, table, where

FILE = "scaling.json"
ABSENT = "Not measured yet."
Row = dict[str, Any]


def text() -> str:
    """Nats per token and bits per byte of each mixer at each size."""

    def cell(rows: list[Row]) -> str:
        return f"{over_seeds([row['val_loss'] for row in rows])} ({_mean(rows, 'bits_per_byte'):.3f})"

    return _table("text", cell)


def pictures() -> str:
    """Loss and accuracy of each mixer at each size."""

    def cell(rows: list[Row]) -> str:
        accuracy = 100 * _mean(rows, "accuracy")
        return f"{over_seeds([row['val_loss'] for row in rows])} ({accuracy:.1f} %)"

    return _table("fashion", cell)


def setting() -> str:
    """How many seeds there are, the counts of parameters, and the machine."""
    if not (RESULTS / FILE).exists():
        return ABSENT
    content = load(FILE)
    rows, machine = _measured(content), content["machine"]
    seeds = sorted({len({row["seed"] for row in rows if _key(row) == key}) for key in map(_key, rows)})
    count = f"{seeds[0]} seed{'s' * (seeds[-1] > 1)}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds"
    longest = max(row["seconds"] for row in rows)
    return (
        f"{count} of each; ± is half of the range over them. {machine['gpu'] or where(machine)}, torch "
        f"{machine['torch']}, {content['precision']}; {content['parts']} trainings side by side, each of up to "
        f"{longest:.0f} s."
    )


def _table(task: str, cell: Callable[[list[Row]], str]) -> str:
    if not (RESULTS / FILE).exists():
        return ABSENT
    content = load(FILE)
    rows = [row for row in _measured(content) if row["task"] == task]
    sizes = [size for size in content["sizes"] if any(row["size"] == size for row in rows)]
    counts = {size: max(row["in_layers"] for row in rows if row["size"] == size) / 1e6 for size in sizes}
    totals = {size: max(row["parameters"] for row in rows if row["size"] == size) / 1e6 for size in sizes}
    head = ("mixer", *(f"{counts[size]:.1f} M in layers, {totals[size]:.1f} M in all" for size in sizes))
    lines = []
    for mixer in dict.fromkeys(row["mixer"] for row in sorted(rows, key=lambda row: row["seed"])):
        its = {size: [row for row in rows if (row["mixer"], row["size"]) == (mixer, size)] for size in sizes}
        lines.append((mixer, *(cell(its[size]) if its[size] else "–" for size in sizes)))
    return table(head, lines)


def _measured(content: dict[str, Any]) -> list[Row]:
    """The rows of trainings that ended: not those that failed or diverged."""
    return [row for row in content["rows"] if "val_loss" in row]


def _key(row: Row) -> tuple[Any, ...]:
    return row["task"], row["mixer"], row["size"]


def _mean(rows: list[Row], name: str) -> float:
    return fmean(row[name] for row in rows)


TABLES: dict[str, Callable[[], str]] = {
    "scaling": setting, "scaling-text": text, "scaling-pictures": pictures,
}  # fmt: skip
