"""What a drawing must become to look like a classifier's training images, as constants for the page's canvas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

BLANK = 1 / 16  # of the ink: less is background
MIN_BLANK = 0.3  # share of the pixels of drawn images that is background


@dataclass(frozen=True)
class Drawing:
    """How a page turns a drawing into an image for a classifier, measured on the training images.

    The page scales the drawing to `height`, at most `width` wide, centres it, chooses the line's width so that
    the mean ink is `coverage`, averages over square pixels, rounds to whole values, resizes bilinearly and normalises:
    input = (resized - mean) / std.

    Args:
        classes: names in the order of the model's outputs.
        side: of the training images before resizing, in pixels. size: of the model's images.
        background, ink: the pixels' values, empty and full.
        height, width: of what is drawn: its mean height, and its mean width plus one deviation, in pixels.
        centre_x, centre_y: of its bounding box, in pixels from the left and the top.
        coverage: mean ink, from 0 to 1.
        mean, std: of the normalisation.
    """

    classes: tuple[str, ...]
    side: int
    size: int
    background: float
    ink: float
    height: float
    width: float
    centre_x: float
    centre_y: float
    coverage: float
    mean: float
    std: float

    @staticmethod
    def of(images: Tensor, classes: Sequence[str], size: int, mean: float, std: float) -> Drawing | None:
        """Measure images (N, 1, H, W) of whole values. None: they are not drawn in one colour on an even background."""
        if images.shape[1] != 1 or images.shape[2] != images.shape[3] or not len(images):
            return None
        values = images[:, 0].double()
        background = values.flatten().mode().values.item()
        ink = max((values.min().item(), values.max().item()), key=lambda value: abs(value - background))
        if ink == background or bool((values != values.round()).any()):
            return None
        cover = (values - background) / (ink - background)
        drawn = cover.abs() > BLANK
        drawn = drawn[drawn.flatten(1).any(1)]
        if (~drawn).double().mean().item() < MIN_BLANK:
            return None
        left, width = _extent(drawn.any(1))
        top, height = _extent(drawn.any(2))
        return Drawing(
            classes=tuple(classes), side=images.shape[-1], size=size, background=background, ink=ink,
            height=height.mean().item(), width=min((width.mean() + width.std(correction=0)).item(), images.shape[-1]),
            centre_x=(left + width / 2).mean().item(), centre_y=(top + height / 2).mean().item(),
            coverage=cover.mean().item(), mean=mean, std=std,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _extent(filled: Tensor) -> tuple[Tensor, Tensor]:
    """The first place (N,) at which rows of a mask (N, L) are true, and the number of places up to the last one."""
    first = filled.double().argmax(1)
    last = filled.shape[1] - 1 - filled.flip(1).double().argmax(1)
    return first.double(), (last - first + 1).double()
