"""Tokens: shards of them on disk, mapped into memory, and the batches of each step."""

from __future__ import annotations

import mmap
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, count
from pathlib import Path

import torch
from torch import Tensor

from polymix.errors import DataError
from polymix.files import write_whole
from polymix.train.data.sampling import Slices, number
from polymix.train.task import IGNORED

MAX_TWO_BYTES = 2**16  # vocabularies up to here fit into two bytes
_CHUNK = 2**22
Batch = dict[str, Tensor]


def width(vocab: int) -> int:
    """Bytes per token: 2, as in nanoGPT's shards, or 4."""
    return 2 if vocab <= MAX_TWO_BYTES else 4


class Tokens:
    """Tokens `start` to `stop` of concatenated files, little-endian and without a header.

    tokens[i:j] is a tensor of int64. The files are memory-mapped, not read whole.
    Raises DataError: a file is empty, or its length is not a multiple of a token's bytes.
    """

    def __init__(self, files: Sequence[Path], bytes_each: int = 2, start: int = 0, stop: int | None = None) -> None:
        self.files, self.bytes_each = tuple(files), bytes_each
        self.maps, sizes = [], []
        for path in self.files:
            size = path.stat().st_size
            if not size:
                raise DataError("data", f"{path}, which is empty", "shards with tokens", "Remove the file.")
            if size % bytes_each:
                got = f"{path} with {size} bytes"
                raise DataError(
                    "data", got, f"a multiple of {bytes_each}", "The file was cut off, or is not a token shard."
                )
            with path.open("rb") as file:
                self.maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            sizes.append(size // bytes_each)
        self.ends = list(accumulate(sizes))
        self.borders: dict[int, Tensor] = {}
        self.start, self.stop = start, self.ends[-1] if stop is None else stop

    def __len__(self) -> int:
        return self.stop - self.start

    def part(self, start: int, stop: int) -> Tokens:
        """A stretch of these tokens, of the same files."""
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

    def places_of(self, token: int) -> Tensor:
        """Where a token stands. The files are read once for it."""
        if token not in self.borders:
            starts = range(0, len(self), _CHUNK)
            found = [(self[start : start + _CHUNK] == token).nonzero().flatten() + start for start in starts]
            self.borders[token] = torch.cat(found) if found else torch.empty(0, dtype=torch.int64)
        return self.borders[token]

    def _read(self, file: int, start: int, stop: int) -> Tensor:
        read = bytearray(self.maps[file][start * self.bytes_each : stop * self.bytes_each])
        return torch.frombuffer(read, dtype=torch.uint16 if self.bytes_each == 2 else torch.int32).to(torch.int64)

    def check(self, vocab: int) -> None:
        """DataError that names the first token outside a vocabulary, and its file."""
        for place, path in enumerate(self.files):
            tokens = len(self.maps[place]) // self.bytes_each
            for start in range(0, tokens, _CHUNK):
                chunk = self._read(place, start, min(start + _CHUNK, tokens))
                wrong = (chunk >= vocab) | (chunk < 0)
                if wrong.any():
                    at = int(wrong.int().argmax())
                    got = f"{path} with token {int(chunk[at])} at place {start + at}"
                    cure = "The shard is damaged, or from another tokenizer: set vocab to that tokenizer's size."
                    raise DataError("data", got, f"tokens below vocab={vocab}", cure)


def shards_of(files: Sequence[Path], held_out: float) -> tuple[Tokens, Tokens]:
    """Training and held-out tokens. Held out: `val*.bin` in the folder or next to a single file, or else the tail."""
    beside = sorted(files[0].parent.glob("val*.bin")) if len(files) == 1 else []
    own = [path for path in files if path.name.startswith("val")] or [path for path in beside if path != files[0]]
    rest = [path for path in files if path not in own]
    if own and rest:
        return Tokens(rest), Tokens(own)
    return tail(Tokens(files), held_out)


def tail(tokens: Tokens, share: float) -> tuple[Tokens, Tokens]:
    """The tokens without the last `share` of them, and that share."""
    cut = len(tokens) - max(2, round(share * len(tokens)))
    return tokens.part(0, max(cut, 0)), tokens.part(max(cut, 0), len(tokens))


def write(path: Path, pieces: Iterable[Sequence[int]], bytes_each: int) -> int:
    """Write a shard, whole or not at all. Returns its number of tokens."""
    count = 0

    def save(part: Path) -> None:
        nonlocal count
        with part.open("wb") as file:
            for piece in pieces:
                ids = array("H" if bytes_each == 2 else "i", piece)
                ids.tofile(file)
                count += len(ids)

    write_whole(path, save)
    return count


def cut(windows: Tensor, end: int | None) -> Batch:
    """Windows (B, N + 1) as inputs and targets. With `end`, the token that ends a document, also as packed segments.

    An end belongs to the document before it. The first token of a document is not a target.
    """
    inputs, targets = windows[:, :-1], windows[:, 1:]
    if end is None:
        return {"input_ids": inputs, "targets": targets}
    ends = inputs == end
    segments = ends.cumsum(1) - ends.long()
    return {"input_ids": inputs, "targets": targets.masked_fill(ends, IGNORED), "segment_ids": segments}


def pieces(tokens: Tokens, end: int, context: int) -> tuple[Tensor, Tensor]:
    """The starts of rows of up to context + 1 tokens, none of which leaves its document, and their lengths.

    A document is what ends with `end`. Of a longer one each row begins with the last token of the one before, so that
    every token but the first is a target once.
    """
    borders = torch.cat((torch.tensor([-1]), tokens.places_of(end), torch.tensor([len(tokens) - 1])))
    first, size = borders[:-1] + 1, borders.diff()
    first, size = first[size > 1], size[size > 1]  # a document of one token has no target
    if not len(size):
        raise DataError("data", "documents of one token each", "longer ones for packing=padded", "Check end_of_text.")
    rows = (size - 2) // context + 1
    offsets = torch.arange(int(rows.sum())) - (rows.cumsum(0) - rows).repeat_interleave(rows)
    starts = first.repeat_interleave(rows) + offsets * context
    return starts, ((first + size).repeat_interleave(rows) - starts).clamp_max(context + 1)


def padded(tokens: Tokens, starts: Tensor, lengths: Tensor, end: int, context: int) -> Batch:
    """Rows as inputs and targets of `context` tokens, padded with `end`.

    A model needs no mask for it: what is causal does not see what follows, and padding has no targets.
    """
    rows = torch.full((len(starts), context + 1), end)
    for row, start, length in zip(rows, starts.tolist(), lengths.tolist(), strict=True):
        row[:length] = tokens[start : start + length]
    padding = torch.arange(1, context + 1) >= lengths[:, None]
    return {"input_ids": rows[:, :-1], "targets": rows[:, 1:].masked_fill(padding, IGNORED)}


class Windows:
    """Batches of windows over a stream of tokens. Each epoch has another order and another start.

    Row r of all rows is window r mod n of epoch r div n, where n is the number of windows in an epoch.
    """

    def __init__(self, tokens: Tokens, context: int, batch: int, seed: int, end: int | None = None) -> None:
        self.tokens, self.context, self.batch, self.seed, self.end = tokens, context, batch, seed, end
        self.windows = max((len(tokens) - context) // context, 1)
        self.orders: dict[int, tuple[int, Tensor]] = {}

    def __call__(self, step: int) -> Batch:
        """The whole batch of a step."""
        rows = [self._row(step * self.batch + row) for row in range(self.batch)]
        return cut(torch.stack(rows), self.end)

    def epoch(self, step: int) -> float:
        """How often the text had been seen before a step."""
        return step * self.batch / self.windows

    def _row(self, row: int) -> Tensor:
        shift, order = self._order(row // self.windows)
        start = shift + int(order[row % self.windows]) * self.context
        return self.tokens[start : start + self.context + 1]

    def _order(self, epoch: int) -> tuple[int, Tensor]:
        if epoch not in self.orders:
            self.orders = {other: order for other, order in self.orders.items() if other == epoch - 1}
            generator = torch.Generator().manual_seed(number(self.seed, "windows", epoch))
            slack = max(len(self.tokens) - 1 - self.windows * self.context, 0)
            shift = int(torch.randint(slack + 1, (), generator=generator))
            self.orders[epoch] = shift, torch.randperm(self.windows, generator=generator)
        return self.orders[epoch]


class Documents(Windows):
    """The same with a document a row (`pieces`), padded with `end`. Each epoch has another order."""

    def __init__(self, tokens: Tokens, context: int, batch: int, seed: int, end: int) -> None:
        super().__init__(tokens, context, batch, seed)
        self.padding = end
        self.starts, self.lengths = pieces(tokens, end, context)
        self.windows = len(self.starts)

    def __call__(self, step: int) -> Batch:
        rows = range(step * self.batch, (step + 1) * self.batch)
        chosen = torch.tensor([int(self._order(row // self.windows)[1][row % self.windows]) for row in rows])
        return padded(self.tokens, self.starts[chosen], self.lengths[chosen], self.padding, self.context)


def parts_of_steps(windows: Windows, slices: Slices) -> Iterator[Batch]:
    """The slices of each step's batch that one process computes, without end."""
    for step in count(slices.step):
        batch = windows(step)
        for which in slices.mine:
            yield {name: rows[which :: slices.total] for name, rows in batch.items()}
