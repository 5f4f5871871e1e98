"""Draw boxes and masks on pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

COLOURS = ("#ffb000", "#00c2d1", "#ff5e8a", "#8fe35b", "#b78cff", "#ff7f3f", "#4ea1ff", "#f5e663")


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
