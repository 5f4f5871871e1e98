"""How a model learns the tasks, how much it gets right, and what it keeps."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset

from polymix.errors import OptionError, check_int
from polymix.tasks.distill.batches import IGNORED
from polymix.tasks.recall.data import Batch, Task
from polymix.tasks.trainer import LightningModule, Trainer, decay_groups, one_cycle, placed, quiet, until_interrupted

ENOUGH = 0.99  # accuracy that is as good as all; reached twice in a row it ends a training


@dataclass(frozen=True)
class Recipe:
    """How a model is trained: AdamW, linear warm-up and cosine decay, clipped gradients, `tokens` of one task a step.

    The tasks take turns. Every `every` steps the accuracy is measured; twice ENOUGH in a row, on every task, ends it.
    """

    steps: int = 1500
    tokens: int = 2048
    learning_rate: float = 3e-3
    weight_decay: float = 0.05
    warmup: float = 0.1  # share of the steps
    every: int = 125

    def __post_init__(self) -> None:
        for name in ("steps", "tokens", "every"):
            check_int(name, getattr(self, name), 1)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Outcome:
    """Accuracy on each task (None: the loss left the finite numbers), steps that were needed, seconds, last loss."""

    accuracy: tuple[float, ...] | None
    steps: int
    seconds: float
    loss: float


class Stream(IterableDataset[Batch]):
    """The tasks in turn, for ever; the batch of a step depends on the seed and the step alone."""

    def __init__(self, tasks: Sequence[Task], tokens: int, seed: int) -> None:
        self.tasks, self.tokens, self.seed = tasks, tokens, seed

    def __iter__(self) -> Iterator[Batch]:
        for step in count():
            task = self.tasks[step % len(self.tasks)]
            yield task.batch(max(1, self.tokens // task.length), "train", self.seed, step)


class Learner(LightningModule):
    """A model (a causal language model of transformers, or what is called like one), its tasks and its recipe."""

    def __init__(self, model: nn.Module, tasks: Sequence[Task], recipe: Recipe, seed: int) -> None:
        super().__init__()
        self.model, self.tasks, self.recipe, self.seed = model, tasks, recipe, seed
        self.good, self.loss = 0, float("nan")

    def training_step(self, batch: Batch, index: int) -> Tensor | None:
        asked = batch.targets != IGNORED
        loss = F.cross_entropy(self.model(batch.tokens).logits[asked].float(), batch.targets[asked])
        self.loss = loss.item()
        if not loss.isfinite():
            self.trainer.should_stop = True
            return None
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        if self.global_step % self.recipe.every == 0:
            self.good = self.good + 1 if min(self.accuracies()) >= ENOUGH else 0
            self.trainer.should_stop |= self.good == 2

    def accuracies(self) -> tuple[float, ...]:
        return tuple(accuracy(self.model, task, seed=self.seed) for task in self.tasks)

    def configure_optimizers(self) -> dict[str, Any]:
        recipe = self.recipe
        groups = decay_groups(self.model, recipe.weight_decay)
        return one_cycle(groups, recipe.learning_rate, recipe.warmup, self.trainer)


@torch.no_grad()
def accuracy(model: nn.Module, task: Task, *, seed: int = 0, answers: int = 2048) -> float:
    """The share of right answers to about `answers` questions that no training has seen."""
    check_int("answers", answers, 1)
    training = model.training
    tokens, targets = task.batch(max(1, answers // task.answers), "test", seed)
    place, asked = next(model.parameters()).device, targets != IGNORED
    said = model.eval()(tokens.to(place)).logits.argmax(-1).cpu()
    model.train(training)
    return (said[asked] == targets[asked]).float().mean().item()


def train(
    model: nn.Module, tasks: Sequence[Task], recipe: Recipe | None = None, *, seed: int = 0, device: str = "cpu"
) -> Outcome:
    """Train `model` on the tasks in turn, and measure it on each.

    Raises OptionError where there is no task, KeyboardInterrupt when the user interrupts.
    """
    if not tasks:
        raise OptionError("tasks", "none", "at least one", "Pass [Recall(4), Recall(8)], say.")
    recipe = recipe or Recipe()
    learner = Learner(model, tasks, recipe, seed)
    with quiet():
        trainer = Trainer(
            **placed(device), max_steps=recipe.steps, gradient_clip_val=1.0, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        start = time.perf_counter()
        loader = DataLoader(Stream(tasks, recipe.tokens, seed), batch_size=None)
        until_interrupted(lambda: trainer.fit(learner, loader))
        seconds = time.perf_counter() - start
    finite = math.isfinite(learner.loss)
    return Outcome(learner.accuracies() if finite else None, trainer.global_step, seconds, learner.loss)


def state_size(model: nn.Module, task: Task) -> list[int]:
    """How many numbers each layer of a model of polymix.models.language keeps after a sequence of the task."""
    with torch.no_grad():
        tokens = task.batch(1, "state").tokens.to(next(model.parameters()).device)
        cache = model(tokens, use_cache=True).past_key_values
    kept = (getattr(layer, "state", None) or (layer.keys, layer.values) for layer in cache.layers)
    return [sum(part.numel() for part in tree_leaves(state) if isinstance(part, Tensor)) for state in kept]
