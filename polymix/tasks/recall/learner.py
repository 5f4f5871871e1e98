"""How a model learns to recall: as a task of `polymix train`, and with `train` a model that you build."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from polymix.errors import OptionError
from polymix.tasks import learner
from polymix.tasks.distill.batches import IGNORED
from polymix.tasks.recall.data import Batch, Stream, Task
from polymix.tasks.recall.metrics import accuracy
from polymix.tasks.recall.recipe import Schedule
from polymix.tasks.trainer import LightningModule, decay_groups, fit, one_cycle, placed

ENOUGH = 0.99  # reached on every task twice in a row, this accuracy ends a training


@dataclass(frozen=True)
class Outcome:
    """Accuracy on each task (None: it diverged), steps, seconds, and the last loss."""

    accuracy: tuple[float, ...] | None
    steps: int
    seconds: float
    loss: float


class Learner(learner.Learner):
    """A causal language model, which learns from the positions that have a target."""

    unit = "tokens"

    def train_dataloader(self) -> Any:
        recipe, trainer = self.recipe, self.trainer
        stream = Stream(
            self.data.tasks, recipe.tokens, recipe.seed, lambda: self.global_step, recipe.accumulate,
            trainer.global_rank, trainer.world_size,
        )  # fmt: skip
        return DataLoader(stream, batch_size=None)

    def loss(self, batch: Batch) -> Tensor:
        return loss_of(self.model, batch)

    def epoch(self, step: int) -> float:
        return 0.0  # every sequence is new

    def size(self, batch: Batch) -> int:
        return batch.tokens.numel()


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy over the positions with a target. The model returns an output with logits."""
    asked = batch.targets != IGNORED
    return F.cross_entropy(model(batch.tokens).logits[asked].float(), batch.targets[asked])


class Trial(LightningModule):
    """A causal language model, its tasks and its schedule. Training ends early once all tasks are learned."""

    def __init__(self, model: nn.Module, tasks: Sequence[Task], schedule: Schedule, seed: int) -> None:
        super().__init__()
        self.model, self.tasks, self.schedule, self.seed = model, tasks, schedule, seed
        self.good, self.loss = 0, float("nan")

    def training_step(self, batch: Batch, index: int) -> Tensor | None:
        loss = loss_of(self.model, batch)
        self.loss = loss.item()
        if not loss.isfinite():
            self.trainer.should_stop = True
            return None
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        if self.global_step % self.schedule.every == 0:
            self.good = self.good + 1 if min(self.accuracies()) >= ENOUGH else 0
            self.trainer.should_stop |= self.good == 2

    def accuracies(self) -> tuple[float, ...]:
        return tuple(accuracy(self.model, task, seed=self.seed) for task in self.tasks)

    def configure_optimizers(self) -> dict[str, Any]:
        schedule = self.schedule
        groups = decay_groups(self.model, schedule.weight_decay)
        return one_cycle(groups, schedule.learning_rate, schedule.warmup, self.trainer)


def train(
    model: nn.Module, tasks: Sequence[Task], schedule: Schedule | None = None, *, seed: int = 0, device: str = "cpu"
) -> Outcome:
    """Train a model on the tasks in turn, and measure it on each.

    Raises OptionError if there is no task, and KeyboardInterrupt when the user interrupts.
    """
    if not tasks:
        raise OptionError("tasks", "none", "at least one task", "Pass [Recall(4), Recall(8)], say.")
    schedule = schedule or Schedule()
    trial = Trial(model, tasks, schedule, seed)
    start = time.perf_counter()
    loader = DataLoader(Stream(tasks, schedule.tokens, seed), batch_size=None)
    trainer = fit(trial, loader, steps=schedule.steps, where=placed(device), clip=1.0)
    seconds = time.perf_counter() - start
    finite = math.isfinite(trial.loss)
    return Outcome(trial.accuracies() if finite else None, trainer.global_step, seconds, trial.loss)
