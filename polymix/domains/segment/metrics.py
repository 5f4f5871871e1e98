"""mIoU and pixel accuracy over a whole set, by sliding windows, and pictures of truth and prediction."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from polymix.domains.segment.augment import GREY, fitted, resize_labels
from polymix.domains.segment.data import SegmentData
from polymix.domains.segment.layouts import IGNORED
from polymix.domains.segment.recipe import SegmentRecipe
from polymix.files import output_names
from polymix.train.data.drawing import save_picture
from polymix.train.data.label_maps import Confusion, colour_of, draw_label_maps, shares_of, windows
from polymix.train.data.pictures import read_picture, resized
from polymix.train.data.splits import spread
from polymix.train.task import Process

DRAWN_PICTURES = 4


def confusion_of(model: nn.Module, data: SegmentData, recipe: SegmentRecipe, process: Process) -> Confusion:
    """The counts over the test pictures. As many pictures of the crop's size as a batch has are predicted at once."""
    confusion = Confusion(len(data.classes), IGNORED)
    waiting: list[tuple[Tensor, Tensor]] = []

    def count() -> None:
        if waiting:
            predicted = _logits(model, torch.stack([pixels for pixels, _ in waiting]), process).argmax(1)
            confusion.update(predicted, torch.stack([labels for _, labels in waiting]))
            waiting.clear()

    for place in range(len(data.test)):
        pixels, labels = data.test[place]
        if labels.shape == (recipe.crop, recipe.crop) and recipe.short_side in (None, recipe.crop):
            waiting.append((pixels, labels))
            if len(waiting) == recipe.part_size:
                count()
        else:
            confusion.update(predict_picture(model, pixels, recipe, process), labels)
    count()
    return confusion


def _logits(model: nn.Module, pixels: Tensor, process: Process) -> Tensor:
    """Bytes (B, 3, S, S) to logits (B, K, S, S) on the CPU."""
    return model(pixels.to(process.device).float() / 127.5 - 1).float().cpu()


def predict_picture(model: nn.Module, pixels: Tensor, recipe: SegmentRecipe, process: Process) -> Tensor:
    """The class of every pixel of a picture: bytes (3, H, W) to (H, W).

    A picture larger than the crop is covered by windows `step_between` apart, at most a batch at a time. Where windows
    overlap, their probabilities are added. Only the rows of windows that overlap are kept: K · crop · W numbers,
    whatever the height. With `short_side`, the classes of the resized picture are brought back by the nearest pixel.
    """
    height, width = pixels.shape[1:]
    pixels = resized(pixels, *fitted(height, width, recipe.short_side))
    return resize_labels(_slide(model, pixels, recipe, process), height, width)


def _slide(model: nn.Module, pixels: Tensor, recipe: SegmentRecipe, process: Process) -> Tensor:
    """`predict_picture` of a picture that has its size."""
    crop, step = recipe.crop, recipe.step_between
    height, width = pixels.shape[1:]
    pixels = pad(pixels, (0, max(0, crop - width), 0, max(0, crop - height)), value=GREY)
    tops, lefts = (windows(size, crop, step) for size in pixels.shape[1:])
    predicted, band = torch.zeros(pixels.shape[1:], dtype=torch.uint8), torch.zeros(0)
    for top, after in zip(tops, [*tops[1:], pixels.shape[1]], strict=True):
        for start in range(0, len(lefts), recipe.part_size):
            mine = lefts[start : start + recipe.part_size]
            parts = torch.stack([pixels[:, top : top + crop, left : left + crop] for left in mine])
            shares = _logits(model, parts, process).softmax(1)
            if not band.numel():
                band = torch.zeros(shares.shape[1], crop, pixels.shape[2])
            for left, share in zip(mine, shares, strict=True):
                band[:, :, left : left + crop] += share
        done = after - top  # rows that no later window covers
        predicted[top:after] = band[:, :done].argmax(0)
        band = torch.cat((band[:, done:], torch.zeros_like(band[:, :done])), 1)
    return predicted[:height, :width]


def draw(model: nn.Module, data: SegmentData, recipe: SegmentRecipe, folder: Path) -> list[Path]:
    """predictions.png: some test pictures, the true classes, and the predicted ones of the pixels that count."""
    rows = []
    for place in spread(len(data.test), DRAWN_PICTURES):
        pixels, labels = data.test[place]
        predicted = predict_picture(model, pixels, recipe, Process())
        predicted = predicted.masked_fill(labels == IGNORED, IGNORED)
        rows.append((pixels.permute(1, 2, 0).numpy(), labels.numpy(), predicted.numpy()))
    path = folder / "predictions.png"
    draw_label_maps(path, rows, data.classes, ("picture", "truth", "prediction"), IGNORED)
    return [path]


def predict(
    model: nn.Module, data: SegmentData, recipe: SegmentRecipe, files: Sequence[Path], folder: Path, process: Process
) -> list[dict[str, Any]]:
    """The classes in picture files: each class's share of the pixels, a PNG of the classes, and them on the picture."""
    from matplotlib.colors import to_hex, to_rgb

    rows = []
    palette = torch.tensor([to_rgb(colour_of(place)) for place in range(len(data.classes))])
    for file, name in zip(files, output_names(files), strict=True):
        pixels = read_picture(file)
        predicted = predict_picture(model, pixels, recipe, process)
        tinted = 0.5 * pixels / 255 + 0.5 * palette[predicted.long()].permute(2, 0, 1)
        picture, classes = folder / f"{name}-segmented.png", folder / f"{name}-classes.png"
        save_picture(picture, (tinted * 255).round().to(torch.uint8))
        save_picture(classes, predicted)
        shares = shares_of(predicted, data.classes)
        largest = max(shares, key=lambda name: shares[name])
        colours = {name: to_hex(colour_of(data.classes.index(name))) for name in shares}
        rows.append({"file": str(file), "largest": largest, "picture": picture.name, "map": classes.name,
                     "shares": shares, "colours": colours})  # fmt: skip
    return rows
