"""Series with classes: standardised and padded to one length, and what a classifier of them must beat."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from polymix.errors import DataError
from polymix.extras import needs
from polymix.limits import check_memory
from polymix.train.data.series.archives import Labelled
from polymix.train.data.splits import held_out, natural, spread
from polymix.train.task import Data

FIT = 4000  # training series that the controls see


@dataclass(frozen=True)
class ClassData(Data):
    """Series as values (V, C), observed (V, C) and class; centre and spread: of each variable, in training."""

    train: TensorDataset
    validation: TensorDataset
    test: TensorDataset
    classes: tuple[str, ...]
    length: int
    centre: tuple[float, ...]
    spread: tuple[float, ...]
    name: str

    def summary(self) -> dict[str, Any]:
        """What `predict` needs."""
        return {"name": self.name, "classes": list(self.classes), "length": self.length,
                "centre": list(self.centre), "spread": list(self.spread)}  # fmt: skip

    @classmethod
    def of(cls, summary: Mapping[str, Any]) -> ClassData:
        """Data without series, as `summary` describes them."""
        none = TensorDataset(torch.zeros(0))
        centre, spreads = (tuple(map(float, summary[name])) for name in ("centre", "spread"))
        return cls(none, none, none, tuple(summary["classes"]), int(summary["length"]), centre, spreads,
                   str(summary["name"]))  # fmt: skip

    def samples(self, rows: Sequence[Labelled]) -> TensorDataset:
        """Rows as the model sees them: standardised, padded in front, 0 where nothing was observed.

        Raises DataError: a series has other variables, is longer, or is of another class.
        """
        values = torch.zeros(len(rows), len(self.centre), self.length)
        observed = torch.zeros(values.shape, dtype=torch.bool)
        number = {name: place for place, name in enumerate(self.classes)}
        for place, (series, label) in enumerate(rows):
            steps, variables = series.shape
            if variables != len(self.centre) or steps > self.length:
                got, own = (f"{a} variables and {b:,} steps" for a, b in
                            ((variables, steps), (len(self.centre), self.length)))  # fmt: skip
                raise DataError(
                    "data", f"series {place + 1:,}, of {got}", f"the {own} of the training, or fewer steps", "Cut it."
                )
            if label and label not in number:
                raise DataError(
                    "data",
                    f"the class {label} of series {place + 1:,}",
                    f"one of {', '.join(self.classes[:9])}",
                    "Remove it.",
                )
            normed = torch.from_numpy(((series - self.centre) / self.spread).T).float()
            observed[place, :, self.length - steps :] = normed.isfinite()
            values[place, :, self.length - steps :] = normed.nan_to_num(0.0)
        return TensorDataset(values, observed, torch.tensor([number.get(label, 0) for _, label in rows]).long())


def prepared(
    source: str, train: list[Labelled], test: list[Labelled], multiple: int, shares: tuple[float, float]
) -> ClassData:
    """The data of series with classes, all padded to one length.

    Args:
        multiple: of it the length is one.
        shares: of the training series, those that choose the weights; where there is no test, of all, those of it.

    Raises:
        DataError: there are too few classes, or series do not fit each other. OptionError: they do not fit into memory.
    """
    if not test:
        train, test = held_out(sorted(train, key=lambda row: natural(row[1])), _every(shares[1]))
    rows = [*train, *test]
    longest, classes = max(len(values) for values, _ in rows), sorted({label for _, label in train}, key=natural)
    length = math.ceil(longest / multiple) * multiple
    if len(classes) < 2 or not train:
        raise DataError("data", f"{source} with {len(classes)} class", "series of two classes or more", "Add some.")
    variables = train[0][0].shape[1]
    check_memory("data", "all series, padded to one length", 5 * len(rows) * variables * length)
    flat = numpy.concatenate([values for values, _ in train if values.shape[1] == variables])
    seen = numpy.isfinite(flat)
    count = numpy.maximum(seen.sum(0), 1)
    centre = numpy.where(seen, flat, 0).sum(0) / count
    spreads = numpy.sqrt((numpy.where(seen, flat - centre, 0) ** 2).sum(0) / count)
    spreads = numpy.where(spreads > 1e-6 * (1 + numpy.abs(centre)), spreads, 1.0)
    none = TensorDataset(torch.zeros(0))
    data = ClassData(none, none, none, tuple(classes), length, tuple(map(float, centre)),
                     tuple(map(float, spreads)), source)  # fmt: skip
    ordered = sorted(train, key=lambda row: natural(row[1]))
    learnt, chosen = held_out(ordered, _every(shares[0])) if shares[0] else (train, train)
    return replace(data, train=data.samples(learnt), validation=data.samples(chosen), test=data.samples(test))


def _every(part: float) -> int:
    """One of so many is that share; no more than half, as the training needs some."""
    return max(2, round(1 / max(part, 0.01)))


def share(answers: Tensor, labels: Tensor) -> float:
    return (answers == labels).double().mean().item()


def controls(data: ClassData) -> dict[str, float]:
    """Accuracy of the most frequent class, of the nearest training series, and of a ridge classifier on all values."""
    with needs("train"):
        from sklearn.linear_model import RidgeClassifierCV
    some = spread(len(data.train), FIT)
    values, _, labels = (part[some] for part in data.train.tensors)
    flat, test, truth = values.flatten(1), data.test.tensors[0].flatten(1), data.test.tensors[2]
    nearest = torch.cat([torch.cdist(part, flat).argmin(1) for part in test.split(256)])
    linear = RidgeClassifierCV(alphas=(1e-1, 1e1, 1e3)).fit(flat.numpy(), labels.numpy())
    return {
        "accuracy_majority": share(labels.bincount().argmax().expand(len(truth)), truth),
        "accuracy_nearest": share(labels[nearest], truth),
        "accuracy_linear": share(torch.from_numpy(linear.predict(test.numpy())), truth),
    }
