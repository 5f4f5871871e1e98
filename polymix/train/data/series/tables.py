"""Tables of series: csv in any of its dialects, Parquet, ETT's files, and M4's, which have a series a row."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy

from polymix.errors import DataError, one_line, shown
from polymix.extras import needs
from polymix.files import regular
from polymix.train.data.problems import Problems
from polymix.train.data.series.times import EXAMPLE, Array, Series, on_clock, parse_time
from polymix.train.data.splits import natural
from polymix.train.data.texts import read_text

TIMES = ("date", "time", "timestamp", "datetime", "ds", "utc", "date_time", "time_hour")  # names of columns of times
MISSING = frozenset(("", "na", "n/a", "nan", "null", "none", "?", "-"))
DELIMITERS = ",;\t|"
MAX_PROBLEMS = 20  # of one file
LARGEST = 1e30  # of a number: float32 has no squares of larger ones
# ETT: 12, 4 and 4 months of 30 days, the rest unused (Zhou et al. 2021, data_loader.py).
ETT_MONTHS = (12, 16, 20)
M4_SEASONS = {"Hourly": 24, "Daily": 1, "Weekly": 1, "Monthly": 12, "Quarterly": 4, "Yearly": 1}  # M4's own


# A file of the UCR Anomaly Archive: its name ends with the steps of the training, and the anomaly's first and last.
UCR_ANOMALY = re.compile(r"UCR_Anomaly_.*_(\d+)_(\d+)_(\d+)$")
UCR_VALIDATION = 5  # of the training steps of such a file, every fifth is the validation part, at its end
LABELS = ("is_anomaly", "anomaly", "label", "labels", "outlier", "is_outlier", "attack")  # names of columns


def read_table(path: Path, problems: Problems) -> Series | None:
    """The series of a csv or Parquet file; None, with problems: it has none. A file named ETT… has that layout."""
    if (match := UCR_ANOMALY.search(path.stem)) is not None:
        train, first, last = map(int, match.groups())
        return _ucr_anomaly(path, train, first, last, problems)
    series = _parquet(path, problems) if path.suffix.lower() in (".parquet", ".pq") else _csv(path, problems)
    if series is None or not re.match(r"ETT[hm]\d", path.name):
        return series
    month = 30 * 24 * (4 if path.name[3] == "m" else 1)
    learnt, val, test = (months * month for months in ETT_MONTHS)
    if len(series) < test:
        problems.add(path, "", f"{len(series):,} rows, where ETT's split needs {test:,}")
        return None
    return Series(series.name, series.values[:test], series.variables, series.start, series.step, (learnt, val))


def _ucr_anomaly(path: Path, train: int, first: int, last: int, problems: Problems) -> Series | None:
    cells = read_text(regular(path)).split()
    numbers = [_number(cell, ",") for cell in cells]
    if None in numbers:
        problems.add(path, f"number {numbers.index(None) + 1}", f"{shown(cells[numbers.index(None)])} is no number")
        return None
    if not 0 < train < first <= last <= len(numbers):  # steps are counted from 1
        problems.add(path, "", f"{len(numbers):,} numbers, which do not fit the steps in its name")
        return None
    labels = numpy.zeros(len(numbers))
    labels[first - 1 : last] = 1
    ends = (train - train // UCR_VALIDATION, train)
    return Series(path.stem, numpy.array(numbers, numpy.float64)[:, None], ("value",), ends=ends, labels=labels)


def with_labels(series: Series) -> Series:
    """A series whose column of labels, if it has one, is no variable but says which steps are anomalies."""
    place = next((place for place, name in enumerate(series.variables) if name.lower() in LABELS), None)
    if place is None:
        return series
    others = [other for other in range(len(series.variables)) if other != place]
    labels = (numpy.nan_to_num(series.values[:, place]) != 0).astype(numpy.float64)
    names = tuple(series.variables[other] for other in others)
    return replace(series, values=series.values[:, others], variables=names, labels=labels)


def _csv(path: Path, problems: Problems) -> Series | None:
    text = read_text(regular(path))
    head = text.partition("\n")[0]
    delimiter = max(DELIMITERS, key=head.count)
    try:
        rows = [row for row in csv.reader(text.splitlines(), delimiter=delimiter) if row]
    except csv.Error as error:
        problems.add(path, "", f"no csv ({one_line(error)})")
        return None
    if rows and all(_number(cell, delimiter) is not None for cell in rows[0]):
        rows.insert(0, [f"v{place + 1}" for place in range(len(rows[0]))])  # no header
        first = 1
    else:
        first = 2
    if len(rows) < 2:
        problems.add(path, "", "no rows of numbers" if rows else "empty")
        return None
    names = [name.strip() or f"column{place + 1}" for place, name in enumerate(rows[0])]
    uneven = next((place for place, row in enumerate(rows) if len(row) != len(names)), None)
    if uneven is not None:
        problems.add(path, f"line {uneven + first - 1}", f"{len(rows[uneven])} cells, where the head has {len(names)}")
        return None
    columns: list[Sequence[str]] = list(zip(*rows[1:], strict=True))
    clock = _time_column(names, columns)
    times: list[datetime] | None = None
    steps = [] if clock is None else [_number(cell, delimiter) for cell in columns[clock]]
    if clock is not None and None not in steps and parse_time(columns[clock][0]) is None:
        apart = numpy.diff(numpy.array(steps, numpy.float64))
        if len(apart) and (apart[0] <= 0 or (apart != apart[0]).any()):
            place = int(numpy.argmax(apart != apart[0])) + 1
            text = f"{shown(columns[clock][place])} does not follow in steps of one length: write times as {EXAMPLE}"
            problems.add(path, f"line {place + first}", text)
            return None
        problems.note(path, "its times are numbers, so the clock is unknown")
    elif clock is not None:
        read = [parse_time(cell) for cell in columns[clock]]
        if None in read:
            place = read.index(None)
            got = f"{shown(columns[clock][place])} is no time that can be read: write it as {EXAMPLE}"
            problems.add(path, f"line {place + first}", got)
            return None
        times = [time for time in read if time is not None]
    before, kept = len(problems), [place for place in range(len(names)) if place != clock]
    values = numpy.full((len(rows) - 1, len(kept)), numpy.nan)
    for place, column in enumerate(kept):
        for line, cell in enumerate(columns[column]):
            number = _number(cell, delimiter)
            if number is None:
                if len(problems) - before < MAX_PROBLEMS:
                    what = f"{shown(cell)} in the column {names[column]} is no number below {LARGEST:g} in size"
                    problems.add(path, f"line {line + first}", what)
                number = numpy.nan
            values[line, place] = number
    if len(problems) > before:
        return None
    return _series(path, [names[place] for place in kept], values, times, problems, first)


def _number(cell: str, delimiter: str) -> float | None:
    """A cell as a number, NaN for what is missing; None: it is none. Without commas between cells they are decimal."""
    cell = cell.strip()
    if cell.lower() in MISSING:
        return numpy.nan
    try:
        value = float(cell.replace(",", ".") if delimiter != "," else cell)
    except ValueError:
        return None
    return value if abs(value) < LARGEST else None


def _time_column(names: Sequence[str], columns: Sequence[Sequence[str]]) -> int | None:
    named = [place for place, name in enumerate(names) if name.lower() in TIMES]
    if named:
        return named[0]
    return 0 if columns and parse_time(columns[0][0]) is not None and _number(columns[0][0], ",") is None else None


def _parquet(path: Path, problems: Problems) -> Series | None:
    with needs("parquet", "Parquet is read with it."):
        import pyarrow
        import pyarrow.parquet
    try:
        table = pyarrow.parquet.read_table(regular(path))
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        problems.add(path, "", f"cannot be read as Parquet ({type(error).__name__})")
        return None
    times: list[datetime] | None = None
    columns: dict[str, Any] = {}
    for field in table.schema:
        column = table.column(field.name)
        if pyarrow.types.is_timestamp(field.type) or pyarrow.types.is_date(field.type):
            read = [None if value is None else parse_time(value.isoformat()) for value in column.to_pylist()]
            if None in read:
                problems.add(path, f"row {read.index(None) + 1}", f"no time in the column {field.name}")
                return None
            times = [time for time in read if time is not None]
        elif pyarrow.types.is_floating(field.type) or pyarrow.types.is_integer(field.type):
            columns[field.name] = numpy.array(column.cast("float64").to_numpy(), numpy.float64)
        else:
            problems.add(path, "", f"the column {field.name} has {field.type}, and neither numbers nor times")
            return None
    values = numpy.stack(list(columns.values()), 1) if columns else numpy.zeros((0, 0))
    values[~(numpy.abs(values) < LARGEST)] = numpy.nan
    return _series(path, list(columns), values, times, problems, 1)


def _series(
    path: Path, names: list[str], values: Array, times: list[datetime] | None, problems: Problems, first: int
) -> Series | None:
    if not names or not len(values):
        problems.add(path, "", "no columns of numbers" if not names else "no rows")
        return None
    if len(set(names)) < len(names):
        problems.add(path, "", f"two columns of the name {next(name for name in names if names.count(name) > 1)}")
        return None
    empty = [name for place, name in enumerate(names) if not numpy.isfinite(values[:, place]).any()]
    if empty:
        problems.add(path, "", f"no number in the column {empty[0]}: remove it")
        return None
    if times is None:
        return Series(path.stem, values, tuple(names))
    return on_clock(path, path.stem, times, values, tuple(names), problems, first)


def is_m4(folder: Path) -> bool:
    """Whether a folder has M4's layout: files such as Train/Hourly-train.csv and Test/Hourly-test.csv."""
    return any(folder.glob("Train/*-train.csv")) or any(folder.glob("*-train.csv"))


def read_m4(folder: Path, problems: Problems) -> list[Series]:
    """The series of M4, each a row "id, value, value, …"; those of the test go on from those of the training."""
    series = []
    for file in sorted(
        {*folder.glob("Train/*-train.csv"), *folder.glob("*-train.csv")}, key=lambda path: natural(path.name)
    ):
        kind = file.name.partition("-")[0]
        beside = file.parent.parent / "Test" if file.parent.name == "Train" else file.parent
        tests = _m4_rows(beside / f"{kind}-test.csv", problems)
        for name, past in _m4_rows(file, problems).items():
            future = tests.get(name)
            if future is None or not len(future) or not len(past):
                problems.add(file, name, "no values of it in the files of training and test")
                continue
            values = numpy.concatenate((past, future))[:, None]
            ends = (len(past) - len(future), len(past))
            series.append(Series(name, values, ("value",), ends=ends, season=M4_SEASONS.get(kind, 1)))
    return series


def _m4_rows(file: Path, problems: Problems) -> dict[str, Array]:
    if not file.is_file():
        raise DataError("data", f"{file.parent} without {file.name}", "M4's files of training and test", "Add it.")
    rows = {}
    for place, row in enumerate(csv.reader(read_text(file).splitlines())):
        if place and row:
            numbers = [_number(cell, ",") for cell in row[1:] if cell.strip()]
            if None in numbers:
                problems.add(file, f"line {place + 1}", "a cell that is no number")
                continue
            rows[row[0].strip()] = numpy.array(numbers, numpy.float64)
    if not rows:
        problems.add(file, "", "no rows of numbers")
    return rows
