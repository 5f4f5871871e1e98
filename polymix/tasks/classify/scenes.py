"""Digit scenes: four handwritten digits, of which the first says which of the others is the answer."""

from __future__ import annotations

import torch
from torch import Tensor

from polymix.tasks.classify.data import ImageData, load_digits

CELL, CELLS = 8, 2  # pixels a side of a digit; digits a side of a scene
SCENE = CELL * CELLS
TRAIN, TEST = 6000, 1000
_SEEDS = {"train": 0, "test": 1}


def load_scenes() -> ImageData:
    """Scenes of 16 × 16 pixels: 2 × 2 of scikit-learn's handwritten digits, and the digit that is pointed at.

    The digit at the top left is a 1, 2 or 3. It points at the one to its right, below it or diagonally below it; the
    label is that digit. Test scenes are made of digits that no training scene has. Scenes are the same in every run.

    No patch shows the label, and a sum over patches cannot compute it: a model that does not mix tokens can at best
    know the three digits and name the commonest: 0.72 · 1/3 + 0.27 · 2/3 + 0.01 = 43 % right (chance: 10 %).
    """
    digits = load_digits()
    train, test = (
        _scenes(images, labels, count, torch.Generator().manual_seed(_SEEDS[name]))
        for name, (images, labels), count in (("train", digits.train, TRAIN), ("test", digits.test, TEST))
    )
    return ImageData("digit scenes", digits.classes, train, test)


def _scenes(images: Tensor, labels: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Scenes (count, 1, 16, 16), and their labels. In a scene each class is as likely as any other."""
    places = CELLS**2
    shown = torch.randint(10, (count, places), generator=generator)
    shown[:, 0] = torch.randint(1, places, (count,), generator=generator)
    drawn = torch.rand(count, places, generator=generator)
    of = [torch.where(labels == digit)[0] for digit in range(10)]
    chosen = torch.stack([members[(drawn * len(members)).long()] for members in of])  # an image of every class
    picked = images[chosen.gather(0, shown[None])[0]]  # (count, places, 1, 8, 8)
    rows = picked.unflatten(1, (CELLS, CELLS)).permute(0, 3, 1, 4, 2, 5)
    answers = shown.gather(1, shown[:, :1])[:, 0]
    return rows.reshape(count, 1, SCENE, SCENE).contiguous(), answers
