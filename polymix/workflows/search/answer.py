"""The result of a search: a plan with trained mixers, the front that it lies on, and what it was compared with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polymix.convert.plan import KEEP
from polymix.convert.trained import TrainedPlan
from polymix.mixers import MixerConfig
from polymix.numbers import DASH, aligned, figure, listed, percent, plural, spanned
from polymix.workflows.search.damage import KINDS

SHOWN = 10  # points of the front that are printed


@dataclass(frozen=True)
class Search:
    """What `polymix.search` returns. Pass it to `polymix.convert`, whose mixers then begin as trained here.

    content: all figures, as results.json of the command holds them. trained: the plan with its trained mixers.
    """

    content: Mapping[str, Any]
    trained: TrainedPlan

    def plan(self) -> dict[str, MixerConfig | str]:
        """A mixer or "keep" for each layer."""
        return self.trained.plan()

    @property
    def front(self) -> list[dict[str, Any]]:
        """The best plans by their share of the attention's time, with the damage that is predicted for them."""
        return list(self.content["front"])

    @property
    def points(self) -> list[dict[str, Any]]:
        """Plans whose true damage was measured on other samples; the chosen one is the first."""
        return list(self.content["points"])

    @property
    def rules(self) -> list[dict[str, Any]]:
        """The best fixed rules within the budget, with their true damage on the same samples."""
        return list(self.content["rules"])

    @property
    def headline(self) -> str:
        return str(self.content["headline"])

    def to_dict(self) -> dict[str, Any]:
        return dict(self.content)

    def __str__(self) -> str:
        return "\n\n".join(
            [self.headline, *("\n".join(lines) for lines in tables(self.content)), *self.content["notes"]]
        )


def tables(content: Mapping[str, Any]) -> list[list[str]]:
    """The front, what was measured, and the damage of each replacement, as text."""
    return [
        [f"The front (damage: {KINDS[content['damage']]}):", *aligned(front_rows(content, SHOWN))],
        ["Predicted against true, on samples that nothing was chosen by:", *aligned(point_rows(content))],
        ["Damage of each replacement alone, and ms of each layer:", *aligned(layer_rows(content))],
    ]


def front_rows(content: Mapping[str, Any], limit: int) -> list[tuple[str, ...]]:
    """Points of the front, evenly spaced, with the plan of each."""
    front = content["front"]
    count = min(limit, len(front))
    chosen = [front[round(place * (len(front) - 1) / max(count - 1, 1))] for place in range(count)]
    rows = [(percent(row["share"]), figure(row["predicted"]), in_words(row["plan"])) for row in chosen]
    return [("attention's time", "predicted", "plan"), *rows]


def point_rows(content: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Plans that were measured: those of the front, then the fixed rules."""
    rows = [
        (row["name"], percent(row["share"]), figure(row["predicted"]), figure(row["true"]), in_words(row["plan"]))
        for row in (*content["points"], *content["rules"])
    ]
    return [("", "attention's time", "predicted", "true", "plan"), *rows]


def layer_rows(content: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """For each layer the time of its attention, and each candidate's time and damage, trained where it was."""
    labels = list(dict.fromkeys(row["mixer"] for row in content["times"] if row["mixer"] != KEEP))
    times = {(row["layer"], row["mixer"]): row["ms"] for row in content["times"]}
    damages: dict[tuple[str, str], Mapping[str, Any]] = {}  # of the weights that it ends with
    for row in content["damages"]:
        pair, before = (row["layer"], row["mixer"]), damages.get((row["layer"], row["mixer"]))
        if before is None or before["stage"] == "untrained" or _size(row) <= _size(before):
            damages[pair] = row
    rows = []
    for layer in dict.fromkeys(row["layer"] for row in content["times"]):
        cells = [_cell(times.get((layer, label)), damages.get((layer, label))) for label in labels]
        rows.append((layer or "(the model)", f"{figure(times[layer, KEEP])} ms", *cells))
    return [("layer", "attention", *labels), *rows]


def _size(row: Mapping[str, Any]) -> float:
    """Its damage, as a number that can be compared."""
    return math.inf if row["damage"] is None else float(row["damage"])


def _cell(ms: float | None, damage: Mapping[str, Any] | None) -> str:
    if ms is None:
        return DASH
    if damage is None:
        return f"{figure(ms)} ms"
    mark = "" if damage["stage"] == "trained" else " untrained"
    return f"{figure(ms)} ms, {figure(damage['damage'])}{mark}"


def in_words(plan: Mapping[str, str]) -> str:
    """Which layers have which mixer: "qt in blocks.0–3.attn"; layers that keep their attention are not named."""
    by_mixer: dict[str, list[str]] = {}
    for layer, label in plan.items():
        by_mixer.setdefault(label, []).append(layer or "the model")
    return "; ".join(f"{label} in {spanned(names)}" for label, names in by_mixer.items() if label != KEEP) or KEEP


def headline(content: Mapping[str, Any]) -> str:
    """Two sentences: the plan, and what it costs."""
    chosen = content["points"][0]
    layers = list(chosen["plan"].values())
    labels = list(dict.fromkeys(label for label in layers if label != KEEP))
    what = listed(f"{label} in {layers.count(label)}" for label in labels) if labels else "no mixer"
    text = (
        f"Best plan within {percent(content['settings']['budget'])} of the attention's time: {what} of "
        f"{plural(len(layers), 'layer')}, {percent(chosen['share'])} of the time. Damage: {figure(chosen['true'])} "
        f"(predicted: {figure(chosen['predicted'])})"
    )
    best = min(content["rules"], key=lambda row: row["true"], default=None)
    return f"{text}; the best fixed rule, {best['name']}: {figure(best['true'])}." if best else f"{text}."
