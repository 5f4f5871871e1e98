"""The tables of models that others have trained, from benchmarks/results/pretrained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .figures import load, table, where

AIMS = {"every layer": 0.95, "hybrid": 0.99}  # rank correlation, set before anything was measured
MEASURES = ("rank_correlation", "same_nearest", "of_10_nearest", "cosine")


def minilm() -> str:
    """Each plan as converted and after so many steps, and what was reached of the aims."""
    content, lines = load("pretrained/minilm.json"), []
    plans = list(dict.fromkeys(row["plan"] for row in content["rows"]))
    for row in sorted(content["rows"], key=lambda row: (plans.index(row["plan"]), row["steps"])):
        taken = [row["steps"], f"{row['seconds']:.0f}"] if row["steps"] else ["as converted", "–"]
        lines.append((row["plan"], *taken, *(f"{row[name]:.3f}" for name in MEASURES)))
    head = ("mixers", "steps", "seconds", "rank correlation", "same nearest", "of 10 nearest", "cosine")
    setting = (
        f"{content['sentences']} sentences of the Brown corpus that training never saw; steps of "
        f"{content['rows'][0]['batch']} sentences. Seconds are the processor's, the guard included: "
        f"{where(content['machine'])}, beside other work."
    )
    return f"{table(head, lines)}\n\n{setting} {' '.join(_reached(content['rows']))}"


def _reached(rows: list[dict[str, Any]]) -> list[str]:
    """What was aimed at, and what came of it."""
    sentences = []
    for kind, aim in AIMS.items():
        own = [row for row in rows if (" in " in row["plan"]) == (kind == "hybrid")]
        best = max(own, key=lambda row: row["rank_correlation"])
        met = "reached" if best["rank_correlation"] >= aim else "not reached"
        found = f"{best['rank_correlation']:.3f} ({best['plan']}, {best['seconds']:.0f} s)"
        sentences.append(f"Aim with {kind}: a rank correlation of {aim}; {met}: {found}.")
    return sentences


TABLES: dict[str, Callable[[], str]] = {"minilm": minilm}
