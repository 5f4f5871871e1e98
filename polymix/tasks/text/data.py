"""Where text comes from: files, folders, parquet, Python's own library."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from polymix.errors import DataError, MissingExtraError
from polymix.tasks.text.corpus import prose

BORDER = "<|endoftext|>"  # between the documents of one file, as such files are handed around
_TEXT, _PARQUET, _SHARDS = (".txt", ".md"), (".parquet",), (".bin",)


@dataclass(frozen=True)
class Source:
    """Files of one kind, "text", "parquet" or "shards", in a fixed order; or "library", which has none."""

    kind: str
    files: tuple[Path, ...] = ()
    column: str = "text"

    def documents(self) -> Iterator[str]:
        """The same at every call; none is empty. Raises DataError where a file cannot be read."""
        if self.kind == "library":
            yield from _library()
        for path in self.files:
            for text in _rows(path, self.column) if self.kind == "parquet" else _split(path):
                if text.strip():
                    yield text

    def mark(self) -> list[Any]:
        """What differs between sources of other content: names, sizes and times of the files."""
        if self.kind == "library":
            return [self.kind, sys.version]
        stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in self.files]
        return [self.kind, self.column, *map(list, stats)]


def find_source(data: str | None, column: str) -> Source:
    """Raises DataError: nothing there, no file of a kind that is known, or empty ones."""
    if data is None:
        return Source("library")
    root = Path(data)
    kinds = {"shards": _SHARDS, "parquet": _PARQUET, "text": _TEXT}
    allowed = "a .txt, .md, .parquet or .bin file, or a folder of one of these kinds"
    if not root.exists():
        raise DataError("data", f"{root}, which does not exist", allowed, "Leave it out for Python's own prose.")
    if root.is_file():
        kind = next((kind for kind, ends in kinds.items() if root.suffix.lower() in ends), "text")
        files = [root]
    else:
        below = [path for path in sorted(root.rglob("*")) if path.is_file() and not path.name.startswith(".")]
        found = {kind: [p for p in below if p.suffix.lower() in ends] for kind, ends in kinds.items()}
        kind, files = next(((kind, paths) for kind, paths in found.items() if paths), ("", []))
        others = [other for other, paths in found.items() if paths and other != kind and other != "text"]
        if not kind:
            got = f"{root} with {len(below)} files, none of them text"
            raise DataError("data", got, "*.txt, *.md, *.parquet or *.bin below it", "Rename the files.")
        if others:
            raise DataError("data", f"{root} with {kind} and {others[0]}", "files of one kind", "Name one folder.")
    for path in files:
        if not path.stat().st_size:
            raise DataError("data", f"{path}, which is empty", "files with something in them", "Remove it.")
    return Source(kind, tuple(files), column)


def held_out(document: str, share: float) -> bool:
    """The same for a text wherever it stands, so that a repeated one is never on both sides."""
    digest = hashlib.sha256(document.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


@cache
def _library() -> tuple[str, ...]:
    return tuple(prose())


def _split(path: Path) -> Iterator[str]:
    try:
        yield from path.read_text("utf-8").split(BORDER)
    except UnicodeDecodeError as error:
        got = f"{path}, which is not UTF-8 at byte {error.start}"
        raise DataError("data", got, "text in UTF-8", "Convert it, for example with iconv.") from error


def _rows(path: Path, column: str) -> Iterator[str]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError("pyarrow", str(error), "pip install 'polymix[parquet]'", "Parquet needs it.") from error
    try:
        file = pyarrow.parquet.ParquetFile(path)
        names = file.schema_arrow.names
        if column not in names:
            raise DataError("column", repr(column), f"one of {', '.join(names)} in {path}", "Set column.")
        if not pyarrow.types.is_string(of := file.schema_arrow.field(column).type) and str(of) != "large_string":
            raise DataError("column", f"{column} of {of} in {path}", "a column of text", "Set column.")
        for batch in file.iter_batches(columns=[column], batch_size=1024):
            yield from (text for text in batch.column(0).to_pylist() if text)
    except (pyarrow.ArrowException, OSError) as error:
        got = f"{path}, which cannot be read ({type(error).__name__})"
        raise DataError("data", got, "parquet files", "Write it anew.") from error
