"""The picture of a search: its front."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from polymix.pages.plots import COLOURS, LIGHT, PHONE_WIDTH


def front(content: Mapping[str, Any], narrow: bool = False) -> Figure:
    """The front, with predicted and true damage of each plan that was measured."""
    figure = Figure(figsize=(PHONE_WIDTH, 3.6) if narrow else (6.5, 4), layout="constrained")
    axes = figure.subplots()
    line = content["front"]
    axes.plot([100 * row["share"] for row in line], [row["predicted"] for row in line], color=LIGHT["front"],
              label="front, predicted", zorder=1)  # fmt: skip
    for rows, key, colour, marker, label in (
        (content["points"], "predicted", COLOURS[0], "o", "searched, predicted"),
        (content["points"], "true", COLOURS[0], "D", "searched, true"),
        (content["rules"], "true", COLOURS[1], "s", "fixed rules, true"),
    ):
        rows = [row for row in rows if row[key] is not None]
        filled: dict[str, Any] = (
            {"facecolors": "none", "edgecolors": colour} if key == "predicted" else {"color": colour}
        )
        axes.scatter([100 * row["share"] for row in rows], [row[key] for row in rows], marker=marker, label=label,
                     zorder=2, **filled)  # fmt: skip
    axes.axvline(100 * content["settings"]["budget"], color=LIGHT["muted"], linewidth=0.8, linestyle=":")
    axes.set_xlabel("% of the attention's time")
    axes.set_ylabel("damage")
    axes.legend(fontsize=8)
    return figure
