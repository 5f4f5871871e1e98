"""Token shards on disk: mapped into memory, checked, never read whole."""

from __future__ import annotations

import mmap
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from polymix.errors import DataError

SMALL = 2**16  # tokens that two bytes tell apart
_CHUNK = 2**22


def width(vocab: int) -> int:
    """Bytes a token: 2, as nanoGPT has them, or 4."""
    return 2 if vocab <= SMALL else 4


class Tokens:
    """Tokens `start` to `stop` of files that stand behind one another, little-endian without a header.

    tokens[i:j] is a tensor of int64; the files are mapped, so that the rest of them stays on disk.
    Raises DataError: files that are empty, or of an odd length.
    """

    def __init__(self, files: Sequence[Path], bytes_each: int = 2, start: int = 0, stop: int | None = None) -> None:
        self.files, self.bytes_each = tuple(files), bytes_each
        self.maps, sizes = [], []
        for path in self.files:
            size = path.stat().st_size
            if not size:
                raise DataError("data", f"{path}, which is empty", "shards with tokens in them", "Remove it.")
            if size % bytes_each:
                got = f"{path} with {size} bytes"
                raise DataError("data", got, f"a multiple of {bytes_each}", "It was cut, or is no such shard.")
            with path.open("rb") as file:
                self.maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            sizes.append(size // bytes_each)
        self.ends = list(accumulate(sizes))
        self.start, self.stop = start, self.ends[-1] if stop is None else stop

    def __len__(self) -> int:
        return self.stop - self.start

    def part(self, start: int, stop: int) -> Tokens:
        """A stretch of these, of the same files."""
        return Tokens(self.files, self.bytes_each, self.start + start, self.start + stop)

    def __getitem__(self, place: slice) -> Tensor:
        start, stop, _ = place.indices(len(self))
        start, stop, pieces = start + self.start, stop + self.start, []
        while start < stop:
            file = bisect_right(self.ends, start)
            before = self.ends[file - 1] if file else 0
            pieces.append(self._read(file, start - before, min(stop, self.ends[file]) - before))
            start = self.ends[file]
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64)

    def _read(self, file: int, start: int, stop: int) -> Tensor:
        read = bytearray(self.maps[file][start * self.bytes_each : stop * self.bytes_each])
        return torch.frombuffer(read, dtype=torch.uint16 if self.bytes_each == 2 else torch.int32).to(torch.int64)

    def check(self, vocab: int) -> None:
        """DataError that names the first token of a file that a vocabulary does not have."""
        for number, path in enumerate(self.files):
            tokens = len(self.maps[number]) // self.bytes_each
            for start in range(0, tokens, _CHUNK):
                chunk = self._read(number, start, min(start + _CHUNK, tokens))
                wrong = (chunk >= vocab) | (chunk < 0)
                if wrong.any():
                    at = int(wrong.int().argmax())
                    got = f"{path} with token {int(chunk[at])} at place {start + at}"
                    cure = "The shard is damaged, or of another tokenizer; set vocab to that of its own."
                    raise DataError("data", got, f"tokens below vocab={vocab}", cure)


def shards_of(files: Sequence[Path], held_out: float) -> tuple[Tokens, Tokens]:
    """(to train on, held out): `val*.bin` among the files or beside a single one; else the tail of the tokens."""
    beside = sorted(files[0].parent.glob("val*.bin")) if len(files) == 1 else []
    own = [path for path in files if path.name.startswith("val")] or [path for path in beside if path != files[0]]
    rest = [path for path in files if path not in own]
    if own and rest:
        return Tokens(rest), Tokens(own)
    return tail(Tokens(files), held_out)


def tail(tokens: Tokens, share: float) -> tuple[Tokens, Tokens]:
    """All but the last `share`, and that."""
    cut = len(tokens) - max(2, round(share * len(tokens)))
    return tokens.part(0, max(cut, 0)), tokens.part(max(cut, 0), len(tokens))


def write(path: Path, pieces: Iterable[Sequence[int]], bytes_each: int) -> int:
    """Beside its place, then renamed; how many tokens it has."""
    part, count = path.with_name(f".{path.name}.part"), 0
    try:
        with part.open("wb") as file:
            for piece in pieces:
                ids = array("H" if bytes_each == 2 else "i", piece)
                ids.tofile(file)
                count += len(ids)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return count
