"""The pictures of a comparison."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from polymix.workflows.bench.plots import COLOURS, MARKERS, STYLE, save
from polymix.workflows.compare.verdict import FLOOR, YARDSTICK, labels, latencies, scores, slope


def looks(content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Colour and marker by mixer: attention black, the floor grey, the others in an order that does not change."""
    rest = [label for label in labels(content) if label not in (YARDSTICK, FLOOR)]
    table: dict[str, dict[str, Any]] = {
        label: {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]} for i, label in enumerate(rest)
    }
    table[YARDSTICK] = {"color": "black", "marker": "o", "linewidth": 2.4}
    table[FLOOR] = {"color": "#9a9a9a", "marker": ".", "linestyle": "--"}
    return table


def reference_tokens(content: dict[str, Any]) -> int:
    """The count at which accuracy is set against latency: 4,096 where attention was measured there, else its last."""
    counts = latencies(content, "host")[YARDSTICK]
    return 4096 if 4096 in counts else max(counts)


def pareto(points: dict[str, tuple[float, float]]) -> list[str]:
    """Names on the front of (latency, accuracy): none other is both faster and as accurate, fastest first."""
    front: list[str] = []
    best = -math.inf
    for name, (_, accuracy) in sorted(points.items(), key=lambda item: (item[1][0], -item[1][1])):
        if accuracy > best:
            front.append(name)
            best = accuracy
    return front


def _plain_log(axis: Axis) -> None:
    """Ticks at 1, 2 and 5 of every decade, as plain numbers."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())


def accuracy_against_latency(content: dict[str, Any], axes: Axes) -> None:
    n, style, found = reference_tokens(content), looks(content), scores(content)
    table = latencies(content, "host")
    points = {m: (table[m][n], 100 * s.mean) for m, s in found.items() if n in table[m]}
    front = pareto(points)
    steps: dict[str, Any] = {"drawstyle": "steps-post", "color": "#bbbbbb", "zorder": 1}
    axes.plot([points[m][0] for m in front], [points[m][1] for m in front], label="Pareto front", **steps)
    for mixer, (x, y) in points.items():
        spread = [[y - 100 * found[mixer].low], [100 * found[mixer].high - y]]
        look = {key: value for key, value in style[mixer].items() if key in ("color", "marker")}
        axes.errorbar(x, y, yerr=spread, capsize=3, linestyle="none", markersize=7, label=mixer, **look)
    axes.set_xscale("log")
    _plain_log(axes.xaxis)
    axes.set_xlabel(f"latency of the whole model at {n:,} tokens, ms")
    axes.set_ylabel("test accuracy, % (bar: range over seeds)")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def over_tokens(content: dict[str, Any], axes: Axes, scope: str, what: str) -> None:
    """`what` is "latency" (ms) or "peak_bytes" (shown in MiB), log-log, each with its fitted slope."""
    style, scale = looks(content), 1.0 if what == "latency" else 2.0**-20
    for mixer in labels(content):
        points = {
            row["tokens"]: scale * row[what]
            for row in content["sweep"]
            if row["scope"] == scope and row["mixer"] == mixer and row[what]
        }
        if not points:
            continue
        counts = sorted(points)
        fit = slope(points)
        label = mixer if fit is None else f"{mixer}  N^{fit:.2f}"
        axes.plot(counts, [points[n] for n in counts], markersize=5, label=label, **style[mixer])
    axes.set_xscale("log")
    axes.set_yscale("log")
    _plain_log(axes.yaxis)
    counts = sorted({row["tokens"] for row in content["sweep"] if row["scope"] == scope})
    axes.set_xticks(counts, [f"{n:,}" for n in counts])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("tokens")
    axes.set_ylabel("latency, ms" if what == "latency" else "peak memory of one call, MiB")
    dim = content["settings"]["dim"] if scope == "alone" else content["host"]["dim"]
    axes.set_title(f"{'mixer alone' if scope == 'alone' else 'whole model'}, {dim} channels, batch 1", fontsize=10)
    axes.legend(fontsize=7.5)


def draw(content: dict[str, Any], folder: Path) -> list[Path]:
    """Write accuracy.png, latency.png and memory.png into `folder`."""
    written = []
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.5, 4.2))
        accuracy_against_latency(content, figure.subplots())
        written.append(save(figure, folder / "accuracy.png"))
        for what, name in (("latency", "latency.png"), ("peak_bytes", "memory.png")):
            figure = Figure(figsize=(11, 4.6))
            for axes, scope in zip(figure.subplots(1, 2), ("alone", "host"), strict=True):
                over_tokens(content, axes, scope, what)
            figure.tight_layout()
            written.append(save(figure, folder / name))
    return written
