"""The user's own batches in an order that depends on seed and epoch alone, shared between processes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from polymix.train.data.sampling import Slices, number, seed_all


class Every:
    """Every world-th item of `whole` from `rank` on, the same number for each rank."""

    def __init__(self, whole: Any, rank: int, world: int) -> None:
        self.whole, self.rank, self.world = whole, rank, world

    def __len__(self) -> int:
        return len(self.whole) // self.world

    def __iter__(self) -> Iterator[Any]:
        return islice(self.whole, self.rank, len(self) * self.world, self.world)


def share_of(loader: Any, rank: int, world: int) -> Any:
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


def seed_loader(loader: Any, seed: int, epoch: int) -> None:
    """Seed every generator of random numbers, those of a loader and its samplers too, and tell samplers the epoch."""
    seed_all(seed)
    batches = getattr(loader, "batch_sampler", None)
    for part in (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)):
        if isinstance(generator := getattr(part, "generator", None), torch.Generator):
            generator.manual_seed(seed)
        if callable(set_epoch := getattr(part, "set_epoch", None)):
            set_epoch(epoch)


def epochs_of(loader: Any, seed: int, slices: Slices) -> Iterator[Any]:
    """One process's batches from a step on, epoch after epoch, without end.

    Each epoch is seeded anew, so that it is the same whatever ran before it.
    """
    mine = share_of(loader, slices.rank, slices.world)
    first, done = divmod(slices.step, len(mine))
    for epoch in count(first):
        seed_loader(loader, number(seed, "epoch", epoch), epoch)
        yield from islice(mine, done, None)
        done = 0
