"""Annotated pictures: what every reader makes of a data set, and the mistakes that it found."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from polymix.errors import DataError, MissingExtraError
from polymix.tasks.boxes.masks import decode

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff"}
MODES = {"1", "L", "LA", "P", "PA", "RGB", "RGBA"}  # of 8 bits, whose colours are red, green and blue
MISTAKES = ("refuse", "skip")


@dataclass(frozen=True)
class Thing:
    """An annotated object: x1, y1, x2, y2 in pixels, its class, and its shape as the file has it.

    crowd: a region of many objects, which is no target and counts neither for nor against a prediction.
    """

    box: tuple[float, float, float, float]
    label: int
    shape: Any = None
    crowd: bool = False
    area: float = 0.0


@dataclass(frozen=True)
class Picture:
    """A file with its objects. number: its id in the annotations."""

    file: Path
    number: int
    width: int
    height: int
    things: tuple[Thing, ...]

    def target(self, masks: bool = False) -> dict[str, Tensor]:
        """Boxes (n, 4), labels from 0, crowds and areas as tensors, and with `masks` those too (n, height, width)."""
        boxes = torch.tensor([thing.box for thing in self.things], dtype=torch.float32).view(-1, 4)
        found = {
            "boxes": boxes, "labels": torch.tensor([thing.label for thing in self.things], dtype=torch.int64),
            "iscrowd": torch.tensor([thing.crowd for thing in self.things], dtype=torch.bool),
            "area": torch.tensor([thing.area for thing in self.things], dtype=torch.float32),
        }  # fmt: skip
        if masks:
            each = [decode(thing.shape, self.height, self.width) for thing in self.things]
            found["masks"] = torch.stack(each) if each else torch.zeros(0, self.height, self.width, dtype=torch.bool)
        return found

    def pixels(self) -> Tensor:
        """The picture as bytes (3, height, width)."""
        return read_pixels(self.file, (self.width, self.height))


def read_pixels(file: Path, size: tuple[int, int] | None = None) -> Tensor:
    """A picture file as bytes (3, height, width).

    size: width and height that the annotations give; a photograph is turned by its EXIF only where it then fits them,
    or where there are none.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise MissingExtraError("pillow", "no such package", "pip install 'polymix[train]'") from error
    try:
        with Image.open(file) as opened:
            image = opened if size == opened.size else ImageOps.exif_transpose(opened)
            rgb = image.convert("RGB")
            data = torch.frombuffer(bytearray(rgb.tobytes()), dtype=torch.uint8)
            return data.view(rgb.height, rgb.width, 3).permute(2, 0, 1).contiguous()
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        raise DataError(
            "data", f"{file}, which cannot be read ({error})", "a picture", "Remove or repair it."
        ) from error


@dataclass
class Mistakes:
    """What is wrong in a data set, each a line with the file and the entry."""

    lines: list[str] = field(default_factory=list)

    def add(self, file: Path | str, entry: str, text: str) -> None:
        self.lines.append(f"{file}: {entry}: {text}" if entry else f"{file}: {text}")

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note a DataError of the block as a mistake, and go on after the block."""
        try:
            yield
        except DataError as error:
            self.lines.append(str(error.got))

    def decode(self, pictures: Iterable[Picture]) -> None:
        """Decode every picture, and note those that cannot be read, such as files that end too soon."""
        for picture in pictures:
            with self.noting():
                picture.pixels()

    def settle(self, choice: str, say: Callable[[str], None]) -> None:
        """Raise DataError with the first mistake, or with choice "skip" say how many entries were left out."""
        if not self.lines:
            return
        more = f" and {len(self.lines) - 1:,} more" if len(self.lines) > 1 else ""
        if choice == "refuse":
            cure = "Correct it, or pass mistakes=skip to leave out such entries. --check lists all."
            raise DataError("data", f"{self.lines[0]}{more}", "annotations without mistakes", cure)
        say(f"Left out {len(self.lines):,} entries, the first: {self.lines[0]}")


def check_file(file: Path, size: tuple[int, int] | None, entry: str, mistakes: Mistakes) -> tuple[int, int] | None:
    """The width and height of a picture file, or None after noting why it cannot be used.

    size: what the annotations say, if they say it; a photograph turned by its EXIF has both.
    """
    from PIL import Image

    try:
        with Image.open(file) as image:
            mode, found = image.mode, image.size
            turned = found[::-1] if image.getexif().get(274, 1) in (5, 6, 7, 8) else found
    except FileNotFoundError:
        mistakes.add(file, entry, "there is no such file")
        return None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        mistakes.add(file, entry, f"cannot be read ({' '.join(str(error).split())})")
        return None
    if mode not in MODES:
        what = "CMYK" if mode == "CMYK" else "more than 8 bits a channel" if mode[0] in "IF" else f"mode {mode}"
        mistakes.add(file, entry, f"has {what}; convert it to 8-bit RGB or grey")
        return None
    if size is not None and size not in (found, turned):
        mistakes.add(file, entry, f"is {found[0]} × {found[1]} pixels, and {size[0]} × {size[1]} in the annotations")
        return None
    return size or turned


def check_box(box: Sequence[Any], width: int, height: int) -> tuple[float, float, float, float]:
    """x1, y1, x2, y2 inside the picture. ValueError: no numbers, no area, or more than a pixel outside."""
    if len(box) != 4 or not all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in box):
        raise ValueError(f"box {list(box)!r}, which is not four numbers")
    x1, y1, x2, y2 = map(float, box)
    if not (x2 > x1 and y2 > y1):
        raise ValueError(f"a box of no area: {x2 - x1:g} × {y2 - y1:g}")
    if x1 < -1 or y1 < -1 or x2 > width + 1 or y2 > height + 1:
        corners = ", ".join(f"{value:g}" for value in (x1, y1, x2, y2))
        raise ValueError(f"a box outside the picture: {corners} in {width} × {height}")
    return max(x1, 0.0), max(y1, 0.0), min(x2, float(width)), min(y2, float(height))


@dataclass(frozen=True)
class Pictures(Dataset[tuple[Tensor, dict[str, Tensor]]]):
    """Pictures as samples: bytes (3, height, width), and `Picture.target`. Files are read on demand."""

    pictures: tuple[Picture, ...]
    classes: tuple[str, ...]
    masks: bool = False

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, place: int) -> tuple[Tensor, dict[str, Tensor]]:
        picture = self.pictures[place]
        return picture.pixels(), picture.target(self.masks)


def check_shapes(mistakes: Mistakes, source: Path, entry: str, thing: Thing, width: int, height: int) -> bool:
    """Whether an object's mask can be decoded; if not, why is noted."""
    try:
        decode(thing.shape, height, width)
    except ValueError as error:
        mistakes.add(source, entry, str(error))
        return False
    return True


def natural(name: str) -> list[Any]:
    """A key that sorts 2.png before 10.png."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
