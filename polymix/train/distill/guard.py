"""What keeps training from doing harm: samples held back from it, and the best of the models that it has made."""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset

from polymix.convert.replacement import Replacement
from polymix.convert.tracing import mode
from polymix.errors import DataError
from polymix.train.data.sampling import number
from polymix.train.distill.batches import moved
from polymix.train.distill.comparison import Comparison
from polymix.train.distill.metrics import Measure, better
from polymix.train.distill.order import seed_loader

SAMPLES, SHARE = 64, 8  # so many samples are held back, but at most one in so many


class HeldBack:
    """Training batches that are not learnt from, and how models are compared on them.

    Args:
        batches: on the CPU. teachers: the original model, or none where labels alone are learnt from.
    """

    def __init__(self, batches: Sequence[Any], comparison: Comparison, teachers: Sequence[nn.Module]) -> None:
        self.batches, self.comparison, self.teachers = list(batches), comparison, tuple(teachers)

    @torch.no_grad()
    def loss(self, model: nn.Module, device: torch.device | str) -> float:
        """What fine-tuning minimises, the mean over the batches, in evaluation mode."""
        model.to(device)
        for teacher in self.teachers:
            teacher.to(device)
        with mode(model, False):
            losses = [float(self.comparison(model, self.teachers, moved(batch, device)).loss) for batch in self.batches]
        return sum(losses) / len(losses)


class _Wrapped:
    """A sampler of lists of indices, of which others are made."""

    def __init__(self, whole: Any) -> None:
        self.whole = whole

    def __getattr__(self, name: str) -> Any:
        """What is asked of a sampler: its generator, its own sampler, `set_epoch`."""
        if name == "whole":  # while it is copied
            raise AttributeError(name)
        return getattr(self.whole, name)

    def __len__(self) -> int:
        return len(self.whole)


class _Replaced(_Wrapped):
    """Lists of indices in which others stand for some of them."""

    def __init__(self, whole: Any, others: Mapping[Hashable, Any]) -> None:
        super().__init__(whole)
        self.others = others

    def __iter__(self) -> Iterator[list[Any]]:
        for batch in self.whole:
            yield [self.others.get(index, index) for index in batch]


class _First(_Wrapped):
    """The first of the lists."""

    def __init__(self, whole: Any, count: int) -> None:
        super().__init__(whole)
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[list[Any]]:
        return islice(self.whole, self.count)


def hold_back(data: Any, seed: int) -> tuple[Any, list[Any]]:
    """Data of the same length that lack some samples, and batches of these. Another sample stands in for each.

    Held back are 64 samples, but at most one in eight, evenly spaced: of a DataLoader by the indices of its samplers,
    of a list by whole batches. Where there is no such choice, as in a stream, nothing is: the batches are its first.
    """
    parted = set_apart(data, seed, SAMPLES, SHARE)
    if parted is not None:
        return parted[0], parted[1][0]
    seed_loader(data, number(seed, "held back"), 0)
    first = next(iter(data))
    count = min(math.ceil(SAMPLES / rows(first)), max(1, len(data) // SHARE))
    return data, list(islice(data, count))


def set_apart(data: Any, seed: int, samples: int, share: int, parts: int = 1) -> tuple[Any, list[list[Any]]] | None:
    """Data of the same length that lack some samples, and batches of these in so many parts, dealt in turn.

    samples: in all parts together, at most one in `share`, which is at least 2. None where there is no choice.
    """
    if (
        isinstance(data, DataLoader)
        and data.batch_sampler is not None
        and not isinstance(data.dataset, IterableDataset)
    ):
        seed_loader(data, number(seed, "held back"), 0)
        lots = [list(batch) for batch in data.batch_sampler]
        indices = [index for lot in lots for index in lot]
        if all(isinstance(index, int) for index in indices):
            others = _others(sorted(set(indices)), samples, share)
            if len(others) >= parts:
                held = [[*others][turn::parts] for turn in range(parts)]
                cut = [[part[at : at + len(lots[0])] for at in range(0, len(part), len(lots[0]))] for part in held]
                rest = _sampled(data, _Replaced(data.batch_sampler, others))
                return rest, [list(_sampled(data, part)) for part in cut]
    elif isinstance(data, (list, tuple)):
        others = _others(range(len(data)), parts * math.ceil(samples / parts / rows(data[0])), share)
        if len(others) >= parts:
            held_batches = [data[place] for place in others]
            rest = [data[others.get(place, place)] for place in range(len(data))]
            return rest, [held_batches[turn::parts] for turn in range(parts)]
    return None


def shortened(data: Any, count: int) -> Any:
    """The first batches of data; of a DataLoader that shuffles, others in each epoch."""
    if len(data) <= count:
        return data
    return _sampled(data, _First(data.batch_sampler, count)) if isinstance(data, DataLoader) else data[:count]


def _others(places: Sequence[int], count: int, share: int) -> dict[Any, int]:
    """Evenly spaced places to hold back, each with its neighbour, which is seen in its stead."""
    count = min(count, len(places) // share)
    chosen = [len(places) * turn // count for turn in range(count)]
    return {places[at]: places[at + 1] for at in chosen}


def rows(batch: Any) -> int:
    """The samples of a batch."""
    return max(1, next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim), 1))


def _sampled(loader: Any, batches: Any) -> Any:
    """A loader with other lists of indices."""
    mine = copy.copy(loader)  # whose attributes DataLoader lets nobody set
    vars(mine).update(persistent_workers=False, _iterator=None, batch_sampler=batches)
    return mine


class Guard:
    """The best state of the model so far, weights and buffers, on the CPU: by the stage, the converted model first.

    A stage is better by `metric` on the user's held-out data; where these are not there, say nothing or cannot tell
    two stages apart, by the loss on what was held back of the training data.

    Attributes:
        losses: on what was held back, by stage. stage: the best. last: the one that came last.
    """

    def __init__(self, report: Replacement, metric: Measure, held: HeldBack | None, device: str) -> None:
        self.report, self.metric, self.held, self.device = report, metric, held, device
        self.stage, self.last, self.losses = "", "", dict[str, float]()
        self.weights = dict[str, Any]()

    def note(self, stage: str) -> None:
        """Keep the weights of a stage that is better than those before it."""
        if self.held is None:
            return
        self.last = stage
        try:
            self.losses[stage] = self.held.loss(self.report.model, self.device)
        except DataError:  # outputs that nothing is known of, which imitation alone does not need
            self.losses[stage] = math.nan
        if not self.stage or self._better(stage):
            self.stage = stage
            state = self.report.model.state_dict().items()
            self.weights = {name: value.detach().to("cpu", copy=True) for name, value in state}
            self.report.untrained = self.report.untrained or self.weights

    def _better(self, stage: str) -> bool:
        values = self.report.accuracy
        verdict = better(self.metric, values[stage], values[self.stage]) if stage in values else None
        if verdict is not None and values[stage] != values[self.stage]:
            return verdict or math.isnan(values[self.stage])
        loss, before = self.losses[stage], self.losses[self.stage]
        return loss < before or math.isnan(before)

    def restore(self) -> bool:
        """Give the model the best weights back; whether that changed it."""
        self.report.kept, self.report.untrained = self.stage or self.last or None, None
        if self.stage in ("", self.last):
            return False
        self.report.model.load_state_dict(self.weights)
        return True
