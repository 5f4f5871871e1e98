"""The series of a file or a folder, of any format that is known."""

from __future__ import annotations

from pathlib import Path

from polymix.errors import DataError
from polymix.train.data.problems import Problems
from polymix.train.data.series.archives import read_tsf
from polymix.train.data.series.installed import INSTALLED, read_installed
from polymix.train.data.series.tables import is_m4, read_m4, read_table
from polymix.train.data.series.times import Series

LAYOUTS = ("tables", "m4", "tsf")
TABLES = (".csv", ".tsv", ".txt", ".parquet", ".pq")


def read(source: str, layout: str | None, problems: Problems) -> list[Series]:
    """The series of a file or folder. What cannot be used is noted. Raises DataError: there is nothing to read."""
    if source in INSTALLED and not Path(source).exists():
        return read_installed(source)
    path = Path(source)
    if path.is_dir() and layout in (None, "m4") and is_m4(path):
        return read_m4(path, problems)
    if layout == "m4":
        allowed = "a folder with Train/*-train.csv and Test/*-test.csv"
        raise DataError(
            "data", f"{source}, which is no folder of M4's layout", allowed, "Check the path or the layout."
        )
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    endings = (".tsf",) if layout == "tsf" else TABLES if layout == "tables" else (*TABLES, ".tsf")
    files = [file for file in files if file.suffix.lower() in endings]
    if not files or not path.exists():
        what = f"with no file {', '.join(endings)}" if path.is_dir() else "which is no such file"
        got = f"{source}, {what if path.exists() else 'which does not exist'}"
        raise DataError("data", got, f"files {', '.join(endings)}, or a folder of M4's layout", "Check the path.")
    series: list[Series] = []
    for file in files:
        with problems.noting():
            if file.suffix.lower() == ".tsf":
                series += read_tsf(file, problems)
            elif (one := read_table(file, problems)) is not None:
                series.append(one)
    return series


def read_file(file: Path) -> list[Series]:
    """The series of one file of any format. Raises DataError: the first of its problems."""
    problems = Problems()
    series = read(str(file), None, problems)
    problems.settle()
    return series
