"""Synthetic scenes: real handwritten digits on real photographs, with a box and a mask for each digit.

Three questions can be asked. "what": which digit is an object? Its own pixels show it. "which": is it the smallest,
the middle or the largest of its scene's three digits? Only the others tell. The digits of a test scene are three
consecutive numbers, so that most digits are equally often each of the three. In half of the training scenes they are
any three, so that models first learn which digits are large. "same": the digit at the top left, white on black, says
which of four different digits is to be found, as another hand wrote it. That one is the scene's only object; nothing
near it tells it from the other three. "bar": is the bar along the left edge green or magenta? All three digits, in the
right quarter, are of that class, and nothing near them tells it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from polymix.errors import check_choice, check_int
from polymix.extras import needs

QUESTIONS = ("which", "what")  # whose objects are all the digits
SAME, BAR = "same", "bar"
RANKS = ("smallest", "middle", "largest")
BARS = {"green": (0.0, 1.0, 0.0), "magenta": (1.0, 0.0, 1.0)}  # colours that the photographs do not have
DIGITS = tuple(str(digit) for digit in range(10))
DIGITS_PER_SCENE = 3
CHOICES = 4  # digits of which one is the same as that at the top left
SAME_SIDE = 8  # pixels a side of a digit in "same"; they stand at multiples of it
BAR_WIDTH = 8  # of a scene: the bar is an eighth of it
TEST_SHARE = 0.2  # of the digits, and of each photograph's width
MAX_SIDE = 128  # sides of a scene in pixels: the width of a photograph's part for tests


def classes_of(question: str) -> tuple[str, ...]:
    """The names of the classes that a question asks for."""
    check_choice("question", question, (*QUESTIONS, SAME, BAR))
    return {"which": RANKS, "what": DIGITS, SAME: ("the same",), BAR: tuple(BARS)}[question]


@cache
def _digits() -> tuple[Tensor, Tensor]:
    """Digits (1797, 8, 8) from 0 to 1, and their labels."""
    digits: Any = _datasets().load_digits()
    return torch.tensor(digits.images).float() / 16, torch.tensor(digits.target)


@cache
def photographs() -> tuple[Tensor, ...]:
    """The photographs (3, H, W) of scikit-learn, from 0 to 1."""
    files = ("china.jpg", "flower.jpg")
    pixels = [torch.tensor(_datasets().load_sample_image(name)) for name in files]
    return tuple(each.permute(2, 0, 1).float() / 255 for each in pixels)


def _datasets() -> Any:
    with needs("train"):
        from sklearn import datasets
    return datasets


def make(
    count: int, *, question: str = "which", test: bool = False, size: int = 64, seed: int = 0,
    sides: Sequence[int] | None = None, snap: int | None = None,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Scenes: `image`, bytes (3, size, size); `masks` (n, size, size); `labels`, places in `classes_of`; `digits`.

    There are n = 3 objects, or 1 in "same". `digits` are the numbers of the objects, and then of the others. The last
    fifth of the digits and the right fifth of each photograph are for test scenes alone.

    Args:
        count: how many there are.
        question: "which", "what", "same" or "bar".
        size: sides of a scene in pixels, at most MAX_SIDE.
        sides: the smallest and the largest side of a digit, at most half of `size`, in "same" and "bar" a fourth; None:
            16 and 26, 8 in "same", an eighth and a fifth of `size` in "bar".
        snap: digits stand at multiples of so many pixels; None: 1, or 8 in "same".
    """
    search, left = question == SAME, 3 * size // 4 if question == BAR else 0
    sides = sides or {SAME: (SAME_SIDE, SAME_SIDE), BAR: (size // 8, size // 5)}.get(question, (16, 26))
    snap = snap or (SAME_SIDE if search else 1)
    check_int("count", count, 1)
    check_int("size", size, (4 if question in (SAME, BAR) else 2) * max(sides), MAX_SIDE)
    places = {name: place for place, name in enumerate(classes_of(question))}
    (digits, labels), backgrounds = _digits(), photographs()
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out = round(TEST_SHARE * len(labels))
    mine = shuffled[-held_out:] if test else shuffled[:-held_out]
    by_value = [mine[labels[mine] == value] for value in range(10)]
    generator = torch.Generator().manual_seed(2 * seed + test)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    def paste(image: Tensor, taken: Tensor, value: int, sample: bool = False) -> Tensor:
        """Draw a digit in a free place, or white on black at the top left; returns its mask."""
        ink = digits[by_value[value][draw(0, len(by_value[value]))]]
        side = draw(sides[0], sides[1] + 1)
        ink = interpolate(ink[None, None], size=(side, side), mode="bilinear")[0, 0]
        y, x = (0, 0) if sample else free_place(taken, side, draw, snap, left)
        patch = image[:, y : y + side, x : x + side]
        shade = torch.rand(3, generator=generator)
        colour = shade * 0.25 if patch.mean() > 0.5 else 1 - shade * 0.25
        if sample:
            patch.zero_()
            colour = torch.ones(3)
        patch.copy_(patch * (1 - ink) + colour[:, None, None] * ink)
        mask = torch.zeros(size, size, dtype=torch.bool)
        mask[y : y + side, x : x + side] = ink > 0.35
        edge = int(snap == 1)  # a pixel between digits, where they stand anywhere
        taken[max(0, y - edge) : y + side + edge, max(0, x - edge) : x + side + edge] = True
        return mask

    for _ in range(count):
        image = background(backgrounds[draw(0, len(backgrounds))], size, test, draw)
        taken = torch.zeros(size, size, dtype=torch.bool)
        if question == BAR:
            (name, colour), values = list(BARS.items())[draw(0, 2)], [draw(0, 10) for _ in range(DIGITS_PER_SCENE)]
            image[:, :, : size // BAR_WIDTH] = torch.tensor(colour)[:, None, None]
            masks, names = [paste(image, taken, value) for value in values], [name] * DIGITS_PER_SCENE
        elif search:
            values = torch.randperm(10, generator=generator)[:CHOICES].tolist()
            paste(image, taken, values[0], sample=True)
            masks, names = [paste(image, taken, value) for value in values][:1], list(places)
        else:
            first, wide = draw(0, 11 - DIGITS_PER_SCENE), not test and draw(0, 2)
            numbers = first + torch.arange(DIGITS_PER_SCENE)
            if wide:
                numbers = torch.randperm(10, generator=generator)[:DIGITS_PER_SCENE].sort().values
            order = torch.randperm(DIGITS_PER_SCENE, generator=generator).tolist()
            values = [int(numbers[rank]) for rank in order]
            masks = [paste(image, taken, value) for value in values]
            names = [RANKS[rank] for rank in order] if question == "which" else [DIGITS[value] for value in values]
        yield {"image": (image * 255).round().to(torch.uint8), "masks": torch.stack(masks),
               "labels": torch.tensor([places[name] for name in names]), "digits": torch.tensor(values)}  # fmt: skip


def background(photograph: Tensor, size: int, test: bool, draw: Any) -> Tensor:
    """A crop of a photograph, from the part that is for training or for tests, with low contrast."""
    height, width = photograph.shape[1:]
    edge = round((1 - TEST_SHARE) * width)
    low, high = (edge, width - size + 1) if test else (0, edge - size + 1)
    y, x = draw(0, height - size + 1), draw(low, high)
    crop = photograph[:, y : y + size, x : x + size]
    return (crop.mean() + (crop - crop.mean()) * 0.6).clone()


def free_place(taken: Tensor, side: int, draw: Any, snap: int = 1, left: int = 0) -> tuple[int, int]:
    """A free place for a square from column `left` on, or the least covered one of 50."""
    size, best = len(taken), (1 << 30, 0, 0)
    for _ in range(50):
        y, x = (start + draw(0, (size - start - side) // snap + 1) * snap for start in (0, left))
        covered = int(taken[y : y + side, x : x + side].sum())
        best = min(best, (covered, y, x))
        if not covered:
            break
    return best[1:]
