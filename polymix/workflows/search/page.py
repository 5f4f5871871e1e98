"""report.html of a search, with the picture of its front."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polymix
from polymix.convert.trained import PLAN
from polymix.files import write_whole
from polymix.numbers import machine_line
from polymix.pages import render
from polymix.workflows.search.answer import Search, front_rows, layer_rows, point_rows
from polymix.workflows.search.damage import KINDS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write(answer: Search, folder: Path) -> None:
    """Write the page and front.png into the folder of a search."""
    from polymix.pages.plots import Picture, publish

    content = answer.content
    alt = "Predicted damage against the share of attention's time, with the plans and fixed rules that were measured"
    shown = publish([Picture("front", alt, partial(front, content))], folder)
    page = render(
        "search/report.html.j2", content=content, pictures=shown, damage=KINDS[content["damage"]],
        points=point_rows(content), front=front_rows(content, 20), layers=layer_rows(content),
        machine=machine_line(content["machine"]), version=polymix.__version__, plan=folder / PLAN,
    )  # fmt: skip
    write_whole(folder / "report.html", page)


def front(content: Mapping[str, Any], narrow: bool = False) -> Figure:
    """The front, with predicted and true damage of each plan that was measured."""
    from matplotlib.figure import Figure

    from polymix.pages.plots import COLOURS, LIGHT, NARROW

    figure = Figure(figsize=(NARROW, 3.6) if narrow else (6.5, 4), layout="constrained")
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
