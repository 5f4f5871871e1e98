"""Digit scenes: four handwritten digits, of which the first says which of the others is the answer."""

from __future__ import annotations

import torch
from torch import Tensor

from polymix.domains.classify.recipe import SCENE
from polymix.train.data.labelled import DIGIT_SIDE, Part, digits

CELLS = SCENE // DIGIT_SIDE  # digits a side of a scene
TRAIN, TEST = 6000, 1000


def scenes(seed: int = 0) -> tuple[Part, Part]:
    """Scenes of 16 × 16 pixels: 2 × 2 of scikit-learn's handwritten digits, and the digit that is pointed at.

    The digit at the top left is a 1, 2 or 3. It points at the one to its right, below it or diagonally below it; the
    label is that digit. Test scenes are made of digits that no training scene has. Returns training and test scenes,
    (N, 1, 16, 16) with their labels, the same ones for the same seed.

    No patch shows the label, and a sum over patches cannot compute it: a model that does not mix tokens can at best
    know the three digits and name the commonest: 0.72 · 1/3 + 0.27 · 2/3 + 0.01 = 43 % right (chance: 10 %).
    """
    train, test = digits()
    return _scenes(*train, TRAIN, 2 * seed), _scenes(*test, TEST, 2 * seed + 1)


def _scenes(images: Tensor, labels: Tensor, count: int, seed: int) -> Part:
    """Scenes (count, 1, 16, 16), and their labels. In a scene each class is as likely as any other."""
    places, generator = CELLS**2, torch.Generator().manual_seed(seed)
    values = torch.randint(10, (count, places), generator=generator)
    values[:, 0] = torch.randint(1, places, (count,), generator=generator)
    drawn = torch.rand(count, places, generator=generator)
    of = [torch.where(labels == digit)[0] for digit in range(10)]
    chosen = torch.stack([members[(drawn * len(members)).long()] for members in of])  # an image of every class
    picked = images[chosen.gather(0, values[None])[0]]  # (count, places, 1, 8, 8)
    rows = picked.unflatten(1, (CELLS, CELLS)).permute(0, 3, 1, 4, 2, 5)
    answers = values.gather(1, values[:, :1])[:, 0]
    return rows.reshape(count, 1, SCENE, SCENE).contiguous(), answers
