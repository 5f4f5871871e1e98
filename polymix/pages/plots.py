"""The style of all pictures, and how they are saved."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

STYLE: dict[str, Any] = {
    "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e4e4e4",
    "axes.axisbelow": True, "legend.frameon": False, "figure.dpi": 150, "savefig.bbox": "tight",
}  # fmt: skip
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a3db8", "#8c510a", "#5b7f00", "#c2185b"]
MARKERS = "osD^vP*X<>"


def style() -> AbstractContextManager[None]:
    """The style of polymix's pictures, for a `with` statement."""
    context: AbstractContextManager[None] = mpl.rc_context(STYLE)
    return context


def looks(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """A colour and a marker for each name, always the same for the same names."""
    return {
        name: {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]} for i, name in enumerate(names)
    }


def plain_log(axis: Axis) -> None:
    """Ticks at 1, 2 and 5 of every decade, written as plain numbers. Call it after set_xscale or set_yscale."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=20))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")


def token_axis(axes: Axes, counts: Iterable[int], label: str = "tokens") -> None:
    """A logarithmic x axis with a tick at every token count."""
    ticks = sorted(set(counts))
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{n:,}" for n in ticks], fontsize=8)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(label)


def save(figure: Figure, path: Path) -> Path:
    """Write the picture whole or not at all."""
    part = path.with_name(f".{path.name}")  # keeps the suffix, from which matplotlib reads the format
    figure.savefig(part)
    part.replace(path)
    return path
