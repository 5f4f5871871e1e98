"""The table of what distillation makes of converted models, from benchmarks/results/distil-harm.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .figures import load, table


def _gain(row: dict[str, Any], before: float) -> float:
    """By how much a row's result is better than another value."""
    return float(row["result"] - before if row["metric"] == "accuracy" else before - row["result"])


def _worst(gains: list[tuple[float, str]]) -> str:
    """The largest loss among gains of accuracy, and among those of perplexity."""
    points = max((-100 * gain for gain, metric in gains if metric == "accuracy"), default=0.0)
    other = max((-gain for gain, metric in gains if metric != "accuracy"), default=0.0)
    return f"{max(points, 0.0):.1f} points of accuracy and {max(other, 0.0):.2g} of perplexity at the most"


def distil_harm() -> str:
    """Results of this version and of the one before, which had no guard; and how often which was better."""
    by_run: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in load("distil-harm.json")["rows"]:
        by_run.setdefault((row["host"], row["plan"], row["steps"]), {})[row["label"]] = row
    lines, kept, compared = [], [], []
    for (host, plan, steps), of in by_run.items():
        now, then = of["now"], of["before"]
        values = now["before"], now["converted"], then["result"], now["result"]
        shown = (f"{value:.1%}" if now["metric"] == "accuracy" else f"{value:.4g}" for value in values)
        lines.append((host, plan, steps, *shown, now["kept"]))
        kept.append((_gain(now, now["converted"]), now["metric"]))
        compared.append((_gain(now, then["result"]), now["metric"]))
    head = ("model", "mixers", "steps", "before", "converted", "without guard", "distilled", "stage kept")
    without = [(_gain(of["before"], of["before"]["converted"]), of["before"]["metric"]) for of in by_run.values()]
    text = (
        f"In {sum(gain < 0 for gain, _ in kept)} of {len(kept)} runs the result is worse than the converted model, by "
        f"{_worst(kept)}; without guard in {sum(gain < 0 for gain, _ in without)}, by {_worst(without)}. It is better "
        f"than without guard in {sum(gain > 0 for gain, _ in compared)} runs and worse in "
        f"{sum(gain < 0 for gain, _ in compared)}, by {_worst(compared)}."
    )
    return f"{table(head, lines)}\n\n{text}"


TABLES: dict[str, Callable[[], str]] = {"distil-harm": distil_harm}
