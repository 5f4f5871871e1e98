"""The pictures of a benchmark."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from polymix.measure.roofline import Ceiling
from polymix.workflows.bench.group import PRODUCTS
from polymix.workflows.bench.table import Row, label, views

STYLE: dict[str, Any] = {
    "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e4e4e4",
    "axes.axisbelow": True, "legend.frameon": False, "figure.dpi": 150, "savefig.bbox": "tight",
}  # fmt: skip
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a3db8", "#8c510a", "#5b7f00", "#c2185b"]
MARKERS = "osD^vP*X<>"


def looks(content: Row) -> dict[str, dict[str, Any]]:
    """Colour and marker by label: attention black, the others in the order of measuring."""
    names = {label(row): row["mixer"].partition(":")[0] for row in content["rows"]}
    rest = [name for name, mixer in names.items() if mixer != "softmax"]
    table = {
        name: {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]} for i, name in enumerate(rest)
    }
    return table | {name: {"color": "black", "marker": "o"} for name, mixer in names.items() if mixer == "softmax"}


def latency(rows: Sequence[Row], axes: Axes, look: Mapping[str, dict[str, Any]]) -> None:
    """Time against tokens, log-log, with 10 to 90 % of the runs; dashed beneath each the floor."""
    times = PRODUCTS.get(rows[0]["pass"], 1)
    for name, style in look.items():
        mine = [row for row in rows if label(row) == name]
        counts, seconds = [row["tokens"] for row in mine], [row["seconds"] for row in mine]
        spread = [
            [1e3 * (row["seconds"] - row["low"]) for row in mine],
            [1e3 * (row["high"] - row["seconds"]) for row in mine],
        ]
        axes.errorbar(counts, [1e3 * s for s in seconds], yerr=spread, markersize=4, elinewidth=0.8, capsize=2, **style)
        bare = [(row["tokens"], 1e3 * times * row["floor"]) for row in mine if row["floor"]]
        if bare:
            axes.plot(*zip(*bare, strict=True), color=style["color"], linestyle=(0, (3, 2)), linewidth=1, alpha=0.7)
    axes.set_xscale("log")
    axes.set_yscale("log")
    ticks = sorted({row["tokens"] for row in rows})
    axes.set_xticks(ticks, [f"{n:,}" for n in ticks], fontsize=8)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=20))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("tokens")
    axes.set_ylabel("time of one call, ms")


def roofline(ceiling: Ceiling, rows: Sequence[Row], axes: Axes, look: Mapping[str, dict[str, Any]]) -> None:
    """FLOP/s against FLOPs a byte, both by formula over measured time, under what the machine can do at most."""
    for name, style in look.items():
        mine = [row for row in rows if label(row) == name]
        points = [(row["flops"] / row["bytes"], row["flops"] / row["seconds"] / 1e9) for row in mine]
        if not points:
            continue
        x, y = zip(*points, strict=True)
        sizes = [14 + 9 * math.log2(row["tokens"] / min(r["tokens"] for r in rows) + 1) for row in mine]
        axes.plot(x, y, color=style["color"], linewidth=0.8, alpha=0.6)
        axes.scatter(x, y, s=sizes, color=style["color"], marker=style["marker"], zorder=3)
    axes.set_xscale("log")
    axes.set_yscale("log")
    reached = [row["flops"] / row["bytes"] for row in rows]
    ridge = ceiling.flops_per_second / ceiling.bytes_per_second
    low, high = min([ridge, *reached]) / 2, max([ridge, *reached]) * 2
    line = [low, ridge, high]
    axes.plot(line, [ceiling.roof(x) / 1e9 for x in line], color="#555555", linewidth=2, zorder=1)
    axes.set_xlim(low, high)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=20))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter("{x:g}")
    axes.set_xlabel("FLOPs a byte, by formula")
    axes.set_ylabel("GFLOP/s")


def draw(content: Row, folder: Path) -> list[Path]:
    """Write latency.png, a panel for each pass and setting, and roofline.png, one for each type and threads.

    What has stopped has no place there; where everything has, there is no picture.
    """
    content = {**content, "rows": [row for row in content["rows"] if not row["stopped"]]}
    look = looks(content)
    panels = [(title, partial(latency, rows, look=look)) for title, rows in views(content)]
    roofs = []
    for ceiling in (Ceiling(**known) for known in content["ceilings"]):
        here = [row for row in content["rows"] if (row["dtype"], row["threads"]) == (ceiling.dtype, ceiling.threads)]
        for pass_ in ("forward", "folded", "training"):
            mine = [row for row in here if row["pass"] == pass_]
            if mine:
                title = f"{pass_}, {ceiling.dtype}, {ceiling.threads} thread{'s' * (ceiling.threads > 1)}\n"
                title += f"roof, measured: {ceiling.flops_per_second / 1e9:,.0f} GFLOP/s, "
                title += f"copy {ceiling.bytes_per_second / 1e9:,.0f} GB/s"
                roofs.append((title, partial(roofline, ceiling, mine, look=look)))
                break  # the passes do the same products
    dashed = "dashed: its own products, run bare (training: three times)"
    pages = [(panels, dashed, folder / "latency.png"), (roofs, "larger: more tokens", folder / "roofline.png")]
    with mpl.rc_context(STYLE):
        return [_page(page, look, note, path) for page, note, path in pages if page]


def _page(
    panels: Sequence[tuple[str, Callable[[Axes], None]]], look: Mapping[str, dict[str, Any]], note: str, path: Path
) -> Path:
    """The panels side by side, three at most in a row, with one legend for all of them beside."""
    across = min(3, len(panels))
    down = math.ceil(len(panels) / across)
    figure = Figure(figsize=(4.6 * across + 1.9, 3.9 * down), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        title, fill = panel
        fill(axes)
        axes.set_title(title, fontsize=9)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    handles = [mpl.lines.Line2D([], [], label=name, **style) for name, style in look.items()]
    figure.legend(handles=handles, loc="outside right center", fontsize=9)
    figure.supxlabel(note, fontsize=8, color="#555555")
    return save(figure, path)


def save(figure: Figure, path: Path) -> Path:
    """Write the picture beside `path` and rename."""
    part = path.with_name(f".{path.name}")  # a name that ends in .png still: the format is read off it
    figure.savefig(part)
    part.replace(path)
    return path
