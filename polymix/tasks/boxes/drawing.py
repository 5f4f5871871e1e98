"""Draw boxes and masks on pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polymix._io import write_whole

COLOURS = ("#ffb000", "#00c2d1", "#ff5e8a", "#8fe35b", "#b78cff", "#ff7f3f", "#4ea1ff", "#f5e663")
Objects = Mapping[str, Tensor]  # boxes (k, 4), labels (k) and perhaps masks (k, H, W) of a picture


def draw_truth_and_prediction(
    pictures: Sequence[tuple[Tensor, Objects, Objects]], classes: Sequence[str], path: Path
) -> None:
    """Pictures (3, H, W) side by side, with the true objects above and the predicted ones below, as a PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.9 * len(pictures), 4.2), layout="constrained")
    columns = figure.subplots(2, len(pictures), squeeze=False).T
    for (top, bottom), (pixels, truth, found) in zip(columns, pictures, strict=True):
        for axes, part in ((top, truth), (bottom, found)):
            draw_boxes(axes, pixels, part["boxes"], [classes[i] for i in part["labels"]], part.get("masks"))
    for axes, title in zip(columns[0], ("truth", "prediction"), strict=True):
        axes.set_title(title, loc="left", fontsize=9)
    write_whole(path, lambda part: figure.savefig(part, dpi=130, format="png"))


def draw_annotated(
    path: Path, pixels: Tensor, boxes: Tensor, names: Sequence[str], masks: Tensor | None = None
) -> None:
    """A picture (3, H, W) with boxes (k, 4), a name at each, and masks (k, H, W), as a PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 6 * pixels.shape[1] / pixels.shape[2]))
    draw_boxes(figure.add_axes((0, 0, 1, 1)), pixels, boxes, names, masks)
    write_whole(path, lambda part: figure.savefig(part, dpi=130, format="png"))


def draw_boxes(axes: Any, pixels: Tensor, boxes: Tensor, names: Sequence[str], masks: Tensor | None = None) -> None:
    """A picture (3, H, W) on matplotlib's axes with boxes (k, 4), a name at each, and masks (k, H, W)."""
    from matplotlib.patches import Rectangle

    shown = pixels.float() / 255
    order = {name: place for place, name in enumerate(sorted({name.split()[0] for name in names}))}
    colours = [COLOURS[order[name.split()[0]] % len(COLOURS)] for name in names]
    for place in range(0 if masks is None else len(masks)):
        value = [int(COLOURS[place % len(COLOURS)][i : i + 2], 16) / 255 for i in (1, 3, 5)]
        tint = torch.tensor(value)[:, None, None]
        shown = torch.where(masks[place], 0.45 * shown + 0.55 * tint, shown)  # type: ignore[index]
    axes.imshow(shown.permute(1, 2, 0).tolist())
    axes.set_axis_off()
    for (x1, y1, x2, y2), name, colour in zip(boxes.tolist(), names, colours, strict=True):
        axes.add_patch(Rectangle((x1 - 0.5, y1 - 0.5), x2 - x1, y2 - y1, fill=False, edgecolor=colour, linewidth=1.5))
        label = {"facecolor": colour, "edgecolor": "none", "pad": 0.5, "alpha": 0.85}
        axes.text(x1, y1 - 1, name, fontsize=6, color="black", va="bottom", bbox=label, clip_on=True)
