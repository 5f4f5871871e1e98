"""report.html of a comparison, and its pictures: accuracy, latency and memory."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from polymix._io import write_whole
from polymix.mixers.registry import ATTENTION, FLOOR
from polymix.pages import embedded, plots, render
from polymix.pages.plots import plain_log, save, style, token_axis
from polymix.workflows.compare.tables import headings, reference_tokens, rows
from polymix.workflows.compare.verdict import labels, latencies, scores, slope


def write_report(content: dict[str, Any], folder: Path) -> Path:
    """Draw the pictures of a finished comparison and write report.html into `folder`."""
    kinds = {ATTENTION: "attention", FLOOR: "floor"}
    html = render(
        "compare/report.html.j2",
        **{key: content[key] for key in ("answer", "data", "host", "settings", "machine")},
        headings=headings(content),
        rows=[{"kind": kinds.get(cells[0], ""), "cells": cells} for cells in rows(content)],
        pictures=embedded(draw(content, folder)),
        stopped=[row for row in content["sweep"] if row["stopped"]],
    )
    path = folder / "report.html"
    write_whole(path, html)
    return path


def looks(content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Colour and marker by mixer: attention is black, the floor grey, the others are always in the same order."""
    table = plots.looks(label for label in labels(content) if label not in (ATTENTION, FLOOR))
    table[ATTENTION] = {"color": "black", "marker": "o", "linewidth": 2.4}
    table[FLOOR] = {"color": "#9a9a9a", "marker": ".", "linestyle": "--"}
    return table


def pareto(points: dict[str, tuple[float, float]]) -> list[str]:
    """Names on the Pareto front of (latency, accuracy), fastest first: no other is both faster and as accurate."""
    front: list[str] = []
    best = -math.inf
    for name, (_, accuracy) in sorted(points.items(), key=lambda item: (item[1][0], -item[1][1])):
        if accuracy > best:
            front.append(name)
            best = accuracy
    return front


def accuracy_against_latency(content: dict[str, Any], axes: Axes) -> None:
    """A point for each mixer, with the range over seeds, and the Pareto front."""
    n, look, score = reference_tokens(content), looks(content), scores(content)
    table = latencies(content, "host")
    points = {m: (table[m][n], 100 * s.mean) for m, s in score.items() if n in table[m]}
    front = pareto(points)
    steps: dict[str, Any] = {"drawstyle": "steps-post", "color": "#bbbbbb", "zorder": 1}
    axes.plot([points[m][0] for m in front], [points[m][1] for m in front], label="Pareto front", **steps)
    for mixer, (x, y) in points.items():
        spread = [[y - 100 * score[mixer].low], [100 * score[mixer].high - y]]
        its = {key: value for key, value in look[mixer].items() if key in ("color", "marker")}
        axes.errorbar(x, y, yerr=spread, capsize=3, linestyle="none", markersize=7, label=mixer, **its)
    axes.set_xscale("log")
    plain_log(axes.xaxis)
    axes.set_xlabel(f"latency of the whole model at {n:,} tokens, ms")
    axes.set_ylabel("test accuracy, % (bar: range over seeds)")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def over_tokens(content: dict[str, Any], axes: Axes, scope: str, what: str) -> None:
    """Latency in ms, or peak_bytes in MiB, against tokens, log-log. The legend has each fitted slope."""
    look, scale = looks(content), 1.0 if what == "latency" else 2.0**-20
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
        axes.plot(counts, [points[n] for n in counts], markersize=5, label=label, **look[mixer])
    token_axis(axes, [row["tokens"] for row in content["sweep"] if row["scope"] == scope])
    axes.set_yscale("log")
    plain_log(axes.yaxis)
    axes.set_ylabel("latency, ms" if what == "latency" else "peak memory of one call, MiB")
    dim = content["settings"]["dim"] if scope == "alone" else content["host"]["dim"]
    axes.set_title(f"{'mixer alone' if scope == 'alone' else 'whole model'}, {dim} channels, batch 1", fontsize=10)
    axes.legend(fontsize=7.5)


def draw(content: dict[str, Any], folder: Path) -> list[Path]:
    """Write accuracy.png, latency.png and memory.png into `folder`."""
    written = []
    with style():
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
