"""Which clips a folder has, with their texts: LibriSpeech, Common Voice, or audio files with a txt beside each."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from polymix.errors import DataError
from polymix.train.data.audio import AUDIO
from polymix.train.data.problems import Problems
from polymix.train.data.splits import HELD_OUT, TRAINING, held_out, natural
from polymix.train.data.texts import named_file, read_text

_NOT_PLAIN = re.compile(r"[^\w' ]|_")
MISSING = "a text without audio"
Parts = dict[str, list["Clip"]]  # by "train", "val" and "test"


@dataclass(frozen=True)
class Clip:
    """An audio file, its text, where that stands, and who speaks, as far as it is known."""

    path: Path
    text: str
    entry: str
    speaker: str = ""


def find_audio(folder: Path) -> list[Path]:
    """The audio files in a folder and below it, in the order of their numbers. Raises DataError: there are none."""
    paths = sorted(
        (path for path in _files(folder) if path.suffix.lower() in AUDIO), key=lambda path: natural(str(path))
    )
    if not paths:
        raise DataError("files", f"{folder} without audio", f"files such as {', '.join(sorted(AUDIO))}", "Check it.")
    return paths


def plain(text: str) -> str:
    """A text in small letters, digits and apostrophes, with one space between words."""
    return " ".join(_NOT_PLAIN.sub(" ", text.lower().replace("’", "'")).split())


def find_clips(folder: Path, layout: str | None, texts: bool, problems: Problems) -> Parts:
    """The clips of a folder by part; what belongs to no part is split by speakers, or else every fifth is for the test.

    Args:
        layout: one of LAYOUTS; None: the one whose files are there. texts: whether clips need one.
    Raises:
        DataError: there is no such folder or layout, or no clip and no problem either.
    """
    if not folder.is_dir():
        raise DataError("data", f"{folder}, which is no folder", "a folder of speech", "Check the path.")
    if layout is None:
        has = {"librispeech": any(folder.rglob("*.trans.txt")), "commonvoice": any(folder.glob("*.tsv"))}
        layout = next((name for name, there in has.items() if there), "folder")
    if layout not in LAYOUTS:
        raise DataError("layout", repr(layout), ", ".join(LAYOUTS), "Choose one, or leave it out.")
    parts = LAYOUTS[layout](folder, texts, problems)
    if not any(parts.values()) and not problems:
        got = f"{folder} without clips in the layout {layout}"
        raise DataError("data", got, f"audio ({', '.join(sorted(AUDIO))}) with texts", "Check the path.")
    loose = parts.pop("", [])
    if loose:
        speakers = sorted({clip.speaker for clip in loose}, key=natural)
        seen = set(held_out(speakers)[0])
        train = [clip for clip in loose if clip.speaker in seen]
        if not train or not seen:
            train, test = held_out(loose)
        else:
            test = [clip for clip in loose if clip.speaker not in seen]
        parts = {"train": [*parts.get("train", []), *train], "val": parts.get("val", []),
                 "test": [*parts.get("test", []), *test]}  # fmt: skip
    val, test = parts.get("val", []), parts.get("test", [])
    return {"train": parts.get("train", []), "val": val if test else [], "test": test or val}


def _part_of(name: str) -> str:
    """train, val or test by the name of a folder or list, such as train-clean-100 or dev; "" for another."""
    first = re.split(r"[-_.]", name.lower())[0]
    if first in TRAINING:
        return "train"
    return "val" if first in ("dev", "val", "valid", "validation") else "test" if first in HELD_OUT else ""


def _librispeech(folder: Path, texts: bool, problems: Problems) -> Parts:
    """PART/SPEAKER/CHAPTER/SPEAKER-CHAPTER.trans.txt, a line "ID TEXT" for each ID.flac beside it; PART may lack."""
    parts: Parts = {}
    for listing in sorted(folder.rglob("*.trans.txt"), key=lambda path: natural(str(path))):
        named = {}
        with problems.noting():
            named = dict(line.partition(" ")[::2] for line in read_text(listing).splitlines() if line.strip())
        audio = {path.stem: path for path in listing.parent.iterdir() if path.suffix.lower() in AUDIO}
        above = (_part_of(name) for name in listing.relative_to(folder).parts[:-1])
        part = next((name for name in above if name), "")
        for name, text in named.items():
            if name not in audio:
                problems.add(listing, name, MISSING)
            elif _has_text(text, listing, name, texts, problems):
                entry = f"{listing}: {name}"
                parts.setdefault(part, []).append(Clip(audio[name], text.strip(), entry, name.split("-")[0]))
        for name in sorted({*audio} - {*named}):
            problems.add(audio[name], "", f"audio without a text in {listing.name}")
    return parts


def _common_voice(folder: Path, texts: bool, problems: Problems) -> Parts:
    """train.tsv, dev.tsv and test.tsv with the columns path and sentence, and audio in clips/; other lists without."""
    lists = {path: _part_of(path.stem) for path in sorted(folder.glob("*.tsv"))}
    if any(lists.values()):  # validated.tsv and others repeat what these have
        lists = {path: part for path, part in lists.items() if part}
    parts: Parts = {}
    for listing, part in lists.items():
        rows: list[dict[str, str]] = []
        with problems.noting():
            rows = list(csv.DictReader(StringIO(read_text(listing)), delimiter="\t", quoting=csv.QUOTE_NONE))
        for line, row in enumerate(rows, 2):
            name, text = row.get("path"), row.get("sentence")
            if not name or text is None:
                problems.add(listing, f"line {line}", "no path or no sentence: the first line must name these columns")
                break
            place = named_file(folder / "clips", name)
            if not place.is_file():
                problems.add(listing, f"line {line}", f"{MISSING}: clips/{name}")
            elif _has_text(text, listing, f"line {line}", texts, problems):
                clip = Clip(place, text.strip(), f"{listing}: line {line}", row.get("client_id") or "")
                parts.setdefault(part, []).append(clip)
    return parts


def _folder(folder: Path, texts: bool, problems: Problems) -> Parts:
    """Audio files anywhere, NAME.txt with its text beside each; in train/ and test/, or else for both."""
    parts: Parts = {}
    files = sorted(_files(folder), key=lambda path: natural(str(path)))
    for path in (path for path in files if path.suffix.lower() in AUDIO):
        place = path.with_suffix(".txt")
        if texts and not place.is_file():
            problems.add(path, "", f"audio without a text: there is no {place.name}")
            continue
        with problems.noting():
            text = " ".join(read_text(place).split()) if texts else ""
            if _has_text(text, place, "", texts, problems):
                part = _part_of(path.relative_to(folder).parts[0]) if path.parent != folder else ""
                parts.setdefault(part, []).append(Clip(path, text, str(path)))
    spoken = {path.with_suffix("") for path in files if path.suffix.lower() in AUDIO}
    for path in files if texts else ():
        if path.suffix.lower() == ".txt" and path.with_suffix("") not in spoken:
            problems.add(path, "", MISSING)
    return parts


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))


def _has_text(text: str, file: Path, entry: str, texts: bool, problems: Problems) -> bool:
    if texts and not text.strip():
        problems.add(file, entry, "an empty text")
    return not texts or bool(text.strip())


LAYOUTS: dict[str, Callable[[Path, bool, Problems], Parts]] = {
    "librispeech": _librispeech, "commonvoice": _common_voice, "folder": _folder,
}  # fmt: skip
