"""The text formats of the archives: .tsf (Monash: forecasts), .ts (UCR and UEA: classes), and UCR's rows of numbers."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import numpy

from polymix.errors import DataError
from polymix.files import regular
from polymix.train.data.problems import Problems
from polymix.train.data.series.tables import LARGEST, MISSING
from polymix.train.data.series.times import Array, Series
from polymix.train.data.texts import read_text

# By @frequency: the clock's step, and the steps of a season.
FREQUENCIES = {
    "4_seconds": (4, "s", 900), "minutely": (60, "s", 1440), "10_minutes": (600, "s", 144),
    "15_minutes": (900, "s", 96), "half_hourly": (1800, "s", 48), "hourly": (3600, "s", 24),
    "daily": (86400, "s", 7), "weekly": (604800, "s", 52), "monthly": (1, "M", 12), "quarterly": (3, "M", 4),
    "yearly": (12, "M", 1),
}  # fmt: skip
CLASS_FILES = (".ts", ".tsv", ".txt")
Labelled = tuple[Array, str]  # values (T, V), class


def read_tsf(path: Path, problems: Problems) -> list[Series]:
    """The series of a .tsf file: "name:start:1,2,?,…" after a head of @attribute lines and @data."""
    head, body = _parts(path, problems)
    attributes = [words[1:] for words in head if words[0] == "@attribute" and len(words) == 3]
    frequency = next((words[1] for words in head if words[0] == "@frequency" and len(words) == 2), None)
    if frequency is not None and frequency not in FREQUENCIES:
        problems.add(path, "@frequency", f"{frequency}, which is none of {', '.join(FREQUENCIES)}")
        return []
    count, unit, season = FREQUENCIES.get(frequency or "", (1, "s", None))
    series: list[Series] = []
    for line, text in body:
        cells = text.split(":")
        values = _numbers(cells[-1])
        if len(cells) != len(attributes) + 1 or values is None or not numpy.isfinite(values).any():
            problems.add(path, f"line {line}", f"not {len(attributes)} attributes and numbers, with colons between")
            continue
        named = {name: (kind, cell) for (name, kind), cell in zip(attributes, cells, strict=False)}
        name = named.get("series_name", ("", f"series{len(series) + 1}"))[1]
        start = next((cell for kind, cell in named.values() if kind == "date"), None)
        begins: Any = None
        step: Any = None
        if start is not None and frequency is not None:
            try:
                begins = numpy.datetime64(datetime.strptime(start, "%Y-%m-%d %H-%M-%S"), "s")
            except ValueError:
                problems.add(path, f"line {line}", f"{start} is no time such as 2026-11-30 13-00-00")
                continue
            begins, step = begins.astype(f"datetime64[{unit}]"), numpy.array(count, f"timedelta64[{unit}]")[()]
        series.append(Series(name, values[:, None], ("value",), begins, step, season=season))
    return series


def read_ts(path: Path, problems: Problems) -> list[Labelled]:
    """The series of a .ts file with their classes: "1,2,3:4,5,6:class", a part for each variable."""
    head, body = _parts(path, problems)
    labels = next((words[1:] for words in head if words[0] == "@classlabel"), [])
    if labels[:1] != ["true"] and body:
        problems.add(path, "@classLabel", "not true: the series have no classes")
        return []
    rows, width = [], None
    for line, text in body:
        *parts, label = text.split(":")
        columns = [_numbers(part) for part in parts]
        width = len(columns) if width is None else width
        known = [column for column in columns if column is not None and len(column)]
        if len(known) != width or not width or not label.strip() or not numpy.isfinite(known[0]).any():
            problems.add(path, f"line {line}", f"not {width} variables of numbers and a class, with colons between")
            continue
        values = numpy.full((max(map(len, known)), width), numpy.nan)  # variables may have different lengths
        for place, column in enumerate(known):
            values[: len(column), place] = column
        rows.append((values, label.strip()))
    return rows


def read_rows(path: Path, problems: Problems) -> list[Labelled]:
    """The series of a file of UCR with their classes, one a row: its class, then its numbers, with tabs or spaces."""
    rows = []
    for line, text in enumerate(read_text(regular(path)).splitlines(), 1):
        if cells := text.replace(",", " ").split():
            label, values = _numbers(cells[0]), _numbers(",".join(cells[1:]))
            if label is None or not numpy.isfinite(label[0]) or values is None or not numpy.isfinite(values).any():
                problems.add(path, f"line {line}", "not the number of a class and numbers")
                continue
            last = int(numpy.flatnonzero(numpy.isfinite(values))[-1])  # shorter series end with NaN
            rows.append((values[: last + 1, None], f"{label[0]:g}"))
    if not rows and not problems:
        problems.add(path, "", "empty")
    return rows


def read_classes(source: str, problems: Problems) -> tuple[list[Labelled], list[Labelled]]:
    """Series with classes: those of NAME_TRAIN and of NAME_TEST, or all and none where the names do not say it.

    source: a folder, or one of the files. Raises DataError: there are none, or several data sets.
    """
    path = Path(source)
    files = [file for file in sorted(path.iterdir()) if file.is_file()] if path.is_dir() else [path]
    files = [file for file in files if file.is_file() and file.suffix.lower() in CLASS_FILES]
    if not path.is_dir() and files and path.stem.endswith(("_TRAIN", "_TEST")):
        pair = [path.with_stem(f"{path.stem.rpartition('_')[0]}_{part}") for part in ("TRAIN", "TEST")]
        files = [file for file in pair if file.is_file()]
    if path.is_dir():  # the archive has the same series as .ts and .tsv
        files = next((some for ending in CLASS_FILES if (some := [f for f in files if f.suffix.lower() == ending])), [])
    parts = {part: [file for file in files if file.stem.endswith(f"_{part}")] for part in ("TRAIN", "TEST")}
    train, test = parts["TRAIN"], parts["TEST"]
    if not train or not test:
        train, test = files, []
    if not files or (len(train) > 1 and test):
        got = f"{source}, with {len(train)} data sets" if files else f"{source}, with no file {', '.join(CLASS_FILES)}"
        got = got if path.exists() else f"{source}, which does not exist"
        allowed = "the files NAME_TRAIN.ts and NAME_TEST.ts of one data set"
        raise DataError("data", got, allowed, "Pass one of its files.")
    both = []
    for some in (train, test):
        rows: list[Labelled] = []
        for file in some:
            with problems.noting():
                rows += (read_ts if file.suffix.lower() == ".ts" else read_rows)(file, problems)
        both.append(rows)
    return both[0], both[1]


def _parts(path: Path, problems: Problems) -> tuple[list[list[str]], list[tuple[int, str]]]:
    """The words of each line of the head, in lower case, and the lines of data with their numbers."""
    head: list[list[str]] = []
    body: list[tuple[int, str]] = []
    started = False
    for number, line in enumerate(read_text(regular(path)).splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        if started:
            body.append((number, text))
        elif text.lower() == "@data":
            started = True
        elif text.startswith("@"):
            head.append(text.lower().split())
    if not body:
        problems.add(path, "", "no line after @data" if started else "no line @data")
    return head, body


def _numbers(text: str) -> Array | None:
    """Numbers with commas between them, NaN for "?"; None: one is none."""
    cells = [cell.strip() for cell in text.split(",")]
    try:
        values = numpy.array([numpy.nan if cell.lower() in MISSING else float(cell) for cell in cells], numpy.float64)
    except ValueError:
        return None
    values[~(numpy.abs(values) < LARGEST)] = numpy.nan
    return values
