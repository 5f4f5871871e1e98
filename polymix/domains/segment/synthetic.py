"""The default data: digits on photographs, with the class of each digit's pixels."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polymix.domains.segment.layouts import IGNORED, write_ade20k, write_names
from polymix.domains.segment.recipe import STRIDE
from polymix.train.data import scenes

NAME = "digits on photographs"
DIGIT_SIDE = 16  # pixels a side of a digit: 2 × 2 of the squares that the host "patches" sees
MIN_SIDE = 2 * DIGIT_SIDE  # pixels a side of a scene, into which three digits fit


def synthetic(
    folder: Path, seed: int = 0, *, question: str = "what", count: int = 4000, tests: int = 200, size: int = 48
) -> None:
    """Write digit scenes as ADE20K has them into an empty folder.

    Three digits of 16 × 16 pixels stand at multiples of 8 pixels on a photograph. The class of a digit's pixels is what
    `question` asks. The photograph is "other", label 0 in the files, and does not count. Test scenes have digits and
    parts of the photographs of their own.
    """
    write_names(folder, scenes.classes_of(question))
    for split, number in (("training", count), ("validation", tests)):
        drawn = scenes.make(number, question=question, test=split == "validation", size=size, seed=seed,
                            sides=(DIGIT_SIDE, DIGIT_SIDE), snap=STRIDE)  # fmt: skip
        write_ade20k(folder, split, ({"image": scene["image"], "classes": _classes_of(scene)} for scene in drawn))


def _classes_of(scene: Mapping[str, Any]) -> Tensor:
    """The classes of a scene's pixels (H, W); IGNORED beside the digits."""
    labels = torch.full(scene["masks"].shape[1:], IGNORED)
    for mask, label in zip(scene["masks"], scene["labels"], strict=True):
        labels[mask] = label
    return labels
