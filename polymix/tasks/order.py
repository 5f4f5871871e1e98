"""The same data in the same order in every run, shared between processes."""

from __future__ import annotations

import copy
import random
import sys
import zlib
from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset


def number(*parts: Any) -> int:
    """A seed made from what it is for, such as (0, "weights")."""
    return zlib.crc32(repr(parts).encode())


def seed_all(seed: int) -> None:
    """Seed every generator from which a data set may draw its augmentations."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


class Ordered:
    """A loader whose batches in an epoch do not depend on the epochs that this process ran before.

    Each of `world` processes takes every world-th batch. step: the number of batches a process has had so far.
    """

    def __init__(self, loader: Any, seed: int, step: Callable[[], int], rank: int = 0, world: int = 1) -> None:
        self.seed, self.step, self.whole, self.loader = seed, step, loader, shared(loader, rank, world)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        epoch = self.step() // len(self)
        seed = number(self.seed, "epoch", epoch)
        seed_all(seed)
        batches = getattr(self.whole, "batch_sampler", None)
        for part in (self.whole, getattr(self.whole, "sampler", None), batches, getattr(batches, "sampler", None)):
            if isinstance(generator := getattr(part, "generator", None), torch.Generator):
                generator.manual_seed(seed)
            if callable(tell := getattr(part, "set_epoch", None)):
                tell(epoch)
        yield from self.loader  # a generator: nothing is drawn between the seed and the first batch


class Every:
    """Every world-th item of `whole` from `rank` on, the same number for each rank."""

    def __init__(self, whole: Any, rank: int, world: int) -> None:
        self.whole, self.rank, self.world = whole, rank, world

    def __len__(self) -> int:
        return len(self.whole) // self.world

    def __iter__(self) -> Iterator[Any]:
        return islice(self.whole, self.rank, len(self) * self.world, self.world)


def shared(loader: Any, rank: int, world: int) -> Any:
    """The part of a loader that one process uses.

    If a DataLoader loads by lists of indices, no process loads another's samples. Its workers start again in each
    epoch, with that epoch's seed.
    """
    if not isinstance(loader, DataLoader):
        return Every(loader, rank, world)
    mine = copy.copy(loader)  # whose attributes DataLoader lets nobody set
    vars(mine).update(persistent_workers=False, _iterator=None)
    if loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset):
        return Every(mine, rank, world)
    vars(mine)["batch_sampler"] = Every(loader.batch_sampler, rank, world)
    return mine


class Endless:
    """Lists of (row, index) into a data set of `size` samples, from a step on, without end.

    Row r of all rows is sample r mod size of epoch r div size, and each epoch has another order. A step has `batch`
    rows in `parts` that are computed one after another, each shared between `world` processes. The lists depend on
    the seed and the step alone, so a resumed run sees what it would have seen.
    """

    def __init__(
        self, size: int, batch: int, seed: int, step: Callable[[], int], parts: int = 1, rank: int = 0, world: int = 1
    ) -> None:
        self.size, self.batch, self.seed, self.step = size, batch, seed, step
        self.parts, self.rank, self.world = parts, rank, world
        self.orders: dict[int, list[int]] = {}

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for step in count(self.step()):
            rows = range(step * self.batch, (step + 1) * self.batch)
            for part in range(self.parts):
                mine = rows[part * self.world + self.rank :: self.parts * self.world]
                yield [(row, self._index(row)) for row in mine]

    def _index(self, row: int) -> int:
        epoch, place = divmod(row, self.size)
        if epoch not in self.orders:
            self.orders = {other: order for other, order in self.orders.items() if other == epoch - 1}
            self.orders[epoch] = self.order(epoch)
        return self.orders[epoch][place]

    def order(self, epoch: int) -> list[int]:
        """The samples of an epoch, `size` indices."""
        generator = torch.Generator().manual_seed(number(self.seed, "order", epoch))
        return torch.randperm(self.size, generator=generator).tolist()


class Seeded(Dataset[Any]):
    """Samples of a data set by (row, index), whose augmentations depend on the seed and the row alone."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __getitem__(self, place: tuple[int, int]) -> Any:
        row, index = place
        seed_all(number(self.seed, "sample", row))
        return self.dataset[index]
