"""How a model learns: the base class of every task's learner, as a LightningModule."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from polymix.errors import OptionError
from polymix.tasks.order import Endless, Seeded, number, seed_all
from polymix.tasks.processes import Process, shard
from polymix.tasks.trainer import LightningModule, cycled, decay_groups, isolate_rng


def rate(step: int, steps: int, warmup: float, final: float) -> float:
    """The learning rate of a step as a share of the highest: a linear rise, then a cosine down to `final`."""
    rising = max(1, round(warmup * steps))
    if step < rising:
        return (step + 1) / rising
    done = (step - rising + 1) / max(1, steps - rising)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def stepped_rate(step: int, rising: int, falls: Sequence[int]) -> float:
    """The learning rate of a step as a share of the highest: a linear rise, then a tenth after each of `falls`."""
    if step < rising:
        return (step + 1) / rising
    return 0.1 ** sum(step >= fall for fall in falls)


@contextmanager
def resting(model: nn.Module) -> Iterator[None]:
    """The model in evaluation, without gradients; the random state is restored afterwards."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), isolate_rng():
            yield
    finally:
        model.train(training)


class Learner(LightningModule):
    """A model, its data and its recipe. A task's `Learner` is a subclass that has at least `loss`.

    The order of the data and dropout depend on the seed and the step alone, so a resumed run gives the result of one
    that was never interrupted.
    """

    unit = "samples"  # what is counted per second
    order_class: Any = Endless  # the order of the training samples
    measures_plain: tuple[str, ...] = ()  # metrics of the weights that are not averaged too, at the end, as NAME_plain

    def __init__(self, model: Any, recipe: Any, data: Any) -> None:
        super().__init__()
        self.model, self.recipe, self.data = model, recipe, data
        self.average = copy.deepcopy(model).requires_grad_(False).eval() if recipe.ema else None
        self.settings: dict[str, Any] = {}  # what a resumed run must have in common with this one
        self.note: Callable[[dict[str, Any]], None] = lambda row: None  # takes a row of numbers
        self.measure: Callable[[Any, Process], dict[str, Any]] = lambda model, process: {}
        self.validate: Callable[[Any, Process], tuple[dict[str, Any], float]] | None = None  # numbers, and how good
        self.kept: dict[str, Any] = {}  # with `validate`: step, score and weights of the best evaluation
        self.sum: Tensor | float = 0.0
        self.numbers: dict[str, Any] = {}
        self.seen, self.clock = 0, 0.0
        self.last_batch: Any = None  # on which speed and memory are measured
        if recipe.checkpointing:
            enable = getattr(model, "activation_checkpointing_enable", None) or getattr(
                model, "gradient_checkpointing_enable", None
            )
            if enable is None:
                got = f"True for a {type(model).__name__}"
                raise OptionError("checkpointing", got, "False", "This model cannot compute its blocks again.")
            enable({"use_reentrant": False})

    # -- what a task may write itself

    def loss(self, batch: Any) -> Tensor:
        """The mean loss of a batch."""
        raise NotImplementedError(f"{type(self).__name__} has no loss(batch)")

    def infer(self, batch: Any) -> Any:
        """What the model computes for a batch in use; timed for items per second. Default: the loss, forward alone."""
        return self.loss(batch)

    def optimizers_and_schedule(self) -> dict[str, Any]:
        """The optimizer and its schedule as `configure_optimizers` returns them; default: AdamW, warm-up and cosine."""
        recipe = self.recipe
        groups = decay_groups(self.model, recipe.weight_decay)
        optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(recipe.betas[0], recipe.betas[1]))
        return self.with_schedule(optimizer)

    def before_measuring(self, model: Any) -> None:
        """Called in evaluation, without gradients, before `model` is measured; the last time before it is saved."""

    def shown_at(self, step: int) -> bool:
        """Whether `before_measuring` is called after this step too, without a measurement; default: never."""
        return False

    def train_dataloader(self) -> Any:
        """Batches of `data.train`, a data set, joined by `data.collate` if there is one; without end."""
        recipe, dataset, trainer = self.recipe, self.data.train, self.trainer
        places = self.order_class(
            len(dataset), recipe.batch_size, recipe.seed, lambda: self.global_step, recipe.accumulate,
            trainer.global_rank, trainer.world_size,
        )  # fmt: skip
        options: dict[str, Any] = {"num_workers": recipe.workers, "collate_fn": getattr(self.data, "collate", None)}
        return DataLoader(Seeded(dataset, recipe.seed), batch_sampler=places, **options)

    def epoch(self, step: int) -> float:
        """How often the training data had been seen before a step."""
        return step * self.recipe.batch_size / len(self.data.train)

    def size(self, batch: Any) -> int:
        """How many `unit`s a batch has."""
        return self.recipe.part_size // self.trainer.world_size

    # -- what all tasks share

    @property
    def best(self) -> Any:
        """The weights that are evaluated and saved."""
        return self.model if self.average is None else self.average

    @property
    def process(self) -> Process:
        trainer = self.trainer
        return Process(self.device, trainer.global_rank, trainer.world_size, self._total)

    def configure_model(self) -> None:
        if self.recipe.strategy == "fsdp" and not hasattr(self, "sharded"):
            self.sharded = True
            shard(self.model, self.device_mesh["data_parallel"], learns=True)
            if self.average is not None:
                shard(self.average, self.device_mesh["data_parallel"], learns=False)

    def configure_optimizers(self) -> dict[str, Any]:
        return self.optimizers_and_schedule()

    def with_schedule(self, optimizer: Any, share: Callable[[int], float] | None = None) -> dict[str, Any]:
        """An optimizer with a schedule by steps: every rate times `share(step)`; default: warm-up and cosine decay."""
        recipe = self.recipe
        share = share or (lambda step: rate(step, recipe.steps, recipe.warmup, recipe.final))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def cycled_or_scheduled(self, optimizer: Any) -> dict[str, Any]:
        """`with_schedule`, or one cycle as point clouds are trained, for recipes with the option `one_cycle`."""
        recipe = self.recipe
        if not recipe.one_cycle:
            return self.with_schedule(optimizer)
        return cycled(optimizer, recipe.steps, recipe.warmup, 0.1, recipe.final)

    def with_milestones(self, optimizer: Any, milestones: Sequence[float]) -> dict[str, Any]:
        """An optimizer whose rates rise in the warm-up, and are a tenth after each of `milestones`, shares of steps."""
        rising = round(self.recipe.warmup * self.recipe.steps)
        falls = [round(share * self.recipe.steps) for share in milestones]
        return self.with_schedule(optimizer, partial(stepped_rate, rising=rising, falls=falls))

    def on_train_start(self) -> None:
        self.clock = time.perf_counter()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.last_batch = batch
        part = batch_idx % self.recipe.accumulate
        seed_all(number(self.recipe.seed, "step", self.global_step, part, self.global_rank))

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = self.loss(batch)
        self.sum = self.sum + loss.detach() / (self.trainer.world_size * self.recipe.accumulate)
        self.seen += self.size(batch) * self.trainer.world_size
        return loss

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        """Clip the gradient, and stop the run before a number that is not finite reaches the weights."""
        norm: Any = nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        loss = self._total(torch.as_tensor(self.sum, device=self.device))
        self.numbers = {
            "loss": loss.item(),
            "gradient_norm": norm.item(),
            "learning_rate": optimizer.param_groups[0]["lr"],
        }
        self.sum = 0.0
        for what in ("loss", "gradient_norm"):
            if not math.isfinite(self.numbers[what]):
                got = f"{self.recipe.learning_rate}, and {what} is {self.numbers[what]} at step {self.global_step + 1}"
                kept = self.global_step >= self.recipe.checkpoint_every
                after = "resume: the last checkpoint is from before" if kept else "start anew: no checkpoint exists yet"
                cure = f"Lower it, lengthen warmup or lower clip, and {after}."
                raise OptionError("learning_rate", got, "a rate at which the loss stays finite", cure)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        step = self.global_step + 1  # Lightning counts it after this hook
        if self.average is not None:
            self._average(self.average, step)
        if step % self.recipe.log_every == 0 or step == self.recipe.steps:
            speed = self.seen / (time.perf_counter() - self.clock)
            seen = {
                "epoch": round(self.epoch(step), 4),
                f"{self.unit}_per_second": round(speed, 0 if speed >= 100 else 3),
            }
            self.note({"step": step, **self.numbers, **seen})
            self._restart_clock()
        measured = step % self.recipe.evaluate_every == 0 or step == self.recipe.steps
        if measured or self.shown_at(step):
            found: dict[str, Any] = {}
            with self.trainer.precision_plugin.forward_context(), resting(self.best):
                self.before_measuring(self.best)
                if measured:
                    found = self.measure(self.best, self.process) if self.validate is None else self._choose(step)
            if self.measures_plain and self.average is not None and step == self.recipe.steps:
                with self.trainer.precision_plugin.forward_context(), resting(self.model):
                    plain = self.measure(self.model, self.process)
                found |= {f"{name}_plain": plain[name] for name in self.measures_plain if name in plain}
            if measured:
                self.note({"step": step, **found})
            self._restart_clock()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["polymix"] = self.settings
        if self.kept:
            checkpoint["polymix_kept"] = self.kept

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.kept = checkpoint.get("polymix_kept", {})

    def _choose(self, step: int) -> dict[str, Any]:
        """Validate, and keep the weights if they are the best so far. After the last step, load and measure those."""
        assert self.validate is not None
        found, score = self.validate(self.best, self.process)
        if not self.kept or score > self.kept["score"]:
            weights = {name: value.detach().cpu().clone() for name, value in self.best.state_dict().items()}
            self.kept = {"step": step, "score": score, "weights": weights}
        if step < self.recipe.steps:
            return found
        self.best.load_state_dict(self.kept["weights"])
        return {**self.measure(self.best, self.process), **found, "kept_step": self.kept["step"]}

    def _restart_clock(self) -> None:
        self.seen, self.clock = 0, time.perf_counter()

    def _average(self, average: nn.Module, step: int) -> None:
        """Update the averaged weights. The decay is lower in the first steps, so that the first weights fade soon."""
        decay = min(self.recipe.ema, (1 + step) / (10 + step))
        with torch.no_grad():
            for mean, value in zip(average.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(value, 1 - decay)
            for kept, now in zip(average.buffers(), self.model.buffers(), strict=True):
                kept.copy_(now)

    def _total(self, value: Tensor) -> Tensor:
        """The sum over all processes."""
        return self.trainer.strategy.reduce(value, reduce_op="sum")
