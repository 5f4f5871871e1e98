"""How the scripts save their results, also several processes that share their rows."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from polymix.files import write_whole

T = TypeVar("T")


def save(content: Any, path: Path) -> None:
    """Write JSON whole or not at all."""
    write_whole(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def read(path: Path, new: Mapping[str, Any]) -> dict[str, Any]:
    """What a file of results holds, or what a new one is to hold."""
    return dict(json.loads(path.read_text()) if path.exists() else new)


def part_of(rows: Sequence[T], part: str) -> Sequence[T]:
    """The rows of one of several processes: of the part "1/4", every fourth row from the second on."""
    place, parts = map(int, part.split("/"))
    return rows[place::parts]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Be the only process that reads and writes a file, which need not be there yet, and others of its folder."""
    import fcntl  # which Windows has not

    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
