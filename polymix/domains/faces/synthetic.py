"""Synthetic scenes: real faces of scikit-image, pasted into photographs beside parts of photographs that show none.

`skimage.data.lfw_subset` has 100 faces and 100 other crops of 25 × 25 grey pixels. The other crops are pasted in the
same way, so that an edge or a patch of one colour does not tell a face.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from polymix.domains.faces import wider
from polymix.errors import check_choice, check_int
from polymix.extras import needs
from polymix.train.data.scenes import BAR, BAR_WIDTH, BARS, MAX_SIDE, background, free_place, photographs

FACES = 100  # come before the other crops
TEST_FACES = 20  # faces, and as many other crops, that only test scenes have
ALL = "all"  # the question whose answer is every face
SIDES = (12, 40)  # pixels of a pasted crop
# Sides of the smallest face of each subset, in pixels.
MIN_SIDES = {"easy": 28, "medium": 20, "hard": 12}


@cache
def crops() -> tuple[Tensor, Tensor]:
    """The faces and the other crops of scikit-image (100, 25, 25), from 0 to 1."""
    with needs("photos", "Faces are cut from its photographs where there is no --data."):
        from skimage.data import lfw_subset
    grey = torch.from_numpy(lfw_subset()).float()
    return grey[:FACES], grey[FACES:]


def synthetic(
    folder: Path, seed: int = 0, *, question: str = BAR, count: int = 600, tests: int = 100, size: int = 96
) -> None:
    """Write the default data in WIDER FACE's layout. Test scenes have faces and parts of photographs of their own."""
    for split, number in (("train", count), ("val", tests)):
        wider.write(folder, split, list(make(number, question=question, test=split == "val", size=size, seed=seed)))


def make(
    count: int, *, question: str = BAR, test: bool = False, size: int = 96, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """Scenes: `image`, bytes (3, size, size); `boxes`, lists of x, y, w, h; `subsets`, places of faces by name.

    The last fifth of the faces and of the other crops, and the right fifth of each photograph, are for test scenes
    alone. A scene has up to four faces and two or three other crops; every tenth has no face.

    question: "bar": faces and other crops are green or magenta, as is a bar along the left edge; the faces to be found
        are those of the bar's colour. All faces lie in the right third, so that nothing near them tells the bar's
        colour. "all": every face is to be found.
    """
    check_choice("question", question, (BAR, ALL))
    check_int("size", size, 4 * SIDES[0], MAX_SIDE)
    by_bar, colours = question == BAR, torch.tensor(list(BARS.values()))[:, :, None, None]
    generator = torch.Generator().manual_seed(2 * seed + test)
    backgrounds = photographs()

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    mine = [part[-TEST_FACES:] if test else part[:-TEST_FACES] for part in crops()]
    largest, left = (size // 4, 2 * size // 3) if by_bar else (min(SIDES[1], size // 3), 0)
    for number in range(count):
        image = background(backgrounds[draw(0, len(backgrounds))], size, test, draw)
        taken = torch.zeros(size, size, dtype=torch.bool)
        boxes: list[list[int]] = []
        wanted = draw(0, 2) if by_bar else 0
        if by_bar:
            image[:, :, : size // BAR_WIDTH] = colours[wanted]
            taken[:, : size // BAR_WIDTH] = True
        faces = 0 if number % 10 == 9 else draw(1, 5)
        for kind in (0,) * faces + (1,) * draw(2, 4):
            side = round(SIDES[0] * (largest / SIDES[0]) ** float(torch.rand((), generator=generator)))
            y, x = free_place(taken, side, draw, left=0 if kind else left)
            if taken[y : y + side, x : x + side].any():
                continue
            crop = mine[kind][draw(0, len(mine[kind]))]
            crop = crop.flip(1) if draw(0, 2) else crop
            tint = 0.8 + 0.4 * torch.rand(3, 1, 1, generator=generator)
            colour = draw(0, 2) if by_bar else wanted
            if by_bar:
                tint = tint * (1 + colours[colour]) / 2
            crop = interpolate(crop[None, None], size=(side, side), mode="bilinear", antialias=True)[0] * tint
            patch = image[:, y : y + side, x : x + side]
            patch.copy_(torch.lerp(patch, crop.clamp(0, 1), _ellipse(side)))
            taken[max(0, y - 1) : y + side + 1, max(0, x - 1) : x + side + 1] = True
            if kind == 0 and colour == wanted:
                boxes.append([x, y, side, side])
        subsets = {name: [i for i, box in enumerate(boxes) if box[2] >= low] for name, low in MIN_SIDES.items()}
        yield {"image": (image * 255).round().to(torch.uint8), "boxes": boxes, "subsets": subsets}


def _ellipse(side: int) -> Tensor:
    """How much of a crop covers the photograph (side, side): all of it in the middle, nothing at the corners."""
    axis = torch.linspace(-1, 1, side)
    radius = (axis[:, None] ** 2 + axis[None] ** 2).sqrt()
    return ((1.15 - radius) / 0.15).clamp(0, 1)
