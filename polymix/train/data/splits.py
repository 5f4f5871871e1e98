"""Which samples are for training and which for the test, and a few of many."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Sequence
from typing import TypeVar

Item = TypeVar("Item")
TRAINING, HELD_OUT = ("train", "training"), ("val", "valid", "validation", "test")  # names of folders, as in ImageNet
TEST_SHARE = 5  # every fifth sample is for the test where a data set does not say which


def held_out(items: Sequence[Item], every: int = TEST_SHARE) -> tuple[list[Item], list[Item]]:
    """Training and test samples: every fifth, the first among them, is for the test."""
    return [item for place, item in enumerate(items) if place % every], list(items[::every])


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
