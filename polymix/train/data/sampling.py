"""The same data in the same order in every run, on one process or many: what is drawn depends on seed, step and slice.

A step's batch is cut into slices, a number that a run keeps. Processes share the slices; one process computes them one
after another. Seeds name the slice and not the process, so a run may go on with another number of processes.
"""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset


def number(*parts: Any) -> int:
    """A seed made from what it is for, such as (0, "weights")."""
    return zlib.crc32(repr(parts).encode())


def seed_all(seed: int) -> None:
    """Seed every generator from which a data set may draw its augmentations."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


@contextmanager
def isolated_random_state() -> Iterator[None]:
    """Restore every generator's state afterwards, so that a run leaves the caller's random numbers as they were."""
    numpy = sys.modules.get("numpy")
    states = random.getstate(), None if numpy is None else numpy.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(states[0])
            if numpy is not None:
                numpy.random.set_state(states[1])


@dataclass(frozen=True)
class Slices:
    """The slices of each step's batch that one process computes, from a step on.

    Attributes:
        step: the first step. total: slices of a batch. rank, world: this process, and how many there are.
    """

    step: int = 0
    total: int = 1
    rank: int = 0
    world: int = 1

    @property
    def mine(self) -> range:
        """The slices of this process."""
        return range(self.rank, self.total, self.world)


class Order:
    """Lists of (row, index) into a data set, one list a slice, from a step on, without end.

    Row r of all rows is sample r mod size of epoch r div size, and each epoch has another order.

    Args:
        size: samples of the data set. batch: rows of a step. seed: of the order.
    """

    def __init__(self, size: int, batch: int, seed: int, slices: Slices) -> None:
        self.size, self.batch, self.seed, self.slices = size, batch, seed, slices
        self.orders: dict[int, Sequence[int]] = {}

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for step in count(self.slices.step):
            rows = range(step * self.batch, (step + 1) * self.batch)
            for which in self.slices.mine:
                yield [(row, self._index(row)) for row in rows[which :: self.slices.total]]

    def _index(self, row: int) -> int:
        epoch, place = divmod(row, self.size)
        if epoch not in self.orders:
            self.orders = {other: order for other, order in self.orders.items() if other == epoch - 1}
            self.orders[epoch] = self.order(epoch)
        return self.orders[epoch][place]

    def order(self, epoch: int) -> Sequence[int]:
        """The samples of an epoch, `size` indices."""
        generator = torch.Generator().manual_seed(number(self.seed, "order", epoch))
        order: list[int] = torch.randperm(self.size, generator=generator).tolist()
        return order


class Seeded(Dataset[Any]):
    """Samples of a data set by (row, index), whose augmentations depend on the seed and the row alone."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __getitem__(self, place: tuple[int, int]) -> Any:
        row, index = place
        seed_all(number(self.seed, "sample", row))
        return self.dataset[index]


def loaded(dataset: Any, order: Order, collate: Callable[[list[Any]], Any] | None, workers: int) -> Iterator[Any]:
    """A data set's samples in an order, joined to batches by `collate`; loaded by so many processes, or by this one."""
    places: Any = order
    samples = Seeded(dataset, order.seed)
    return iter(DataLoader(samples, batch_sampler=places, num_workers=workers, collate_fn=collate))
