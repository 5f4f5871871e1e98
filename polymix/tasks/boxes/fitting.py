"""Fit pictures and their boxes into squares, boxes back into pictures, and vary training pictures as DETR does."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

Target = Mapping[str, Tensor]
CROP_FROM = (400, 500, 600)  # short sides of pictures that are cropped
CROP_SIDES = (384, 600)  # the smallest and the largest side of a crop


def resize(pixels: Tensor, target: Target, height: int, width: int) -> tuple[Tensor, dict[str, Tensor]]:
    """A picture (3, H, W) of bytes in another size, bilinearly; its boxes, areas and masks follow."""
    before = tuple(pixels.shape[1:])
    scales = torch.tensor([width / before[1], height / before[0]] * 2)
    found = {**target, "boxes": target["boxes"] * scales, "area": target["area"] * scales[0] * scales[1]}
    if before == (height, width):
        return pixels, found
    grown = interpolate(pixels[None].float(), size=(height, width), mode="bilinear", antialias=True)[0]
    if "masks" in target and len(target["masks"]):
        masks = target["masks"][None].float()
        found["masks"] = interpolate(masks, size=(height, width), mode="bilinear", antialias=True)[0] > 0.5
    elif "masks" in target:
        found["masks"] = target["masks"].new_zeros(0, height, width)
    return grown.round().clamp(0, 255).to(torch.uint8), found


def fit(
    pixels: Tensor, target: Target, size: int, short: int | None = None, long: int | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """A picture (3, H, W) scaled to fit a square, padded at the right and below; its boxes, areas and masks follow.

    `scale` and `size` tell by how much each side grew, and height and width without padding.

    Args:
        size: sides of the square.
        short: of the short side without padding; None: as large as fits.
        long: the largest long side without padding; None: `size`, beyond which it never goes.
    """
    height, width = pixels.shape[1:]
    scale = min(size, long or size) / max(height, width)
    if short is not None:
        scale = min(scale, short / min(height, width))
    new = (max(1, round(height * scale)), max(1, round(width * scale)))
    pixels, found = resize(pixels, target, *new)
    found["scale"] = torch.tensor([new[1] / width, new[0] / height] * 2)
    found["size"] = torch.tensor(new)
    edges = (0, size - new[1], 0, size - new[0])
    if "masks" in found:
        found["masks"] = pad(found["masks"], edges)
    return pad(pixels, edges), found


def mirror(pixels: Tensor, target: Target) -> tuple[Tensor, dict[str, Tensor]]:
    """A picture with left and right exchanged, and so its boxes and masks."""
    x1, y1, x2, y2 = target["boxes"].unbind(1)
    width = pixels.shape[2]
    found = {**target, "boxes": torch.stack((width - x2, y1, width - x1, y2), 1)}
    if "masks" in target:
        found["masks"] = target["masks"].flip(2)
    return pixels.flip(2), found


def crop(pixels: Tensor, target: Target, box: tuple[int, int, int, int]) -> tuple[Tensor, dict[str, Tensor]]:
    """The part x1, y1, x2, y2 of a picture. Boxes are cut at its edges, and objects without a rest are left out."""
    x1, y1, x2, y2 = box
    edges = target["boxes"].new_tensor(box)
    boxes = torch.minimum(torch.maximum(target["boxes"], edges[:2].repeat(2)), edges[2:].repeat(2))
    boxes = boxes - edges[:2].repeat(2)
    kept = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
    whole = (target["boxes"][:, 2:] - target["boxes"][:, :2]).prod(1).clamp(min=1e-9)
    rest = (boxes[:, 2:] - boxes[:, :2]).prod(1) / whole
    found = {name: value[kept] for name, value in target.items() if len(value) == len(kept)}
    found |= {"boxes": boxes[kept], "area": (target["area"] * rest)[kept]}
    if "masks" in target:
        found["masks"] = target["masks"][kept, y1:y2, x1:x2]
    return pixels[:, y1:y2, x1:x2], found


@dataclass(frozen=True)
class Variation:
    """How training pictures are drawn anew each time (Carion et al. 2020, appendix A.4), by Python's generator.

    Half of them are mirrored. The short side becomes one of `shorts`. With `crops`, half of the pictures are first
    brought to a short side of 400, 500 or 600 and cropped to sides of 384 to 600.
    """

    flip: bool = False
    shorts: Sequence[int] = ()
    crops: bool = False

    def __bool__(self) -> bool:
        return self.flip or len(self.shorts) > 1 or self.crops

    def apply(self, pixels: Tensor, target: Target) -> tuple[Tensor, Target, int | None]:
        """The picture before it is fitted, its target, and the short side to which it is to be fitted."""
        if self.flip and random.random() < 0.5:
            pixels, target = mirror(pixels, target)
        if self.crops and random.random() < 0.5:
            height, width = pixels.shape[1:]
            scale = random.choice(CROP_FROM) / min(height, width)
            pixels, target = resize(pixels, target, round(height * scale), round(width * scale))
            height, width = pixels.shape[1:]
            tall, wide = (random.randint(CROP_SIDES[0], min(side, CROP_SIDES[1])) for side in (height, width))
            top, left = random.randint(0, height - tall), random.randint(0, width - wide)
            pixels, target = crop(pixels, target, (left, top, left + wide, top + tall))
        return pixels, target, random.choice(self.shorts) if self.shorts else None
