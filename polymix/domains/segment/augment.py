"""How training pictures are varied: size, crop, mirror image, colours.

torchvision's RandomPhotometricDistort is another distortion than the published one: its brightness is a factor, its
contrast and saturation are blends with grey. Its crops do not look at what they cut. So this stays our own.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

from polymix.domains.segment.layouts import IGNORED
from polymix.domains.segment.recipe import SegmentRecipe
from polymix.train.data.pictures import as_image, as_tensor, resized

MAX_TRIES = 10  # crops drawn to find one in which no class has more than its share
BRIGHTNESS, CONTRAST, HUE = 32, (0.5, 1.5), 36  # grey levels, factors (of saturation too), degrees
GREY = 128  # of pixels beside a picture that is smaller than the crop; no label counts there


def resize_labels(labels: Tensor, height: int, width: int) -> Tensor:
    """A map of classes (H, W) of bytes in another size, by the nearest pixel."""
    if labels.shape == (height, width):
        return labels
    return interpolate(labels[None, None].float(), (height, width), mode="nearest-exact")[0, 0].to(torch.uint8)


def fitted(height: int, width: int, short_side: int | None) -> tuple[int, int]:
    """The sizes of a picture whose short side becomes short_side, and whose long side at most four times that."""
    if short_side is None:
        return height, width
    factor = min(short_side / min(height, width), 4 * short_side / max(height, width))
    return max(1, round(height * factor)), max(1, round(width * factor))


def vary(pixels: Tensor, labels: Tensor, recipe: SegmentRecipe) -> tuple[Tensor, Tensor]:
    """A training sample: bytes (3, crop, crop) and labels (crop, crop), drawn anew by Python's generator.

    Resized by a factor in `recipe.scale`, cropped where no class has more than `recipe.largest_share`, mirrored, and
    distorted in its colours. Smaller pictures are padded.
    """
    height, width = fitted(labels.shape[0], labels.shape[1], recipe.short_side)
    factor = random.uniform(recipe.scale[0], recipe.scale[1])
    height, width = max(1, round(height * factor)), max(1, round(width * factor))
    pixels, labels = resized(pixels, height, width), resize_labels(labels, height, width)
    pixels, labels = _crop(pixels, labels, recipe.crop, recipe.largest_share)
    if recipe.flip and random.random() < 0.5:
        pixels, labels = pixels.flip(2), labels.flip(1)
    if recipe.distort:
        pixels = distort(pixels)
    below, right = recipe.crop - labels.shape[0], recipe.crop - labels.shape[1]
    return pad(pixels, (0, right, 0, below), value=GREY), pad(labels, (0, right, 0, below), value=IGNORED)


def _crop(pixels: Tensor, labels: Tensor, size: int, largest_share: float) -> tuple[Tensor, Tensor]:
    height, width = labels.shape
    for _ in range(MAX_TRIES):
        top, left = random.randint(0, max(0, height - size)), random.randint(0, max(0, width - size))
        square = (slice(top, top + size), slice(left, left + size))
        part = labels[square]
        if largest_share >= 1:
            break
        counts = torch.bincount(part[part != IGNORED].long())
        if len(counts.nonzero()) > 1 and int(counts.max()) <= largest_share * int(counts.sum()):
            break
    return pixels[:, square[0], square[1]], part


def distort(pixels: Tensor) -> Tensor:
    """Brightness, contrast, saturation and hue of bytes (3, H, W), each changed with probability ½.

    Contrast comes before or after the other two, with equal probability (Liu et al. 2016, SSD, Section 3.6).
    """
    values = pixels.float()
    if random.random() < 0.5:
        values = values + random.uniform(-BRIGHTNESS, BRIGHTNESS)
    late, contrast = random.random() < 0.5, random.uniform(*CONTRAST) if random.random() < 0.5 else 1.0
    if not late:
        values = values * contrast
    values = _colours(values.clamp(0, 255))
    if late:
        values = values * contrast
    return values.round().clamp(0, 255).to(torch.uint8)


def _colours(values: Tensor) -> Tensor:
    """Saturation and hue changed, each with probability ½."""
    saturation = random.uniform(*CONTRAST) if random.random() < 0.5 else 1.0
    turn = random.uniform(-HUE, HUE) if random.random() < 0.5 else 0.0
    if saturation == 1.0 and turn == 0.0:
        return values
    from PIL import Image

    bands = as_image(values.round().to(torch.uint8)).convert("HSV").split()
    shift = round(turn * 256 / 360)
    hue = bands[0].point(lambda value: (value + shift) % 256)
    saturated = bands[1].point(lambda value: min(255, round(value * saturation)))
    return as_tensor(Image.merge("HSV", (hue, saturated, bands[2])).convert("RGB")).float()
