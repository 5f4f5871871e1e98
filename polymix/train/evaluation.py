"""How a model is measured on the way, and with which weights a training ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from polymix.train.data.sampling import isolated_random_state
from polymix.train.resume import load_whole_state, whole_state
from polymix.train.task import Data, Task

Row = dict[str, Any]
VALIDATION = "validation_"  # of names of what was measured on the part that chooses the weights


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, without gradients; the random state is restored afterwards."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), isolated_random_state():
            yield
    finally:
        model.train(training)


class Selection:
    """The weights that a training ends with: the last ones, or with `keep="best"` those of the best evaluation.

    Args:
        before: the content of the checkpoint that a resumed run goes on from.
    Attributes:
        part: the data that evaluations on the way are made on.
        kept: step, score and weights of the best evaluation, by the task's `chosen_by`; empty with `keep="last"`.
    """

    def __init__(self, task: Task[Any, Any], data: Data, before: Mapping[str, Any] | None) -> None:
        self.task, self.best = task, task.recipe.keep == "best"
        self.part: Data = task.validation(data) if self.best else data
        self.kept: Row = {} if before is None else dict(before["kept"])

    def take(self, weights: nn.Module, row: Row, step: int) -> Row:
        """Note an evaluation of the weights; returns its row as it is to be shown."""
        if not self.best:
            return row
        by = self.task.chosen_by or self.task.metrics[0].name
        score = self.task.better(by).score(row.get(by))
        if not self.kept or score > self.kept["score"]:
            self.kept = {"step": step, "score": score, "weights": whole_state(weights, everywhere=True)}
        return {f"{VALIDATION}{name}": value for name, value in row.items()}

    def restore(self, weights: nn.Module) -> Row:
        """Load the weights of the best evaluation; returns its step as a row."""
        load_whole_state(weights, self.kept["weights"])
        return {"kept_step": self.kept["step"]}
