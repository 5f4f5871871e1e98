"""How good a model is on labels that it was not trained on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from polymix.convert.tracing import mode
from polymix.errors import DataError
from polymix.train.distill.batches import Answer, Forward, answer, moved, values

Measure = Callable[[nn.Module, Iterable[Any], Forward, torch.device | str], float]


def better(metric: Measure, value: float, than: float) -> bool | None:
    """Whether one value of a metric is better than another; None for a metric of the user's, which has no direction."""
    if metric not in (accuracy, perplexity, relative_error):
        return None
    return value > than if metric is accuracy else value < than


@torch.no_grad()
def accuracy(model: nn.Module, data: Iterable[Any], forward: Forward, device: torch.device | str) -> float:
    """The share of labels that have the greatest logit."""
    hits = count = 0
    for answers in _answers(model, data, forward, device):
        assert answers.labels is not None
        hits += int((answers.logits.argmax(-1) == answers.labels)[answers.real].sum())
        count += int(answers.real.sum())
    return hits / max(count, 1)


@torch.no_grad()
def perplexity(model: nn.Module, data: Iterable[Any], forward: Forward, device: torch.device | str) -> float:
    """e to the mean cross-entropy over all labels; at most e^700, also for NaN."""
    nats, count = 0.0, 0
    for answers in _answers(model, data, forward, device):
        labels = int(answers.real.sum())
        nats += float(answers.label_loss()) * labels
        count += labels
    mean = nats / max(count, 1)
    return math.exp(mean if mean < 700 else 700)


@torch.no_grad()
def relative_error(model: nn.Module, data: Iterable[Any], forward: Forward, device: torch.device | str) -> float:
    """‖ŷ − y‖² / ‖y − ȳ‖² of a model's outputs ŷ, the batches' labels being y, such as the original model's outputs."""
    error, count, total, squares = 0.0, 0, 0.0, 0.0
    with mode(model, False):
        for batch in data:
            outputs = values(model, moved(batch, device), forward)
            if outputs.labels is None:
                raise DataError("val", "batches without labels", "labels of the output's shape", "Pass answers=True.")
            labels = outputs.labels.double()
            error += float((outputs.values.double() - labels).square().sum())
            count, total = count + labels.numel(), total + float(labels.sum())
            squares += float(labels.square().sum())
    return error / max(squares - total**2 / max(count, 1), 1e-12)


def _answers(model: nn.Module, data: Iterable[Any], forward: Forward, device: torch.device | str) -> Iterator[Answer]:
    with mode(model, False):
        for batch in data:
            answers = answer(model, moved(batch, device), forward)
            if answers.labels is None or answers.labels.ndim > 1:
                raise DataError(
                    "val", "batches without class labels", "(inputs, labels), or dicts with labels", "Add the labels."
                )
            yield answers
