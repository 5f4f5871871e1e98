"""The table of benchmarks/search.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import median
from typing import Any

from .figures import load, over_seeds, table, where

HOSTS = {
    "vit": "ViT 64 × 6, digits, 144 tokens", "minilm": "MiniLM 384 × 6, Brown's sentences, timed at 512 tokens",
    "gpt": "GPT-2 96 × 6, bytes of Brown, 256 tokens",
}  # fmt: skip

HEAD = (
    "model", "plan", "share of time, %", "predicted damage", "true damage", "best fixed rule", "its true damage",
    "the worst rule's", "less than the best rule, %", "predicted in that rule's time, %", "seconds",
)  # fmt: skip


def search() -> str:
    """For each model the plan within the budget, and the best fixed rule, by true damage on other samples."""
    content = load("search.json")
    by_host = {name: [row for row in content["rows"] if row["host"] == name] for name in HOSTS}
    points = [point for row in content["rows"] for point in row["points"] if point["predicted"]]
    ratios = [point["true"] / point["predicted"] for point in points]
    budgets = ", ".join(sorted({f"{100 * row['budget']:.0f} %" for row in content["rows"]}))
    seeds = len({row["seed"] for row in content["rows"]})
    setting = (
        f"Budget: {budgets}; {seeds} seeds: the mean ± half of the range. Candidates: qt, pom, PADRe of "
        "degree 2 and 3, and attention. Damage on 64 samples that nothing was chosen by: nats; for MiniLM a share of "
        f"the features' variance. Over the {len(points)} points of the front that were measured, the true damage is "
        f"{min(ratios):.2g} to {max(ratios):.2g} times the predicted sum (median {median(ratios):.2g}). Seconds are "
        f"the processor's, of a whole search: {where(content['machine'])}, beside other work, which makes the layers' "
        "times rough, and so the plans differ between seeds. `python benchmarks/search.py OUT.json`"
    )
    lines = [(HOSTS[name], *cells(rows)) for name, rows in by_host.items() if rows]
    return f"{table(HEAD, lines)}\n\n{setting}"


def cells(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Of one model, over its seeds."""
    chosen = [row["points"][0] for row in rows]
    ranked = [sorted(row["rules"], key=lambda rule: rule["true"]) for row in rows]
    best = [rules[0] for rules in ranked]
    gains = [100 * (1 - point["true"] / rule["true"]) for point, rule in zip(chosen, best, strict=True)]
    equal = [100 * (1 - within(row, rule["share"]) / rule["predicted"]) for row, rule in zip(rows, best, strict=True)]
    numbers = partial(over_seeds, written="{:.2g}".format)
    return [
        often(mixers(point["plan"]) for point in chosen), numbers([100 * point["share"] for point in chosen]),
        numbers([point["predicted"] for point in chosen]), numbers([point["true"] for point in chosen]),
        often(rule["name"] for rule in best), numbers([rule["true"] for rule in best]),
        numbers([rules[-1]["true"] for rules in ranked]), numbers(gains), numbers(equal),
        numbers([row["seconds"] for row in rows]),
    ]  # fmt: skip


def within(row: dict[str, Any], share: float) -> float:
    """The least damage that is predicted for a plan of at most this share of the time."""
    return float(min(point["predicted"] for point in row["front"] if point["share"] <= share + 1e-9))


def often(names: Iterable[str]) -> str:
    """Each name, the commonest first, with the number of seeds where there is another."""
    counts = Counter(names).most_common()
    return counts[0][0] if len(counts) == 1 else "; ".join(f"{name} ({count})" for name, count in counts)


def mixers(plan: dict[str, Any]) -> str:
    """ "qt in 3, attention in 3"."""
    names = sorted(plan.values())
    return ", ".join(f"{name.replace('keep', 'attention')} in {names.count(name)}" for name in dict.fromkeys(names))


TABLES: dict[str, Callable[[], str]] = {"search": search}
