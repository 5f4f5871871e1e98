"""The table of what distillation makes of converted models, from benchmarks/results/distil-harm.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .figures import load, table


def _gain(row: dict[str, Any], before: float) -> float:
    """By how much a row's result is better than another value."""
    return float(row["result"] - before if row["metric"] == "accuracy" else before - row["result"])


def distil_harm() -> str:
    """Results of this version and of the one before, which had no guard; and how often which was better."""
    by_run: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in load("distil-harm.json")["rows"]:
        by_run.setdefault((row["host"], row["plan"], row["steps"]), {})[row["label"]] = row
    lines, runs = [], []
    for (host, plan, steps), of in by_run.items():
        now, then = of["now"], of["before"]
        values = now["before"], now["converted"], then["result"], now["result"]
        shown = (f"{value:.1%}" if now["metric"] == "accuracy" else f"{value:.4g}" for value in values)
        lines.append((host, plan, steps, *shown, now["kept"]))
        runs.append((_gain(now, now["converted"]), _gain(now, then["result"]), now["metric"]))
    head = ("model", "mixers", "steps", "before", "converted", "without guard", "distilled", "stage kept")
    worse = [gain for _, gain, _ in runs if gain < 0]
    points = max((-100 * gain for _, gain, metric in runs if metric == "accuracy"), default=0.0)
    text = (
        f"In {sum(gain < 0 for gain, _, _ in runs)} of {len(runs)} runs the result is worse than the converted model. "
        f"It is better than without guard in {sum(gain > 0 for _, gain, _ in runs)}, worse in {len(worse)}, by "
        f"{points:.1f} points of accuracy at the most."
    )
    return f"{table(head, lines)}\n\n{text}"


TABLES: dict[str, Callable[[], str]] = {"distil-harm": distil_harm}
