"""Annotated pictures: what every reader makes of a data set, and the checks that all readers share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from polymix.train.data.boxes.masks import decode
from polymix.train.data.pictures import QUARTER_TURNS, TURNED, read_header, read_picture, turn, turn_box
from polymix.train.data.problems import Problems

Box = tuple[float, float, float, float]  # x1, y1, x2, y2 in pixels
MAX_OVERHANG = 1  # pixels by which a box may leave its picture: annotators round


@dataclass(frozen=True)
class Annotation:
    """An annotated object: its box in the picture as it is shown, its class, and its shape as the file has it.

    crowd: a region of many objects, which is no target and counts neither for nor against a prediction.
    """

    box: Box
    label: int
    shape: Any = None
    crowd: bool = False
    area: float = 0.0


@dataclass(frozen=True)
class AnnotatedPicture:
    """A file with its objects.

    Args:
        number: its id in the annotations. width, height: of the picture as it is shown.
        orientation: how shapes are turned to lie on the picture, as EXIF counts; 1: not. Boxes are turned already.
        source: the file of its annotations.
    """

    file: Path
    number: int
    width: int
    height: int
    objects: tuple[Annotation, ...]
    orientation: int = 1
    source: Path | None = None

    def target(self, masks: bool = False) -> dict[str, Tensor]:
        """Boxes (n, 4), labels from 0, crowds and areas as tensors, and with `masks` those too (n, height, width)."""
        target = {
            "boxes": torch.tensor([thing.box for thing in self.objects], dtype=torch.float32).view(-1, 4),
            "labels": torch.tensor([thing.label for thing in self.objects], dtype=torch.int64),
            "iscrowd": torch.tensor([thing.crowd for thing in self.objects], dtype=torch.bool),
            "area": torch.tensor([thing.area for thing in self.objects], dtype=torch.float32),
        }
        if masks:
            sides = stored_sides(self.width, self.height, self.orientation)
            each = [turn(decode(thing.shape, *sides[::-1]), self.orientation) for thing in self.objects]
            target["masks"] = torch.stack(each) if each else torch.zeros(0, self.height, self.width, dtype=torch.bool)
        return target

    def pixels(self) -> Tensor:
        """The picture as it is shown: bytes (3, height, width)."""
        return read_picture(self.file)


@dataclass(frozen=True)
class AnnotatedPictures(Dataset[tuple[Tensor, dict[str, Tensor]]]):
    """Annotated pictures as samples: bytes (3, height, width), and `AnnotatedPicture.target`, read on demand."""

    pictures: tuple[AnnotatedPicture, ...]
    classes: tuple[str, ...]
    masks: bool = False

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, place: int) -> tuple[Tensor, dict[str, Tensor]]:
        picture = self.pictures[place]
        return picture.pixels(), picture.target(self.masks)


# Training pictures, test pictures and classes.
Parts = tuple[tuple[AnnotatedPicture, ...], tuple[AnnotatedPicture, ...], tuple[str, ...]]


class Frame(NamedTuple):
    """What the annotations of a picture refer to: its size as it is shown, and how they are turned to lie on it."""

    width: int
    height: int
    orientation: int


def stored_sides(width: int, height: int, orientation: int) -> tuple[int, int]:
    """Width and height before a picture of these is turned."""
    return (height, width) if orientation in QUARTER_TURNS else (width, height)


def check_file(file: Path, size: tuple[int, int] | None, entry: str, problems: Problems) -> Frame | None:
    """The frame of a picture file, or None after noting why it cannot be used.

    size: width and height that the annotations give, if they do; a photograph that EXIF turns has both ways.
    """
    with problems.noting(entry):
        header = read_header(file)
        orientation = header.turn_for(size)
        if header.fits_both(size):
            problems.note(file, TURNED)
        if orientation is not None:
            return Frame(header.width, header.height, orientation)
        sizes = f"is {header.width} × {header.height} pixels, and {size[0]} × {size[1]}" if size else ""
        problems.add(file, entry, f"{sizes} in the annotations")
    return None


def is_number(value: Any) -> bool:
    """Whether a value of a file is a finite number, small enough to be exact in float64."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= 2**53


def check_box(box: Sequence[Any], frame: Frame) -> Box:
    """x1, y1, x2, y2 in the picture as it is shown. ValueError: no numbers, no area, or more than a pixel outside."""
    if len(box) != 4 or not all(map(is_number, box)):
        raise ValueError(f"box {list(box)!r}, which is not four numbers")
    x1, y1, x2, y2 = map(float, box)
    width, height = stored_sides(*frame)
    if not (x2 > x1 and y2 > y1):
        raise ValueError(f"a box of no area: {x2 - x1:g} × {y2 - y1:g}")
    if x1 < -MAX_OVERHANG or y1 < -MAX_OVERHANG or x2 > width + MAX_OVERHANG or y2 > height + MAX_OVERHANG:
        corners = ", ".join(f"{value:g}" for value in (x1, y1, x2, y2))
        raise ValueError(f"a box outside the picture: {corners} in {width} × {height}")
    inside = max(x1, 0.0), max(y1, 0.0), min(x2, float(width)), min(y2, float(height))
    return turn_box(inside, frame.orientation, frame.width, frame.height)


def check_shape(shape: Any, frame: Frame, source: Path, entry: str, problems: Problems) -> bool:
    """Whether an object's mask can be decoded; if not, why is noted."""
    width, height = stored_sides(*frame)
    try:
        decode(shape, height, width)
    except ValueError as error:
        problems.add(source, entry, str(error))
        return False
    return True
