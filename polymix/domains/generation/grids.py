"""Grids of small images as PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from polymix.train.data.drawing import grid_of, save_figure


def tiled(images: Tensor, columns: int) -> Tensor:
    """Bytes (N, 1 or 3, H, W) as one picture (height, width, 3), with white lines of one pixel between them."""
    return grid_of(images, columns).permute(1, 2, 0)


def save_grid(
    path: Path, groups: Sequence[tuple[str, Tensor]], columns: int, names: Sequence[str] | None = None
) -> None:
    """Groups of bytes (N, 1 or 3, H, W) side by side under their titles, with the name of each row at the left."""
    from matplotlib.figure import Figure

    sheets = [(title, tiled(images, columns)) for title, images in groups]
    height, width = sheets[0][1].shape[:2]
    wide = max(0.26 * columns, 2.5)
    figure = Figure(figsize=(len(sheets) * wide + 0.8, wide * height / width + 0.5), layout="constrained")
    for axes, (title, sheet) in zip(figure.subplots(1, len(sheets), squeeze=False)[0], sheets, strict=True):
        axes.imshow(sheet.numpy(), interpolation="nearest")
        axes.set_title(title, fontsize=9)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_visible(False)
    if names is not None:
        step = (height + 1) / len(names)
        first = figure.axes[0]
        first.set_yticks([step * (row + 0.5) - 1 for row in range(len(names))], names, fontsize=8)
        first.tick_params(length=0)
    save_figure(path, figure, dpi=150)


def save_rows(path: Path, rows: Sequence[tuple[str, Tensor]]) -> None:
    """A row of bytes (N, 1 or 3, H, W) for each name."""
    from torch import cat

    columns = len(rows[0][1])
    save_grid(path, [("", cat([images for _, images in rows]))], columns, [name for name, _ in rows])
