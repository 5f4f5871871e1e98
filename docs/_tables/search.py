"""The table of benchmarks/search.py."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from .figures import load, table, where

HOSTS = {
    "vit": "ViT 64 × 6, digits, 144 tokens", "minilm": "MiniLM 384 × 6, Brown's sentences, timed at 512 tokens",
    "gpt": "GPT-2 96 × 6, bytes of Brown, 256 tokens",
}  # fmt: skip


HEAD = (
    "model", "seed", "plan", "share of time", "predicted damage", "true damage", "best fixed rule", "worst",
    "less damage", "predicted in the rule's time: front, rule", "seconds",
)  # fmt: skip


def search() -> str:
    """For each model and seed the plan within the budget, and the best fixed rule, by true damage on other samples."""
    content, lines = load("search.json"), []
    for row in content["rows"]:
        chosen, rules = row["points"][0], sorted(row["rules"], key=lambda rule: rule["true"])
        best = rules[0]
        equal = min(point["predicted"] for point in row["front"] if point["share"] <= best["share"] + 1e-9)
        lines.append((
            HOSTS[row["host"]], row["seed"], mixers(chosen["plan"]), f"{100 * chosen['share']:.0f} %",
            f"{chosen['predicted']:.3g}", f"{chosen['true']:.3g}",
            *(f"{rule['name']} ({100 * rule['share']:.0f} %): {rule['true']:.3g}" for rule in (best, rules[-1])),
            f"{100 * (1 - chosen['true'] / best['true']):.0f} %", f"{equal:.3g}, {best['predicted']:.3g}",
            f"{row['seconds']:.0f}",
        ))  # fmt: skip
    points = [point for row in content["rows"] for point in row["points"] if point["predicted"]]
    ratios = [point["true"] / point["predicted"] for point in points]
    budgets = ", ".join(sorted({f"{100 * row['budget']:.0f} %" for row in content["rows"]}))
    setting = (
        f"Budget: {budgets}. Candidates: qt, pom, PADRe of degree 2 and 3, and attention. Damage on 64 samples that "
        "nothing was chosen by: nats; for MiniLM a share of the features' variance. Over the points of the front that "
        f"were measured, the true damage is {min(ratios):.2g} to {max(ratios):.2g} times the predicted sum (median "
        f"{median(ratios):.2g}). Seconds are the processor's, of a whole search: {where(content['machine'])}, beside "
        "other work, which makes the layers' times rough."
    )
    return f"{table(HEAD, lines)}\n\n{setting}"


def mixers(plan: dict[str, Any]) -> str:
    """ "qt in 3, attention in 3"."""
    names = list(plan.values())
    return ", ".join(f"{name.replace('keep', 'attention')} in {names.count(name)}" for name in dict.fromkeys(names))


TABLES: dict[str, Callable[[], str]] = {"search": search}
