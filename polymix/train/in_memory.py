"""Train a model of one's own by a task's recipe, without a folder: for studies, comparisons and tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from polymix.measure import Stopwatch
from polymix.train.data.sampling import isolated_random_state, number, seed_all
from polymix.train.evaluation import evaluating
from polymix.train.loop import Watch, fit
from polymix.train.place import Place
from polymix.train.resume import load_whole_state
from polymix.train.task import Data, Task


@dataclass
class Fitted:
    """A trained model in evaluation mode, on its device.

    Attributes:
        losses: of every step. rows: as metrics.jsonl would have them. steps: that were done. seconds: of the training.
    """

    model: nn.Module
    losses: list[float] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0

    @property
    def latest(self) -> dict[str, Any]:
        """The last value of each measurement."""
        return {name: value for row in self.rows for name, value in row.items()}

    def details(self, task: Task[Any, Any], data: Data) -> dict[str, Any]:
        """`task.details` of the model: its metrics on the held-out part, and what else the task returns."""
        place = Place(task.recipe)
        with place.autocast(), evaluating(self.model):
            return task.details(self.model, data, place.process_of(task))


def train_in_memory(
    task: Task[Any, Any], data: Data | None = None, build: Callable[[], nn.Module] | None = None, *,
    on_step: Callable[[int], None] = lambda step: None,
) -> Fitted:  # fmt: skip
    """Train a model by `task.recipe` in the loop of `polymix train`, and keep it in memory.

    The recipe's seed decides weights, the order of the data and dropout. With `evaluate_every` None nothing
    is measured before the end.

    Args:
        data: None: what `task.load` returns. build: makes the model; None: `task.build`.
        on_step: called with the number of steps that are done.
    Raises:
        OptionError: the loss is not finite, as in `polymix.train.loop.fit`.
    """
    losses: list[float] = []
    rows: list[dict[str, Any]] = []

    def note(step: int, numbers: dict[str, Any]) -> None:
        losses.append(numbers["loss"])
        on_step(step)

    with TemporaryDirectory() as scratch, isolated_random_state():
        data = task.load(Path(scratch)) if data is None else data
        task.recipe = recipe = task.recipe.for_data(task.epoch(data, 1))
        seed_all(number(recipe.seed, "weights"))
        model = task.build(data) if build is None else build()
        clock = Stopwatch()
        trained = fit(task, data, model, Place(recipe), Watch(rows.append, note))
        seconds = clock.seconds()
    load_whole_state(model, trained.weights)
    return Fitted(model.eval(), losses, rows, trained.steps, seconds)
