"""The plots of a conversion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from polymix.pages.plots import COLOURS, plain_log, save, style, token_axis

BEFORE, AFTER = "#555555", COLOURS[0]


def draw(content: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw layers.png, time and error of each layer, and lengths.png, time against sequence length."""
    with style():
        pages = [layers(content, folder / "layers.png")] if content["layers"] else []
        return pages + ([lengths(content["lengths"], folder / "lengths.png")] if len(content["lengths"]) > 1 else [])


def layers(content: Mapping[str, Any], path: Path) -> Path:
    """Bars for each layer: time of attention and of the mixer, and the relative error of the output."""
    names = list(content["layers"])
    errors = {layer["name"]: layer["error"] for layer in content["conversion"]["layers"]}
    figure = Figure(figsize=(9, 0.6 + 0.42 * max(len(names), 3)), layout="constrained")
    time, error = figure.subplots(1, 2, sharey=True, gridspec_kw={"width_ratios": (2, 1)})
    for shift, which, colour in ((-0.2, "before", BEFORE), (0.2, "after", AFTER)):
        ms = [content["layers"][name][which]["ms"] or 0 for name in names]
        label = "attention" if which == "before" else "mixer"
        time.barh([i + shift for i in range(len(names))], ms, height=0.38, color=colour, label=label)
    time.set_yticks(range(len(names)), [name or "(the model)" for name in names], fontsize=8)
    time.invert_yaxis()
    time.set_xlabel("ms per call" + (", forward and backward" if content["training"] else ""))
    time.legend(fontsize=8, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
    error.barh(range(len(names)), [errors.get(name) or 0 for name in names], height=0.5, color=AFTER)
    error.set_xlabel("relative error of the layer's output,\n‖new − old‖ / ‖old‖, before training")
    return save(figure, path)


def lengths(rows: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Time of attention and of the mixers in all converted layers, against sequence length."""
    figure = Figure(figsize=(5.5, 4), layout="constrained")
    axes = figure.subplots()
    tokens = [max(row["tokens"]) for row in rows]
    for key, colour, label in (("attention", BEFORE, "attention"), ("mixers", AFTER, "mixers")):
        axes.plot(tokens, [1e3 * row[key] for row in rows], marker="o", markersize=4, color=colour, label=label)
    token_axis(axes, tokens, "tokens (in the largest layer)")
    axes.set_yscale("log")
    plain_log(axes.yaxis)
    axes.set_ylabel("ms for all converted layers")
    axes.legend(fontsize=9)
    return save(figure, path)
