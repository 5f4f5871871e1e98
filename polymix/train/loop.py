"""The training loop: from a task, its data and a fresh model to trained weights, step by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polymix.measure import Stopwatch
from polymix.train.averages import averaged
from polymix.train.counted import CountedTask, over
from polymix.train.data.sampling import Slices, number, seed_all
from polymix.train.evaluation import Row, Selection, evaluating
from polymix.train.place import Place, slices_of
from polymix.train.resume import load_checkpoint, save_checkpoint, whole_state
from polymix.train.task import Data, Task


class Learner(nn.Module):
    """A model whose forward pass is the task's loss, so that all of the loss lies inside DistributedDataParallel.

    The losses of processes that share a sequence add up to its loss. alike: how many of them compute the same one.
    """

    def __init__(self, task: Task[Any, Any], model: nn.Module, alike: int = 1) -> None:
        super().__init__()
        self.task: Any = task
        self.model, self.alike = model, alike

    def forward(self, batch: Any, counts: Tensor | None = None) -> Tensor:
        """counts: of a `CountedTask`, the mean over the slices of the step."""
        if counts is None:
            return self.task.loss(self.model, batch) / self.alike
        return over(self.task.sums(self.model, batch), counts) / self.alike


@dataclass
class Watch:
    """Who is told of a training.

    Args:
        journal: takes the rows of metrics.jsonl. on_step: takes the number of steps that are done, and their numbers.
    """

    journal: Callable[[Row], None] = lambda row: None
    on_step: Callable[[int, Row], None] = lambda step, numbers: None


@dataclass
class Trained:
    """The outcome: whole weights by name, the steps that were done, a batch to measure speed on, and speeds by row."""

    weights: dict[str, Any]
    steps: int
    last_batch: Any = None
    speeds: list[float] = field(default_factory=list)


def fit(
    task: Task[Any, Any],
    data: Data,
    model: nn.Module,
    place: Place,
    watch: Watch,
    *,
    settings: Mapping[str, Any] | None = None,
    checkpoint: Path | None = None,
    before: Mapping[str, Any] | None = None,
) -> Trained:
    """Train a model in place.

    The order of the data and dropout depend on seed, step and slice alone, so a resumed run, also on another number of
    processes, sees the samples of one that was never interrupted; the sums over slices are equal up to rounding.

    Args:
        settings: what a resumed run must have in common with this one; the checkpoint keeps it.
        checkpoint: where to write checkpoints; None: none are written.
        before: the content of the checkpoint to go on from; None: a fresh start.
    Raises:
        OptionError: the loss or the gradient's norm is not finite; the weights and the last checkpoint are from before.
    """
    recipe = task.recipe
    step = 0 if before is None else int(before["step"])
    task.slices = slices = Slices(
        step, slices_of(recipe, place.batch_world, before), place.batch_rank, place.batch_world
    )
    average = averaged(model, recipe.ema, recipe.ema_rise, recipe.ema_buffers) if recipe.ema else None
    for weights in (model,) if average is None else (model, average.module):
        place.split(task, weights)
    place.shard(model)
    best: nn.Module = model if average is None else place.shard(average.module, learns=False)
    alike = place.shares if task.splits == "blocks" else 1
    learner = place.in_step(Learner(task, model, alike))
    process = place.process_of(task)
    optimizer = task.optimizer(model)
    schedule = task.schedule(optimizer)
    models = {"model": model} if average is None else {"model": model, "average": best}
    selection = Selection(task, data, before)
    if before is not None:
        load_checkpoint(before, models, optimizer, schedule)
        place.scaler.load_state_dict(before["scaler"])
        task.load_state(data, before["task"])
        if average is not None:
            average.n_averaged.fill_(step + 1)
    batches, shares = iter(task.batches(data, slices)), len(slices.mine)
    trained = Trained({}, step)
    evaluations: list[Row] = []
    numbers: Row = {}
    seen, clock = 0.0, Stopwatch()

    def measured(weights: nn.Module, held_out: Data) -> Row:
        with place.autocast(), evaluating(weights):
            return task.checked(task.measure(weights, held_out, process))

    def prepared() -> None:
        with place.autocast(), evaluating(best):
            task.prepare(best, data, step)

    def gradients(parts: list[Any], counts: Tensor | None, attempt: int) -> Tensor:
        """Leave the clipped gradient of the step's mean loss in the parameters; returns this process's share of it."""
        optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), device=place.device)
        for turn, (which, batch) in enumerate(zip(slices.mine, parts, strict=True)):
            seed_all(number(recipe.seed, "step", step, which, attempt))
            with place.unsynchronised(learner, turn + 1 < shares):
                with place.autocast():
                    value = learner(batch, counts)
                place.scaler.scale(value * place.shares / shares).backward()  # averaged over all
            loss += value.detach() / slices.total
        place.scaler.unscale_(optimizer)
        bound = recipe.clip if recipe.clip_by == "norm" and recipe.clip is not None else math.inf
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), bound)
        if recipe.clip_by == "value" and recipe.clip is not None:
            nn.utils.clip_grad_value_(model.parameters(), recipe.clip)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if not attempt:
            numbers.update(loss=place.total(loss).item(), gradient_norm=norm.item())
            for what in ("loss", "gradient_norm"):
                overflows = what == "gradient_norm" and place.scaler.is_enabled()  # which the scaler answers
                if not overflows and not math.isfinite(numbers[what]):
                    raise task.not_finite(what, numbers[what], step + 1)
        return loss

    if selection.best and task.start_counts and before is None:
        selection.take(best, measured(best, selection.part), step)
    while step < recipe.steps:
        model.train()
        task.advance(model, step)
        wholes, counts = [], None
        for which in slices.mine:
            batch = place.move(next(batches))
            seed_all(number(recipe.seed, "augment", step, which))
            wholes.append(task.augmented(batch))
        if isinstance(task, CountedTask):
            counts = place.mean([task.counts(model, batch) for batch in wholes], slices.total)
        parts = [place.local(task, batch) for batch in wholes]
        numbers["learning_rate"] = optimizer.param_groups[0]["lr"]
        if place.scaler.is_enabled():
            gradients(parts, counts, 0)
            place.scaler.step(optimizer)
            place.scaler.update()
        else:
            attempts = iter(range(1 << 30))  # an optimizer may ask for the gradient at another place too
            optimizer.step(lambda: gradients(parts, counts, next(attempts)))  # type: ignore[arg-type, return-value]  # noqa: B023
        schedule.step()
        step += 1
        if average is not None:
            average.update_parameters(model)
        seen += sum(task.size(part) for part in parts) * place.world / alike
        trained.last_batch = parts[-1]
        watch.on_step(step, numbers)
        at_end = step == recipe.steps
        if step % recipe.steps_between_rows == 0 or at_end:
            speed = seen / clock.seconds()
            trained.speeds.append(speed)
            rounded = round(speed, 0 if speed >= 100 else 3)
            epoch = round(task.epoch(data, step), 4)
            watch.journal({"step": step, **numbers, "epoch": epoch, f"{task.unit}_per_second": rounded})
            seen = 0.0
            clock.restart()
        due = step % recipe.steps_between_evaluations == 0 or at_end
        if due or task.shown_at(step):
            prepared()
        if due:
            row = selection.take(best, measured(best, selection.part), step)
            if at_end and selection.best:
                chosen = selection.restore(best)
                row = {**measured(best, data), **row, **chosen}
            if at_end and task.plain and average is not None:
                plain = measured(model, data)
                row |= {f"{name}_plain": plain[name] for name in task.plain if name in plain}
            with evaluating(best), place.alone(task, best):
                texts = task.samples(best, data, process)
            for text in texts:
                task.say(f"  {text!r}")
            evaluations.append(row)
            if row:
                watch.journal({"step": step, **row, **({"samples": texts} if texts else {})})
            at_end = at_end or task.done_early(evaluations)
        if due or task.shown_at(step):
            seen = 0.0
            clock.restart()
        if checkpoint is not None and (step % recipe.checkpoint_every == 0 or at_end):
            content = {"settings": dict(settings or {}), "step": step, "slices": slices.total, "kept": selection.kept,
                       "scaler": place.scaler.state_dict(), "task": task.state(data)}  # fmt: skip
            writes = place.rank == 0
            save_checkpoint(checkpoint, content, models, optimizer, schedule, writes=writes, sharded=place.sharded)
        if at_end:
            break
    trained.steps, trained.weights = step, whole_state(best)
    return trained
