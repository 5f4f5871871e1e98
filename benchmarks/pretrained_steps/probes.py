"""Linear probes: how well a model's vectors tell classes apart, beside the vectors of the original model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polymix.train.distill.head import fit_head

RESAMPLES, INTERVAL = 2000, (0.025, 0.975)


class Probe(NamedTuple):
    """Rows of tokens with their classes, for the probe to learn from and to be tested on.

    groups: which tests belong together, such as passages of one text: chance draws whole groups.
    """

    name: str
    train: list[list[int]]
    train_classes: Tensor
    test: list[list[int]]
    test_classes: Tensor
    groups: Tensor


def probe(name: str, train: Sequence[tuple[Any, ...]], test: Sequence[tuple[Any, ...]]) -> Probe:
    """From rows (tokens, class, group)."""
    classes, groups = sorted({row[1] for row in (*train, *test)}), sorted({row[2] for row in test})
    labels = [torch.tensor([classes.index(row[1]) for row in part]) for part in (train, test)]
    members = torch.tensor([groups.index(row[2]) for row in test])
    return Probe(name, [row[0] for row in train], labels[0], [row[0] for row in test], labels[1], members)


def hits(task: Probe, embed: Callable[[list[list[int]]], Tensor]) -> Tensor:
    """Which tests a logistic regression on a model's vectors gets right. Its features have mean 0 and variance 1."""
    train, test = embed(task.train), embed(task.test)
    centre, spread = train.mean(0), train.std(0)
    train, test = (train - centre) / spread, (test - centre) / spread
    head = nn.Linear(train.shape[1], int(torch.cat([task.train_classes, task.test_classes]).max()) + 1)
    fit_head(head, [(train, task.train_classes)])
    with torch.no_grad():
        return head(test).argmax(-1) == task.test_classes


def compared(task: Probe, ours: Tensor, theirs: Tensor) -> dict[str, Any]:
    """A model's accuracy, its share of the original's, and 95 % of the shares that other tests would give.

    The tests are drawn anew, group by group, the same ones for both models.
    """
    count = int(task.groups.max()) + 1
    sums = torch.zeros(2, count).index_add_(1, task.groups, torch.stack([ours, theirs]).float())
    drawn = torch.randint(count, (RESAMPLES, count), generator=torch.Generator().manual_seed(0))
    right = sums[:, drawn].sum(-1)
    low, high = (right[0] / right[1]).quantile(torch.tensor(INTERVAL)).tolist()
    accuracy = ours.float().mean().item()
    return {"accuracy": accuracy, "share": accuracy / theirs.float().mean().item(), "low": low, "high": high}
