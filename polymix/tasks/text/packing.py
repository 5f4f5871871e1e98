"""Which tokens stand in which batch: a function of the seed and the step alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from polymix.tasks.distill.batches import IGNORED
from polymix.tasks.distill.order import number
from polymix.tasks.text.shards import Tokens

Batch = dict[str, Tensor]


def cut(windows: Tensor, end: int | None) -> Batch:
    """(B, N + 1) tokens as input and targets; with `end`, which closes a document, as packed segments too.

    An end belongs to the document before it, and what begins the next one is nobody's target.
    """
    inputs, targets = windows[:, :-1], windows[:, 1:]
    if end is None:
        return {"input_ids": inputs, "targets": targets}
    ends = inputs == end
    segments = ends.cumsum(1) - ends.long()
    return {"input_ids": inputs, "targets": targets.masked_fill(ends, IGNORED), "segment_ids": segments}


class Windows:
    """Batches of windows over a stream of tokens, each epoch in another order and from another start.

    Row r of all rows that were ever asked for is row r mod n of epoch r div n, where n windows fill an epoch.
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
            slack = len(self.tokens) - 1 - self.windows * self.context
            shift = int(torch.randint(slack + 1, (), generator=generator))
            self.orders[epoch] = shift, torch.randperm(self.windows, generator=generator)
        return self.orders[epoch]


class Feed:
    """The parts of each step's batch that one process computes, from a step on; the loader of a training.

    A batch falls into `parts` that are computed one after another, and each of these between `world` processes, so that
    together they always see the same. `count` is the number of targets in the whole batch, by which all of them divide.
    """

    def __init__(
        self, windows: Windows, step: Callable[[], int], parts: int = 1, rank: int = 0, world: int = 1
    ) -> None:
        self.windows, self.step, self.parts, self.rank, self.world = windows, step, parts, rank, world

    def __iter__(self) -> Iterator[Batch]:
        step = self.step()
        while True:
            batch = self.windows(step)
            count = (batch["targets"] != IGNORED).sum().clamp_min(1)
            for part in range(self.parts):
                mine = slice(part * self.world + self.rank, None, self.parts * self.world)
                yield {name: rows[mine] for name, rows in batch.items()} | {"count": count}
            step += 1
