"""125 annotated nuclei of a fluorescence microscope, which come with the package stardist (BSD-3-Clause).

The package is not imported and need not be installed: the picture (512 × 512) and its labels are read from the wheel
file. Crops of the left three quarters are for training, those of the right quarter for the test.
"""

from __future__ import annotations

import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polymix.errors import DataError, one_line
from polymix.train.data.boxes import coco
from polymix.train.data.pictures import read_numbers
from polymix.train.data.splits import checksum_of

ARCHIVE_FOLDER = "stardist/data/images/"
FILES = ("img2d.tif", "mask2d.tif")
TRAIN_SHARE = 0.75  # of the width
MIN_PIXELS = 25  # of a nucleus that is cut by the edge of a crop, to count as one
STEPS = 4  # training crops overlap: each is a fourth of a side from the next


def is_nuclei(path: Path) -> bool:
    """Whether --data names a wheel, or a folder that has the picture."""
    return path.suffix == ".whl" or (path / FILES[0]).is_file()


def read(path: Path) -> tuple[Tensor, Tensor]:
    """The picture, bytes (H, W), and the number of the nucleus of each pixel (H, W), 0 for none.

    path: a wheel of stardist, or the folder with img2d.tif and mask2d.tif. Raises DataError for another.
    """
    allowed = "a wheel of stardist, or the folder with its img2d.tif and mask2d.tif"
    cure = "pip download stardist --no-deps gets the wheel."
    parts: list[Any] = []
    for name in FILES:
        try:
            parts.append(read_numbers(BytesIO(_content(path, name)), name))
        except (OSError, KeyError, zipfile.BadZipFile, DataError) as error:
            reason = error.got if isinstance(error, DataError) else one_line(error)
            raise DataError("data", f"{path}, whose {name} cannot be read ({reason})", allowed, cure) from error
    pixels, labels = parts
    if pixels.ndim != 2 or pixels.shape != labels.shape:
        got = f"{path}: {FILES[0]} is {tuple(pixels.shape)}, {FILES[1]} is {tuple(labels.shape)}"
        raise DataError("data", got, "two grey pictures of one size", cure)
    if not labels.any() or labels.min() < 0:
        raise DataError("data", f"{path}: {FILES[1]} without a nucleus", "numbers from 1, and 0 for none", cure)
    bright = torch.quantile(pixels.double(), 0.998).clamp(min=1)
    return (255 * pixels / bright).clamp(0, 255).to(torch.uint8), labels


def _content(path: Path, name: str) -> bytes:
    """A file of the folder or the wheel. Raises OSError, KeyError or BadZipFile where it cannot be read."""
    if path.is_dir():
        return (path / name).read_bytes()
    with zipfile.ZipFile(path) as wheel:
        return wheel.read(ARCHIVE_FOLDER + name)


def checksum(path: Path) -> int:
    """Tells other nuclei apart; 0 where they cannot be read, of which `read` tells."""
    try:
        return checksum_of(_content(path, name) for name in FILES)
    except (OSError, KeyError, zipfile.BadZipFile):
        return 0


def write(path: Path, folder: Path, size: int) -> None:
    """Write crops of `size` pixels in COCO's layout. Raises DataError if the picture is smaller than four of them."""
    pixels, labels = read(path)
    height, width = pixels.shape
    edge = round(TRAIN_SHARE * width)
    if size > min(height, width - edge):
        got = f"{size} for a picture of {height} × {width}, whose right quarter is the test"
        raise DataError("image_size", got, f"at most {min(height, width - edge)}", "Choose a smaller one.")
    for split, left, right, step in (("train", 0, edge, max(1, size // STEPS)), ("val", edge, width, size)):
        scenes = []
        for y in range(0, height - size + 1, step):
            for x in range(left, right - size + 1, step):
                grey, mine = pixels[y : y + size, x : x + size], labels[y : y + size, x : x + size]
                numbers, counts = mine.unique(return_counts=True)
                whole = numbers[(numbers > 0) & (counts >= MIN_PIXELS)]
                masks = mine[None] == whole[:, None, None]
                image = grey[None].expand(3, size, size)
                scenes.append({"image": image, "labels": [0] * len(whole), "masks": masks})
        coco.write(folder, split, scenes, ("nucleus",))
