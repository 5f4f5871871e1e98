"""What MiniLM loses and wins back: against the time of distillation, the share of layers, and speed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pretrained_steps.minilm import ATTENTION, LAYERS, TIMED, converted_layers

COLOURS = {"qt": "C0", "linear": "C1", "pom": "C2", "padre": "C3"}
TOKENS = 512  # of the call whose speed is shown


def plot(content: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    rows = [row for row in content["rows"] if row.get("seed") == 0 and row["plan"] != ATTENTION]
    figure = Figure(figsize=(6.5, 9.5), layout="constrained")
    times, shares, speeds = figure.subplots(3, 1)
    for plan in dict.fromkeys(row["plan"] for row in rows if row["steps"]):
        its = sorted((row["seconds"], row["rank_correlation"]) for row in rows if row["plan"] == plan)
        style = {
            "color": COLOURS[plan.split()[0]],
            "linestyle": "-" if plan in COLOURS else "--" if " of " in plan else ":",
        }
        times.plot(*zip(*its, strict=True), marker="o", markersize=4, label=plan, **style)
    times.set(xlabel="processor seconds of distillation (0: as converted)", title="Time")
    times.legend(frameon=False, ncols=2, loc="lower right")
    for at, steps in enumerate(sorted({row["steps"] for row in rows if row["plan"].startswith("qt")})):
        its = [(converted_layers(row["plan"]), row["rank_correlation"]) for row in rows
               if row["plan"].startswith("qt") and row["steps"] == steps]  # fmt: skip
        label = f"{steps:,} steps" if steps else "as converted"
        shares.plot(*zip(*its, strict=True), linestyle="none", marker="osD^vP*X"[at], color=f"C{at}", label=label)
    shares.set(xlabel=f"layers with qt, of {LAYERS}", title="Share of the layers", xticks=range(1, LAYERS + 1))
    shares.legend(frameon=False, loc="lower right", ncols=2)
    calls = next(row["milliseconds"] for row in content["rows"] if row.get("tokens") == TOKENS)
    speeds.plot([1], [1], "o", color="black")
    speeds.annotate("attention", (1, 1), xytext=(7, -3), textcoords="offset points")
    for plan in TIMED:
        best = max(row["rank_correlation"] for row in rows if row["plan"] == plan)
        speed = calls[ATTENTION] / calls[plan]
        speeds.plot([speed], [best], "o", color=COLOURS[plan.split()[0]])
        speeds.annotate(plan, (speed, best), xytext=(7, -3), textcoords="offset points")
    speeds.set(xlabel=f"speedup of a call with {TOKENS} tokens", title="Speed, with the best that training reached")
    speeds.margins(x=0.2, y=0.15)
    for axis in (times, shares, speeds):
        axis.set_ylabel("rank correlation")
        axis.grid(color="#e4e4e4")
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
