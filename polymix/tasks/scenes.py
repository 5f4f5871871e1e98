"""Made scenes: real handwritten digits on real photographs, with a box and a mask for each digit.

Two questions can be asked of an object. "what": which digit is it? Its own pixels show it. "which": is it the smallest,
the middle or the largest of its scene's three digits? Only the others tell. The digits of a test scene are three
consecutive numbers, so that most digits are equally often each of the three. In half of the training scenes they are
any three, so that models first learn which digits are large.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from polymix.errors import MissingExtraError, check_choice, check_int

QUESTIONS = ("which", "what")
RANKS = ("smallest", "middle", "largest")
DIGITS = tuple(str(digit) for digit in range(10))
PER_SCENE = 3
TEST_SHARE = 0.2  # of the digits, and of each photograph's width


def classes_of(question: str) -> tuple[str, ...]:
    """The names of the classes that a question asks for."""
    check_choice("question", question, QUESTIONS)
    return RANKS if question == "which" else DIGITS


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
    try:
        from sklearn import datasets
    except ImportError as error:
        raise MissingExtraError("scikit-learn", str(error), "pip install 'polymix[train]'") from error
    return datasets


def make(
    count: int, *, question: str = "which", test: bool = False, size: int = 64, seed: int = 0,
    sides: Sequence[int] = (16, 26), snap: int = 1,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Scenes: `image`, bytes (3, size, size); `masks` (3, size, size); `labels`, places in `classes_of`; `digits`.

    The last fifth of the digits and the right fifth of each photograph are for test scenes alone.

    Args:
        count: how many there are.
        question: "which" or "what".
        size: sides of a scene in pixels.
        sides: the smallest and the largest side of a digit, which is at least a fourth of `size` short of it.
        snap: digits stand at multiples of so many pixels.
    """
    check_int("count", count, 1)
    check_int("size", size, 2 * max(sides))
    places = {name: place for place, name in enumerate(classes_of(question))}
    (digits, labels), backgrounds = _digits(), photographs()
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out = round(TEST_SHARE * len(labels))
    mine = shuffled[-held_out:] if test else shuffled[:-held_out]
    by_value = [mine[labels[mine] == value] for value in range(10)]
    generator = torch.Generator().manual_seed(2 * seed + test)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    for _ in range(count):
        image = background(backgrounds[draw(0, len(backgrounds))], size, test, draw)
        first, wide = draw(0, 11 - PER_SCENE), not test and draw(0, 2)
        numbers = torch.randperm(10, generator=generator)[:PER_SCENE].sort().values if wide else first + torch.arange(3)
        order = torch.randperm(PER_SCENE, generator=generator).tolist()
        values = [int(numbers[rank]) for rank in order]
        masks, taken = [], torch.zeros(size, size, dtype=torch.bool)
        for value in values:
            ink = digits[by_value[value][draw(0, len(by_value[value]))]]
            side = draw(sides[0], sides[1] + 1)
            ink = interpolate(ink[None, None], size=(side, side), mode="bilinear")[0, 0]
            y, x = free_place(taken, side, draw, snap)
            shade = torch.rand(3, generator=generator)
            dark = image[:, y : y + side, x : x + side].mean() > 0.5
            colour = shade * 0.25 if dark else 1 - shade * 0.25
            patch = image[:, y : y + side, x : x + side]
            patch.copy_(patch * (1 - ink) + colour[:, None, None] * ink)
            mask = torch.zeros(size, size, dtype=torch.bool)
            mask[y : y + side, x : x + side] = ink > 0.35
            edge = int(snap == 1)  # a pixel between digits, where they stand anywhere
            taken[max(0, y - edge) : y + side + edge, max(0, x - edge) : x + side + edge] = True
            masks.append(mask)
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


def free_place(taken: Tensor, side: int, draw: Any, snap: int = 1) -> tuple[int, int]:
    """A free place for a square, or the least covered one of 50."""
    size, best = len(taken), (1 << 30, 0, 0)
    for _ in range(50):
        y, x = (draw(0, (size - side) // snap + 1) * snap for _ in range(2))
        covered = int(taken[y : y + side, x : x + side].sum())
        best = min(best, (covered, y, x))
        if not covered:
            break
    return best[1:]
