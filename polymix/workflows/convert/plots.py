"""The plots of a conversion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from polymix.pages.plots import COLOURS, LIGHT, PHONE_WIDTH, Picture, plain_log, token_axis

BEFORE, AFTER = LIGHT["muted"], COLOURS[0]


def pictures(content: Mapping[str, Any]) -> list[Picture]:
    """layers, time and error of each layer, and lengths, time against sequence length."""
    drawn = []
    if content["layers"]:
        alt = "Time before and after, and error of the output, for each layer"
        drawn.append(Picture("layers", alt, partial(layers, content)))
    if len(content["lengths"]) > 1:
        alt = "Time of attention and of the mixers in the converted layers, against tokens"
        drawn.append(Picture("lengths", alt, partial(lengths, content["lengths"])))
    return drawn


def layers(content: Mapping[str, Any], narrow: bool = False) -> Figure:
    """Bars for each layer: time of attention and of the mixer, and the relative error of the output."""
    names = list(content["layers"])
    errors = {layer["name"]: layer["error"] for layer in content["conversion"]["layers"]}
    height = 0.6 + 0.42 * max(len(names), 3)
    figure = Figure(figsize=(PHONE_WIDTH, 2 * height + 0.6) if narrow else (9, height), layout="constrained")
    if narrow:
        time, error = figure.subplots(2, 1)
    else:
        time, error = figure.subplots(1, 2, sharey=True, gridspec_kw={"width_ratios": (2, 1)})
    for shift, which, colour in ((-0.2, "before", BEFORE), (0.2, "after", AFTER)):
        ms = [content["layers"][name][which]["ms"] or 0 for name in names]
        label = "attention" if which == "before" else "mixer"
        time.barh([i + shift for i in range(len(names))], ms, height=0.38, color=colour, label=label)
    labels = [name if not narrow or len(name) < 20 else f"…{name[-18:]}" for name in names]
    for axes in (time, error) if narrow else (time,):
        axes.set_yticks(range(len(names)), [name or "(the model)" for name in labels], fontsize=8)
        axes.invert_yaxis()
    time.set_xlabel("ms per call" + (", forward and backward" if content["training"] else ""))
    time.legend(fontsize=8, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
    error.barh(range(len(names)), [errors.get(name) or 0 for name in names], height=0.5, color=AFTER)
    error.set_xlabel("relative error of the layer's output,\n‖new − old‖ / ‖old‖, before training")
    return figure


def lengths(rows: Sequence[Mapping[str, Any]], narrow: bool = False) -> Figure:
    """Time of attention and of the mixers in all converted layers, against sequence length."""
    figure = Figure(figsize=(PHONE_WIDTH, 3.4) if narrow else (5.5, 4), layout="constrained")
    axes = figure.subplots()
    tokens = [max(row["tokens"]) for row in rows]
    for key, colour, label in (("attention", BEFORE, "attention"), ("mixers", AFTER, "mixers")):
        axes.plot(tokens, [1e3 * row[key] for row in rows], marker="o", markersize=4, color=colour, label=label)
    token_axis(axes, tokens, "tokens (in the largest layer)", narrow)
    axes.set_yscale("log")
    plain_log(axes.yaxis)
    axes.set_ylabel("ms for all converted layers")
    axes.legend(fontsize=9)
    return figure
