"""The one cache of synthetic and prepared data: a folder for each set of settings, written whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from polymix.files import PART, write_whole, writing

MAX_VERSIONS = 8  # of one kind of data in one folder: the seeds of a comparison, and little more
SETTINGS_FILE = "synthetic.json"


def cached(folder: Path, name: str, settings: Mapping[str, Any], write: Callable[[Path], Any]) -> Path:
    """The folder with the data of these settings, which `write` fills where it is not there yet.

    The name of the folder holds a checksum of all settings, so that another seed or size never finds these data. It
    gets its name when it is complete: a killed process leaves nothing that a later one would take for data. Where
    several processes write the same data, the first to finish wins. Where a file is missing or has another size, all
    are written again. Of the same name, the 8 used last are kept.

    Args:
        folder: where such data lie; it is created.
        name: what they are, the beginning of the folder's name: "digits".
        settings: everything that the data depend on, the seed above all, as JSON holds it.
        write: called with an empty folder.
    Raises:
        OSError: the disk is full.
    """
    text = json.dumps(settings, sort_keys=True)
    place = folder / f"{name}-{zlib.crc32(text.encode()):08x}"
    if _is_whole(place, text):
        os.utime(place / SETTINGS_FILE)  # used last, now
        return place
    with writing(place):
        folder.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(dir=folder, prefix=f".{name}-", suffix=PART))
    try:
        with writing(place, part):
            part.chmod(0o755)
            write(part)
            write_whole(part / SETTINGS_FILE, json.dumps({"settings": text, "bytes": _sizes(part)}) + "\n")
        try:
            part.rename(place)
        except OSError:  # another process has finished first, or something has damaged what was there
            if not _is_whole(place, text):
                _remove(place)
                part.rename(place)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    _remove_oldest(folder, name, place)
    return place


def _is_whole(place: Path, settings: str) -> bool:
    """Whether a folder holds all files that were written into it with these settings, by their sizes."""
    try:
        content = json.loads((place / SETTINGS_FILE).read_text("utf-8"))
        return bool(content == {"settings": settings, "bytes": _sizes(place)})
    except (OSError, ValueError, RecursionError):
        return False


def _sizes(place: Path) -> dict[str, int]:
    """The bytes of each file below a folder, but for the one that says so."""
    files = (path for path in sorted(place.rglob("*")) if path.is_file() and path.name != SETTINGS_FILE)
    return {path.relative_to(place).as_posix(): path.stat().st_size for path in files}


def _remove_oldest(folder: Path, name: str, place: Path) -> None:
    """Delete all versions but the one in use and those used last."""
    ages = []
    for stamp in folder.glob(f"{name}-????????/{SETTINGS_FILE}"):
        try:
            ages.append((stamp.stat().st_mtime_ns, stamp.parent))
        except OSError:  # another process deletes it
            continue
    for _, old in sorted(ages)[:-MAX_VERSIONS]:
        if old != place:
            _remove(old)


def _remove(place: Path) -> None:
    with suppress(OSError):
        (place / SETTINGS_FILE).unlink()  # first, so that nobody takes what is left for data
    shutil.rmtree(place, ignore_errors=True)
