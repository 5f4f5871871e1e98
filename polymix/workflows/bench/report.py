"""report.html of a benchmark, and its pictures: time against length, and the roofline."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from polymix.files import write_whole
from polymix.measure.roofline import Ceiling
from polymix.numbers import machine_line, plural
from polymix.pages import render
from polymix.pages.plots import LIGHT, PHONE_WIDTH, Picture, legend_columns, looks, plain_log, publish, token_axis
from polymix.workflows.again import repeated_options
from polymix.workflows.bench.run import PRODUCTS, Settings
from polymix.workflows.bench.tables import Row, label, not_measured, table, views

# Options that say what is measured, but for the sizes and times that --quick changes.
_ASKED = ("mixers", "dims", "batch", "dtypes", "passes", "impls", "threads", "device", "max_seconds", "max_gib")
Looks = Mapping[str, dict[str, Any]]
Panels = list[tuple[str, Callable[[Axes], None]]]  # a title, and what fills the axes


def write_report(content: dict[str, Any], folder: Path) -> Path:
    """Draw the pictures and write report.html into `folder`."""
    tables = []
    for title, rows in views(content):
        headings, lines = table(rows)
        tables.append({"title": title, "headings": headings, "rows": lines})
    html = render(
        "bench/report.html.j2",
        tables=tables,
        pictures=publish(pictures(content), folder),
        next_commands=next_commands(content, folder),
        ceilings=content["ceilings"],
        finished=content["finished"],
        settings=content["settings"],
        machine=machine_line(content["machine"]),
        not_measured=not_measured(content),
    )
    path = folder / "report.html"
    write_whole(path, html)
    return path


def next_commands(content: Mapping[str, Any], folder: Path) -> list[tuple[str, str]]:
    """What to run next, and why."""
    settings, out = content["settings"], shlex.quote(folder.name)
    asked = repeated_options(Settings, settings, *_ASKED)
    commands = []
    if not content["finished"]:
        commands.append(("Finish this run, with the same options:", f"polymix bench --resume --out {out} …"))
    elif settings["quick"]:
        commands.append(("Measure longer inputs, in more rounds:", f"polymix bench{asked} --out {out}-full"))
    again = f"polymix bench --compare {out} {out}-new"
    commands.append(("Run it again later with another --out, and see what changed beyond the noise:", again))
    commands.append(("See which mixer is accurate on your images:", "polymix compare --data FOLDER"))
    return commands


def pictures(content: Row) -> list[Picture]:
    """latency, a panel for each pass and setting, and roofline, a panel for each type and number of threads.

    Rows without a measurement are left out. If all are, there are no pictures.
    """
    content = {**content, "rows": [row for row in content["rows"] if not row["stopped"]]}
    look = looks_of(content)
    panels: Panels = [(title, partial(latency, rows, look=look)) for title, rows in views(content)]
    bars = "Medians; the bars span 10 to 90 % of the runs."
    bare = "Dashed: the floor, the mixer's own products run bare (training: three times)."
    roof = "The roof was measured on this machine in the same run. Its slope is the speed of memory; data that stays "
    roof += "in a cache can exceed it. Larger marks: more tokens."
    chosen: list[tuple[str, str, Panels, str]] = [
        ("latency", "Time of one call against the number of tokens", panels, f"{bars} {bare}"),
        ("roofline", "FLOP/s against FLOPs per byte", _roofs(content, look), roof),
    ]
    return [
        Picture(name, alt, partial(_page, panels, look), caption) for name, alt, panels, caption in chosen if panels
    ]


def _roofs(content: Row, look: Looks) -> Panels:
    """A panel for each ceiling, of the first pass that was measured under it: all passes do the same products."""
    roofs: Panels = []
    for ceiling in (Ceiling(**known) for known in content["ceilings"]):
        here = [row for row in content["rows"] if (row["dtype"], row["threads"]) == (ceiling.dtype, ceiling.threads)]
        for pass_ in ("forward", "folded", "training"):
            rows = [row for row in here if row["pass"] == pass_]
            if rows:
                title = f"{pass_}, {ceiling.dtype}, {plural(ceiling.threads, 'thread')}\n"
                title += f"roof, measured: {ceiling.flops_per_second / 1e9:,.0f} GFLOP/s, "
                title += f"copy {ceiling.bytes_per_second / 1e9:,.0f} GB/s"
                roofs.append((title, partial(roofline, ceiling, rows, look=look)))
                break
    return roofs


def looks_of(content: Row) -> dict[str, dict[str, Any]]:
    """Colour and marker by label: attention is black, the others are in the order of measuring."""
    mixers = {label(row): row["mixer"].partition(":")[0] for row in content["rows"]}
    others = looks(name for name, mixer in mixers.items() if mixer != "softmax")
    return others | {name: {"color": LIGHT["attention"], "marker": "o"} for name in mixers if name not in others}


def latency(rows: Sequence[Row], axes: Axes, look: Looks) -> None:
    """Time against tokens, log-log, with 10 to 90 % of the runs. Dashed: each mixer's floor."""
    times = PRODUCTS.get(rows[0]["pass"], 1)
    for name, its in look.items():
        mine = [row for row in rows if label(row) == name]
        counts, seconds = [row["tokens"] for row in mine], [row["seconds"] for row in mine]
        spread = [
            [1e3 * (row["seconds"] - row["low"]) for row in mine],
            [1e3 * (row["high"] - row["seconds"]) for row in mine],
        ]
        axes.errorbar(counts, [1e3 * s for s in seconds], yerr=spread, markersize=4, elinewidth=0.8, capsize=2, **its)
        bare = [(row["tokens"], 1e3 * times * row["floor"]) for row in mine if row["floor"]]
        if bare:
            axes.plot(*zip(*bare, strict=True), color=its["color"], linestyle=(0, (3, 2)), linewidth=1, alpha=0.7)
    token_axis(axes, [row["tokens"] for row in rows])
    axes.set_yscale("log")
    plain_log(axes.yaxis)
    axes.set_ylabel("time of one call, ms")


def roofline(ceiling: Ceiling, rows: Sequence[Row], axes: Axes, look: Looks) -> None:
    """FLOP/s against FLOPs per byte, both by formula over the measured time, under the machine's ceilings."""
    fewest = min(row["tokens"] for row in rows)
    for name, its in look.items():
        mine = [row for row in rows if label(row) == name]
        points = [(row["flops"] / row["bytes"], row["flops"] / row["seconds"] / 1e9) for row in mine]
        if not points:
            continue
        x, y = zip(*points, strict=True)
        sizes = [14 + 9 * math.log2(row["tokens"] / fewest + 1) for row in mine]
        axes.plot(x, y, color=its["color"], linewidth=0.8, alpha=0.6)
        axes.scatter(x, y, s=sizes, color=its["color"], marker=its["marker"], zorder=3)
    axes.set_xscale("log")
    axes.set_yscale("log")
    reached = [row["flops"] / row["bytes"] for row in rows]
    ridge = ceiling.flops_per_second / ceiling.bytes_per_second
    low, high = min([ridge, *reached]) / 2, max([ridge, *reached]) * 2
    line = [low, ridge, high]
    axes.plot(line, [ceiling.roof(x) / 1e9 for x in line], color=LIGHT["muted"], linewidth=2, zorder=1)
    axes.set_xlim(low, high)
    plain_log(axes.xaxis)
    plain_log(axes.yaxis)
    axes.set_xlabel("FLOPs per byte, by formula")
    axes.set_ylabel("GFLOP/s")


def _page(panels: Panels, look: Looks, narrow: bool) -> Figure:
    """The panels, at most two in a row, or one on a phone, with one legend for all of them."""
    across = 1 if narrow else min(2, len(panels))
    down = math.ceil(len(panels) / across)
    handles = [mpl.lines.Line2D([], [], label=name, **its) for name, its in look.items()]
    legend = 0.25 * math.ceil(len(handles) / 2) + 0.2
    size = (PHONE_WIDTH, 3.6 * down + legend) if narrow else (4.6 * across + 1.9, 3.9 * down)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(down, across, squeeze=False)
    for axes, (title, fill) in zip(grid.flat, panels, strict=False):
        fill(axes)
        axes.set_title(title.replace(", ", ",\n", 1) if narrow else title, fontsize=9)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    place = (
        {"loc": "outside lower center", "ncols": legend_columns(look)} if narrow else {"loc": "outside right center"}
    )
    figure.legend(handles=handles, fontsize=9, **place)
    return figure
