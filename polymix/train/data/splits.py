"""Which samples are for training and which for the test, and a few of many."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from polymix.errors import DataError

Item = TypeVar("Item")
TRAINING, HELD_OUT = ("train", "training"), ("val", "valid", "validation", "test")  # names of folders, as in ImageNet
TEST_SHARE = 5  # every fifth sample is for the test where a data set does not say which


def held_out(items: Sequence[Item], every: int = TEST_SHARE) -> tuple[list[Item], list[Item]]:
    """Training and test samples: every fifth, the first among them, is for the test."""
    return [item for place, item in enumerate(items) if place % every], list(items[::every])


def find_parts(folder: Path, allowed: str) -> tuple[Path, Path | None]:
    """The folders of training and test samples where there are both, by their names; else the folder itself, and None.

    allowed: what the folder should be, for the error. Raises DataError: there is no such folder.
    """
    if not folder.is_dir():
        raise DataError("data", f"{folder}, which is no folder", allowed, "Check the path.")
    subs = {path.name.lower(): path for path in folder.iterdir() if path.is_dir()}
    training, test = (next((subs[name] for name in names if name in subs), None) for names in (TRAINING, HELD_OUT))
    return (folder, None) if training is None or test is None else (training, test)


def spread(count: int, few: int) -> list[int]:
    """At most `few` places, evenly spread over 0 … count - 1."""
    few = min(few, count)
    return [place * count // few for place in range(few)]


def checksum_of(contents: Iterable[bytes]) -> int:
    """Tells other contents apart: CRC-32 of all of them, one after another."""
    crc = 0
    for content in contents:
        crc = zlib.crc32(content, crc)
    return crc


def natural(name: str) -> list[int | str]:
    """A key that sorts 2.png before 10.png."""
    return [int(part) if place % 2 else part for place, part in enumerate(re.split(r"(\d+)", name))]
