"""How a language model learns: cross-entropy over all targets of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from polymix.tasks import learner
from polymix.tasks.text.data import TextData
from polymix.tasks.text.metrics import summed_loss
from polymix.tasks.text.recipe import TextRecipe
from polymix.tasks.text.tokens import Batch, Feed, Windows


class Learner(learner.Learner):
    """A causal language model. The loss is the mean over all targets of a step, however it is split into parts."""

    unit = "tokens"

    def __init__(self, model: Any, recipe: TextRecipe, data: TextData) -> None:
        super().__init__(model, recipe, data)
        end = data.end if recipe.packing == "segments" else None
        self.windows = Windows(data.train, recipe.context, recipe.batch_size, recipe.seed, end)

    def train_dataloader(self) -> Feed:
        trainer = self.trainer
        step: Callable[[], int] = lambda: self.global_step  # noqa: E731
        return Feed(self.windows, step, self.recipe.accumulate, trainer.global_rank, trainer.world_size)

    def loss(self, batch: Batch) -> Tensor:
        """This part's share of the step's mean loss, times the number of parts over which gradients are averaged."""
        parts = self.trainer.world_size * self.recipe.accumulate
        return summed_loss(self.model, batch) / batch["count"] * parts

    def epoch(self, step: int) -> float:
        return self.windows.epoch(step)

    def size(self, batch: Batch) -> int:
        return batch["input_ids"].numel()
