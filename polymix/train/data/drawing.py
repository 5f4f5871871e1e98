"""Pictures of data and of what models make of them: figures, boxes and masks on pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from polymix.errors import shortened
from polymix.files import write_whole
from polymix.train.data.audio import HOP
from polymix.train.data.pictures import resized, write_png
from polymix.train.data.scores import reaching, said_of
from polymix.train.data.vision import torchvision

COLOURS = ("#ffb000", "#00c2d1", "#ff5e8a", "#8fe35b", "#b78cff", "#ff7f3f", "#4ea1ff", "#f5e663")
DPI = 130
INK, WRONG = "#757575", "#d0451b"  # of texts: can be read on white and on the dark ground of a page
SIDES = (360, 1024)  # pixels of a drawn picture's longer side: the names of boxes have the same size in all
MASK_OPACITY = 0.55
ROW_SECONDS, MAX_ROWS, MAX_TITLE = 10.0, 8, 90  # of pictures of speech; a title in characters
GROUP_WIDTH = 640  # pixels of a group of images in a grid
Objects = Mapping[str, Tensor]  # boxes (k, 4), labels (k) and perhaps masks (k, H, W) of a picture


def save_figure(path: Path, figure: Any, dpi: int = DPI) -> None:
    """Write a figure of matplotlib as a PNG file, whole. Its texts are no formulas: names may have "$".

    The ground is transparent, and what would be black around the axes is grey, so that light and dark pages show it.
    """
    from matplotlib.colors import to_rgb
    from matplotlib.text import Text

    ticks = [text for axes in figure.axes for text in (*axes.get_xticklabels(), *axes.get_yticklabels())]
    on_pictures = {text for axes in figure.axes if axes.images for text in axes.texts}
    for text in {*figure.findobj(Text), *ticks}:
        text.set_parse_math(False)
        if text not in on_pictures and to_rgb(text.get_color()) == (0, 0, 0):
            text.set_color(INK)
    figure.patch.set_alpha(0)
    for axes in figure.axes:
        axes.patch.set_alpha(0)
        axes.tick_params(colors=INK)
        for spine in axes.spines.values():
            spine.set_edgecolor(INK)
    write_whole(path, lambda part: figure.savefig(part, dpi=dpi, format="png"))


def save_picture(path: Path, pixels: Tensor) -> None:
    """Write bytes (3, H, W) as a PNG file, whole or not at all."""
    write_whole(path, lambda part: write_png(part, pixels, compression=6))


def with_objects(
    pixels: Tensor, boxes: Tensor, names: Sequence[str], masks: Tensor | None = None, note: str = ""
) -> Tensor:
    """A picture (3, H, W) of bytes with boxes (k, 4), a name at each, and masks (k, H, W).

    The first word of a name chooses the colour of its box; every mask has one of its own. Small pictures are enlarged
    by a whole number, and large ones shrunk, so that names can be read. note: what stands at the top of a picture
    without boxes.
    """
    utils = torchvision("utils")
    longest = max(pixels.shape[1:])
    scale = max(1, SIDES[0] // longest) if longest <= SIDES[1] else SIDES[1] / longest
    height, width = (max(1, round(side * scale)) for side in pixels.shape[1:])
    drawn = resized(pixels, height, width)
    if masks is not None and len(masks):
        tints = [COLOURS[place % len(COLOURS)] for place in range(len(masks))]
        shapes = interpolate(masks[None].float(), (height, width), mode="nearest-exact")[0].bool()
        drawn = utils.draw_segmentation_masks(drawn, shapes, alpha=MASK_OPACITY, colors=tints)
    if not len(boxes):
        return _with_note(drawn, note) if note else drawn
    kinds = {kind: place for place, kind in enumerate(sorted({name.split()[0] for name in names}))}
    colours = [COLOURS[kinds[name.split()[0]] % len(COLOURS)] for name in names]
    # Boxes of detectors may end before they begin, which torchvision does not draw.
    corners = torch.stack((*torch.minimum(boxes[:, :2], boxes[:, 2:]).unbind(1),
                           *torch.maximum(boxes[:, :2], boxes[:, 2:]).unbind(1)), 1)  # fmt: skip
    edges = torch.tensor([width - 1, height - 1] * 2)
    corners = (corners.cpu() * scale).clamp(min=0).minimum(edges)
    return utils.draw_bounding_boxes(
        drawn, corners, list(names), colours, width=2, label_colors="black", fill_labels=True
    )


def _with_note(pixels: Tensor, note: str) -> Tensor:
    """A picture (3, H, W) of bytes with lines of text over its top."""
    from PIL import Image, ImageDraw

    image = Image.fromarray(pixels.cpu().permute(1, 2, 0).contiguous().numpy())
    pen = ImageDraw.Draw(image)
    text = "\n".join(wrap(note, max(10, image.width // 7)))  # a letter of Pillow's font is about 6 pixels wide
    pen.rectangle(pen.textbbox((4, 4), text), fill="white")
    pen.text((4, 4), text, fill="black")
    return torch.from_numpy(numpy.array(image)).permute(2, 0, 1)


def draw_annotated(
    path: Path, pixels: Tensor, boxes: Tensor, names: Sequence[str], masks: Tensor | None = None, note: str = ""
) -> None:
    """Write a picture (3, H, W) with boxes (k, 4), a name at each, and masks (k, H, W), as a PNG file.

    note: what is said in a picture without boxes.
    """
    save_picture(path, with_objects(pixels, boxes, names, masks, note))


def draw_truth_and_prediction(
    pictures: Sequence[tuple[Tensor, Objects, Objects]], classes: Sequence[str], path: Path, threshold: float
) -> None:
    """Pictures (3, H, W) side by side, with the true objects above and the predicted ones below, as a PNG file.

    threshold: the lowest score of a predicted object that is drawn. A picture in which none reaches it says so.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.9 * len(pictures), 4.2), layout="constrained")
    columns = figure.subplots(2, len(pictures), squeeze=False).T
    for axes, (pixels, truth, prediction) in zip(columns, pictures, strict=True):
        likely = reaching(prediction, threshold)
        note = "" if len(likely["labels"]) else said_of(prediction, classes, threshold)
        for place, part in zip(axes, (truth, likely), strict=True):
            names = [classes[label] for label in part["labels"]]
            show(place, with_objects(pixels, part["boxes"], names, part.get("masks"), note if part is likely else ""))
    for axes, title in zip(columns[0], ("truth", "prediction"), strict=True):
        axes.set_title(title, loc="left", fontsize=9)
    save_figure(path, figure)


def show(axes: Any, pixels: Tensor, title: str = "") -> None:
    """A picture (3, H, W) or (1, H, W), bytes or values from 0 to 1, on axes of matplotlib."""
    values = pixels.detach().cpu()
    values = values if values.dtype == torch.uint8 else values.float().clamp(0, 1)
    axes.imshow(values.expand(3, -1, -1).permute(1, 2, 0).numpy())
    axes.set_axis_off()
    if title:
        axes.set_title(title, fontsize=9)


def grid_of(pictures: Tensor, columns: int, gap: int = 1) -> Tensor:
    """Pictures (n, 1 or 3, H, W) of equal sizes as one (3, …), in rows of `columns` with a white gap between them.

    torchvision's `make_grid` has a frame too, but not around a single picture; and drawing needs no torchvision.
    """
    count, _, height, width = pictures.shape
    white = 255 if pictures.dtype == torch.uint8 else 1.0
    grid = pictures.new_full((3, -(-count // columns) * (height + gap), columns * (width + gap)), white)
    for place, picture in enumerate(pictures):
        top, left = place // columns * (height + gap), place % columns * (width + gap)
        grid[:, top : top + height, left : left + width] = picture
    return grid[:, :-gap, :-gap] if gap else grid


def columns_of(shape: Sequence[int]) -> int:
    """Images side by side in a group: ten small ones, fewer large ones."""
    return max(2, min(10, GROUP_WIDTH // shape[-1]))


def save_sheet(path: Path, images: Tensor, columns: int) -> None:
    """Bytes (N, 1 or 3, H, W) as a PNG file without titles; small images are enlarged, pixel by pixel."""
    factor = max(1, 64 // images.shape[-1])
    save_picture(path, grid_of(images.repeat_interleave(factor, 2).repeat_interleave(factor, 3), columns))


Spoken = tuple[Tensor, Sequence[Mapping[str, Any]], str, bool]


def pieces(features: Tensor, words: Sequence[Mapping[str, Any]], title: str) -> list[Spoken]:
    """The rows in which `draw_spoken` shows a recording (frames, bands): ten seconds each, the first eight of them."""
    size = round(ROW_SECONDS / HOP)
    rows: list[Spoken] = []
    for place, part in enumerate(features.split(size)[:MAX_ROWS]):
        start = place * ROW_SECONDS
        here = [{**word, "from": word["from"] - start, "to": min(word["to"] - start, HOP * len(part))}
                for word in words if start <= word["from"] < start + ROW_SECONDS]  # fmt: skip
        rows.append((part, here, title if place == 0 else f"from {start:g} s", True))
    return rows


def draw_spoken(path: Path, rows: Sequence[Spoken]) -> None:
    """A row for each clip: its features (frames, bands), low bands below, and each word where it was heard.

    A row is features, words with "word", "from" and "to" in seconds, a title, and whether that is right.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.9 * len(rows)), layout="constrained")
    places = figure.subplots(len(rows), squeeze=False)[:, 0]
    for axes, (features, words, title, right) in zip(places, rows, strict=True):
        seconds, bands = HOP * len(features), features.shape[1]
        axes.imshow(features.T.numpy(), origin="lower", aspect="auto", cmap="magma", extent=(0, seconds, 0, bands))
        for word in words:
            axes.axvspan(word["from"], word["to"], color="white", alpha=0.25, lw=0)
            middle = (word["from"] + word["to"]) / 2
            axes.text(middle, 0.93 * bands, word["word"], color="white", fontsize=8, ha="center", va="top")
        axes.set_title(shortened(title, MAX_TITLE), fontsize=9, loc="left", color=INK if right else WRONG)
        axes.set_xlim(0, seconds)
        axes.set_yticks([])
    axes.set_xlabel("seconds")
    save_figure(path, figure)


def draw_maps(path: Path, rows: Sequence[Mapping[str, Tensor]]) -> None:
    """Write a PNG file with a row for each picture: bytes (3, H, W) as "picture", then maps of numbers (H, W) by name.

    The maps of a row have one scale, from their least number above 0, which stands for none, to their largest.
    """
    from matplotlib.figure import Figure

    tall = rows[0]["picture"].shape[1] / rows[0]["picture"].shape[2]
    size = (2.1 * len(rows[0]) + 0.9, (1.9 * tall + 0.1) * len(rows) + 0.3)
    figure = Figure(figsize=size, layout="constrained")
    for axes, row in zip(figure.subplots(len(rows), len(rows[0]), squeeze=False), rows, strict=True):
        known = torch.cat([values[values > 0] for name, values in row.items() if name != "picture"])
        for place, (name, values) in zip(axes, row.items(), strict=True):
            if name == "picture":
                show(place, values)
            else:
                image = place.imshow(numpy.ma.masked_equal(values.numpy(), 0), "viridis_r")
                image.set_clim(float(known.min()), float(known.max()))
                place.set_axis_off()
            if row is rows[0]:
                place.set_title(name, fontsize=9)
        figure.colorbar(image, ax=axes[-1], fraction=0.05).ax.tick_params(labelsize=7)
    save_figure(path, figure)
