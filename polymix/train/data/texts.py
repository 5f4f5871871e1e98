"""The one reader of text files and of names in them, for every domain: UTF-8, one kind of line ends, one Unicode form.

The same word may be stored composed ("é") or decomposed ("e" and a combining accent): Unicode's forms NFC and NFD.
polymix reads everything as NFC, so that a word has one spelling in alphabets, class names and error rates.
"""

from __future__ import annotations

import os
import unicodedata
from functools import lru_cache
from pathlib import Path

from polymix import files
from polymix.errors import DataError, reason_of


def composed(text: str) -> str:
    """The text in Unicode's composed form, NFC."""
    return unicodedata.normalize("NFC", text)


def read_text(path: Path, argument: str = "data") -> str:
    """The composed text of a file in UTF-8, with or without a byte-order mark, with "\\n" for any line end.

    Raises DataError about `argument`: it cannot be read or is not UTF-8.
    """
    return _read(path, argument, "strict")


def read_names(path: Path, argument: str = "data") -> str:
    """The text of a list of files' names, as `read_text` gives it, but names that are not UTF-8 as paths have them.

    They are not composed: `named_file` finds the file of a name in either form.
    """
    return _read(path, argument, "surrogateescape", whole=False)


def _read(path: Path, argument: str, errors: str, whole: bool = True) -> str:
    try:
        text = files.read_text(path, "utf-8-sig", errors)  # in text mode, which knows any line end
    except UnicodeDecodeError as error:
        got = f"{path}, which is not UTF-8 at byte {error.start}"
        raise DataError(argument, got, "text in UTF-8", "Convert the file, for example with iconv.") from error
    except OSError as error:
        raise DataError(argument, f"{path}: {reason_of(error)}", "a readable file", "Check the path.") from error
    return composed(text) if whole else text


def named_file(folder: Path, name: str) -> Path:
    """The file of a name below a folder, also where the disk has the name in another Unicode form."""
    path = folder / name
    if name.isascii() or os.path.lexists(path):
        return path
    here = folder
    for part in Path(name).parts:
        if not os.path.lexists(here / part) and here.is_dir():
            part = _names_in(here, here.stat().st_mtime_ns).get(composed(part), part)
        here = here / part
    return here


@lru_cache(maxsize=64)
def _names_in(folder: Path, changed: int) -> dict[str, str]:
    """The names in a folder by their composed form. changed: when a file was last added to the folder."""
    return {composed(name): name for name in os.listdir(folder)}
