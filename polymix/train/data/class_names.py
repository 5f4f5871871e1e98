"""The names of classes: fit to be shown, one for each class, and read from the files that tools write beside data."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from polymix.errors import printable
from polymix.train.data.texts import composed, read_text

# labelme2voc writes the first, many hands the second, and CVAT the third: NAME:RED,GREEN,BLUE:parts:actions.
NAMES_FILES = ("class_names.txt", "classes.txt", "labelmap.txt")
_COLOURED = re.compile(r"(?P<name>[^:]*):(?P<colour>\d{1,3},\d{1,3},\d{1,3})?:")
_NO_CLASS, _BACKGROUND = "__ignore__", "_background_"  # labelme's words; matplotlib's legends leave out names with _


class OwnNames(NamedTuple):
    """The classes of a data set by name, their red, green and blue in label maps if the file has them, and the file."""

    names: tuple[str, ...]
    colours: tuple[tuple[int, ...], ...]
    file: Path


def class_name(name: str) -> str:
    """The name of a class as reports, drawings and files show it: composed, of printable characters."""
    return composed(printable(name))


def distinct(names: Iterable[str]) -> tuple[str, ...]:
    """Names of classes, of which later ones get a number where an earlier one has their name: results are by name."""
    times: Counter[str] = Counter()
    unique: list[str] = []
    for name in map(class_name, names):
        times[name] += 1
        unique.append(name if times[name] == 1 else f"{name} ({times[name]})")
    return tuple(unique)


def own_names(folder: Path) -> OwnNames | None:
    """The classes that a data set names itself, in the order of their labels; None where it has no file of names.

    Raises DataError for a file that cannot be read.
    """
    file = next((path for name in NAMES_FILES if (path := folder / name).is_file()), None)
    if file is None:
        return None
    lines = [line.strip() for line in read_text(file).splitlines()]
    coloured = [_COLOURED.match(line) for line in lines if line and not line.startswith("#")]
    if coloured and all(coloured):
        rows = [match.group("name", "colour") for match in coloured if match]
        colours = tuple(tuple(map(int, colour.split(","))) for _, colour in rows if colour)
        return OwnNames(distinct(name for name, _ in rows), colours if len(colours) == len(rows) else (), file)
    names = (line.replace(_BACKGROUND, "background") for line in lines if line and line != _NO_CLASS)
    return OwnNames(distinct(names), (), file)
