"""Grids of small images as PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from polymix._io import write_whole

WIDE = 640  # pixels of a group of images in a grid, at least


def columns_of(shape: Sequence[int]) -> int:
    """Images side by side in a group: ten small ones, fewer large ones."""
    return max(2, min(10, WIDE // shape[-1]))


def tiled(images: Tensor, columns: int) -> Tensor:
    """Bytes (N, 1 or 3, H, W) as one picture (height, width, 3), with white lines of one pixel between them."""
    count, _, height, width = images.shape
    rows = -(-count // columns)
    sheet = images.new_full((rows * (height + 1), columns * (width + 1), 3), 255)
    for place, image in enumerate(images):
        top, left = place // columns * (height + 1), place % columns * (width + 1)
        sheet[top : top + height, left : left + width] = image.permute(1, 2, 0)
    return sheet[:-1, :-1]


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
    write_whole(path, lambda part: figure.savefig(part, dpi=150, format="png"))


def save_rows(path: Path, rows: Sequence[tuple[str, Tensor]]) -> None:
    """A row of bytes (N, 1 or 3, H, W) for each name."""
    from torch import cat

    columns = len(rows[0][1])
    save_grid(path, [("", cat([images for _, images in rows]))], columns, [name for name, _ in rows])


def save_sheet(path: Path, images: Tensor, columns: int) -> None:
    """Bytes (N, 1 or 3, H, W) as a PNG file without titles; small images are enlarged, pixel by pixel."""
    from PIL import Image

    factor = max(1, 64 // images.shape[-1])
    sheet = tiled(images.repeat_interleave(factor, 2).repeat_interleave(factor, 3), columns)
    write_whole(path, lambda part: Image.fromarray(sheet.contiguous().numpy()).save(part, "PNG"))
