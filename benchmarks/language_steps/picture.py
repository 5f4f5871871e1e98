"""Held-out loss of each model, and the time of a token by what came before."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any


def plot(content: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    losses: dict[str, list[float]] = {}
    for row in content["rows"]:
        if row["kind"] == "train":
            losses.setdefault(row["model"], []).append(row["loss"])
    figure = Figure(figsize=(11, max(4.2, 0.22 * len(losses))), layout="constrained")
    left, right = figure.subplots(1, 2)
    means = sorted(((fmean(found), label) for label, found in losses.items()), reverse=True)
    for place, (mean, label) in enumerate(means):
        colour = {"softmax": "black", "nothing": "grey"}.get(label, "C0")
        left.plot(losses[label], [place] * len(losses[label]), "o", color=colour, markersize=3, alpha=0.4)
        left.plot([mean], [place], "o", color=colour)
        left.annotate(
            f"{mean:.3f}", (max(losses[label]), place), xytext=(6, -3), textcoords="offset points", fontsize=8
        )
    left.set_yticks(range(len(means)), [label for _, label in means])
    left.set(xlabel="held-out loss, nats a token", title="Same parameters, steps and text")
    left.set_xlim(means[-1][0] - 0.05, means[0][0] + 0.15)
    for row in content["rows"]:
        key = "decode_ms_"
        points = sorted((int(name.removeprefix(key)), ms) for name, ms in row.items() if name.startswith(key))
        if row["kind"] == "decode":
            style = {"color": "black"} if row["model"] == "softmax" else {}
            right.plot(*zip(*points, strict=True), marker="o", label=row["model"], **style)
    right.set(xlabel="tokens before", ylabel="ms a token", xscale="log", yscale="log", title="Decoding")
    right.legend(frameon=False)
    for axis in (left, right):
        axis.grid(color="#e4e4e4")
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
