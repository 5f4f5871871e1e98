"""The table of what distillation makes of converted models, from benchmarks/results/distil-harm.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .figures import load, table


def _gain(row: dict[str, Any], before: float) -> float:
    """By how much a row's result is better than another value."""
    return float(row["result"] - before if row["metric"] == "accuracy" else before - row["result"])


def _worst(gains: list[tuple[float, str]]) -> str:
    """The largest loss of each metric among gains."""
    points = max((-100 * gain for gain, metric in gains if metric == "accuracy"), default=0.0)
    other = max((-gain for gain, metric in gains if metric != "accuracy"), default=0.0)
    parts = [f"{points:.1f} points of accuracy"] * (points > 0) + [f"{other:.2g} of perplexity"] * (other > 0)
    return " and ".join(parts)


def distil_harm() -> str:
    """What distillation made of each converted model, on samples that chose nothing."""
    lines, gains = [], []
    for row in load("distil-harm.json")["rows"]:
        values = row["before"], row["converted"], row["result"]
        shown = (f"{value:.1%}" if row["metric"] == "accuracy" else f"{value:.4g}" for value in values)
        lines.append((row["host"], row["plan"], row["steps"], *shown, row["kept"]))
        gains.append((_gain(row, row["converted"]), row["metric"]))
    head = ("model", "mixers", "steps", "before", "converted", "distilled", "stage kept")
    worse = [(gain, metric) for gain, metric in gains if gain < 0]
    text = f"In {len(worse)} of {len(gains)} runs the result is worse than the converted model"
    return f"{table(head, lines)}\n\n{text}{f', by {_worst(worse)} at the most' if worse else ''}."


TABLES: dict[str, Callable[[], str]] = {"distil-harm": distil_harm}
