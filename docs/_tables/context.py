"""The tables of a longer context, from benchmarks/results/context.json."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from .figures import load, table, where

WAYS = {"interpolate": "interpolated", "repeat": "repeated", "none": "zero", "continue": "go on", None: "its own"}


def losses() -> str:
    """The loss by position, a row for each model and training."""
    content = load("context.json")
    head = (
        "host",
        "layers",
        "positions",
        "distilled at",
        *(f"{low:,}–{high:,}" for low, high in pairwise(content["edges"])),
    )
    lines = []
    for row in content["rows"]:
        layers = "attention" if row["model"] == "host" else row["model"]
        length = "–" if row["model"] == "host" else f"{row['trained']:,}"
        values = ["fails" if value is None else f"{value:.2f}" for value in row["loss"]]
        lines.append((row["host"], layers, WAYS[row.get("positions")], length, *values))
    lines.append(("the best guess", "", "", "", *(f"{value:.2f}" for value in content["best"])))
    return table(head, lines)


def speeds() -> str:
    """Memory and time of a token after others, a row for each model."""
    content, rows = load("context.json"), {}
    for row in content["speed"]:
        rows.setdefault(row["model"], []).append(row)
    head = ("layers", *(f"after {row['tokens']:,} tokens" for row in next(iter(rows.values()))))
    lines = [
        (
            "attention" if name == "host" else name,
            *(f"{row['bytes'] / 1024:,.0f} KiB, {row['ms']:.1f} ms" for row in its),
        )
        for name, its in rows.items()
    ]
    setting = (
        f"Two layers of 64 channels, {content['old']} positions, {content['steps']} steps; {content['tuning']} steps "
        f"of each stage of distillation on as many words each, at {content['new']:,} in pieces of {content['old']}; "
        f"one seed. {where(content['machine'])}, beside other work; the "
        "processor's time. "
        "`python benchmarks/context.py benchmarks/results/context.json`"
    )
    return f"{table(head, lines)}\n\n{setting}"


TABLES: dict[str, Callable[[], str]] = {"context": losses, "context-speed": speeds}
