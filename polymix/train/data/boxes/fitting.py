"""Fit pictures and their boxes into squares, and vary training pictures as DETR does: torchvision's v2 transforms.

A target's boxes and masks are torchvision's tensors with a meaning (`tv_tensors`), which the transforms move together
with the picture. Masks are resized by the nearest pixel, as torchvision's reference does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polymix.train.data.boxes.options import CROP_FROM, PicturesRecipe
from polymix.train.data.vision import torchvision

Target = Mapping[str, Tensor]
CROP_SIDES = (384, 600)  # the smallest and the largest side of a crop
EMPTY: Target = {"boxes": torch.zeros(0, 4), "area": torch.zeros(0)}  # for pictures without annotations
OF_EACH_OBJECT = ("boxes", "labels", "iscrowd", "area", "masks")  # one entry of a target for each object


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
    transforms = torchvision("transforms.v2")
    picture, moved = _resize(*_with_meaning(pixels, target), *new)
    picture, moved = transforms.Pad([0, 0, size - new[1], size - new[0]])(picture, moved)
    plain = _plain(moved)
    plain["scale"] = torch.tensor([new[1] / width, new[0] / height] * 2)
    plain["size"] = torch.tensor(new)
    return picture.as_subclass(Tensor), plain


@dataclass(frozen=True)
class Variation:
    """How training pictures are drawn anew each time (Carion et al. 2020, appendix A.4), by PyTorch's generator.

    Half of them are mirrored. The short side becomes one of `shorts`. With `crops`, half of the pictures are first
    brought to a short side of 400, 500 or 600 and cropped to sides of 384 to 600.
    """

    flip: bool = False
    shorts: Sequence[int] = ()
    crops: bool = False

    @staticmethod
    def of(recipe: PicturesRecipe) -> Variation:
        """What the options of a recipe say."""
        return Variation(recipe.flip, recipe.short_sides, recipe.crops)

    def __bool__(self) -> bool:
        return self.flip or len(self.shorts) > 1 or self.crops

    def apply(self, pixels: Tensor, target: Target) -> tuple[Tensor, Target, int | None]:
        """The picture before it is fitted, its target, and the short side to which it is to be fitted."""
        picture, moved = _with_meaning(pixels, target)
        if self.flip and _draw(2):
            picture, moved = mirror(picture, moved)
        if self.crops and _draw(2):
            height, width = picture.shape[-2:]
            scale = CROP_FROM[_draw(len(CROP_FROM))] / min(height, width)
            picture, moved = _resize(picture, moved, round(height * scale), round(width * scale))
            tall, wide = (CROP_SIDES[0] + _draw(min(side, CROP_SIDES[1]) - CROP_SIDES[0] + 1)
                          for side in picture.shape[-2:])  # fmt: skip
            top, left = _draw(picture.shape[-2] - tall + 1), _draw(picture.shape[-1] - wide + 1)
            picture, moved = crop(picture, moved, (left, top, left + wide, top + tall))
        short = self.shorts[_draw(len(self.shorts))] if self.shorts else None
        return picture.as_subclass(Tensor), _plain(moved), short


def mirror(pixels: Tensor, target: Target) -> tuple[Tensor, dict[str, Tensor]]:
    """A picture with left and right exchanged, and so its boxes and masks."""
    picture, moved = torchvision("transforms.v2").RandomHorizontalFlip(1.0)(*_with_meaning(pixels, target))
    return picture, moved


def crop(pixels: Tensor, target: Target, box: tuple[int, int, int, int]) -> tuple[Tensor, dict[str, Tensor]]:
    """The part x1, y1, x2, y2 of a picture. Boxes are cut at its edges, and objects without a rest are left out.

    As DETR, this keeps every rest; torchvision's `SanitizeBoundingBoxes` drops those of less than a pixel.
    """
    functional = torchvision("transforms.v2.functional")
    x1, y1, x2, y2 = box
    picture, moved = _with_meaning(pixels, target)
    before = _areas(moved["boxes"])
    window = (y1, x1, y2 - y1, x2 - x1)
    picture = functional.crop(picture, *window)
    moved |= {name: functional.crop(moved[name], *window) for name in ("boxes", "masks") if name in moved}
    moved["area"] = moved["area"] * _areas(moved["boxes"]) / before.clamp(min=1e-9)
    left = _areas(moved["boxes"]) > 0
    return picture, {name: moved[name][left] for name in OF_EACH_OBJECT if name in moved}


def _resize(picture: Tensor, target: Target, height: int, width: int) -> tuple[Tensor, dict[str, Tensor]]:
    """A picture with its target in another size; areas follow."""
    before = picture.shape[-2:]
    if before == (height, width):
        return picture, dict(target)
    picture, moved = torchvision("transforms.v2").Resize((height, width), antialias=True)(picture, dict(target))
    moved["area"] = moved["area"] * (height / before[0]) * (width / before[1])
    return picture, moved


def _with_meaning(pixels: Tensor, target: Target) -> tuple[Tensor, dict[str, Any]]:
    """A picture and its target as torchvision's tensors with a meaning."""
    tensors = torchvision("tv_tensors")
    size = tuple(pixels.shape[-2:])
    moved = {**target, "boxes": tensors.BoundingBoxes(target["boxes"], format="XYXY", canvas_size=size)}
    if "masks" in target:
        moved["masks"] = tensors.Mask(target["masks"])
    return tensors.Image(pixels), moved


def _plain(target: Target) -> dict[str, Tensor]:
    return {name: value.as_subclass(Tensor) for name, value in target.items()}


def _areas(boxes: Tensor) -> Tensor:
    plain = boxes.as_subclass(Tensor)
    return (plain[:, 2:] - plain[:, :2]).clamp(min=0).prod(1)


def _draw(count: int) -> int:
    """A number from 0 to count - 1, by the generator that the loop seeds for each sample."""
    return int(torch.randint(count, ()))
