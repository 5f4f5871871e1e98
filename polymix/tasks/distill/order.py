"""The same data in the same order in every run, shared out between processes."""

from __future__ import annotations

import copy
import random
import sys
import zlib
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset


def number(*parts: Any) -> int:
    """A seed from what it is for."""
    return zlib.crc32(repr(parts).encode())


def seed_all(seed: int) -> None:
    """Whatever a data set may draw its augmentations from."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


class Ordered:
    """A loader that gives an epoch the same batches whichever epochs this process ran before; each of `world` processes
    takes every world-th of them. step: how many batches a process had before.
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
    """Every world-th of what `whole` gives, from `rank` on, and as many for each rank."""

    def __init__(self, whole: Any, rank: int, world: int) -> None:
        self.whole, self.rank, self.world = whole, rank, world

    def __len__(self) -> int:
        return len(self.whole) // self.world

    def __iter__(self) -> Iterator[Any]:
        return islice(self.whole, self.rank, len(self) * self.world, self.world)


def shared(loader: Any, rank: int, world: int) -> Any:
    """A process's part. Where a DataLoader loads by lists of indices, no process loads what is another's; its workers
    start anew each epoch, with that epoch's seed."""
    if not isinstance(loader, DataLoader):
        return Every(loader, rank, world)
    mine = copy.copy(loader)  # whose attributes DataLoader lets nobody set
    vars(mine).update(persistent_workers=False, _iterator=None)
    if loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset):
        return Every(mine, rank, world)
    vars(mine)["batch_sampler"] = Every(loader.batch_sampler, rank, world)
    return mine
