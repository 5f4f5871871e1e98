"""A language model and how it learns, as a LightningModule."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from polymix.errors import OptionError
from polymix.tasks.distill.order import number, seed_all
from polymix.tasks.text.evaluate import Held, evaluate, samples, summed_loss
from polymix.tasks.text.packing import Batch, Feed, Windows
from polymix.tasks.text.prepare import Prepared
from polymix.tasks.text.processes import shard
from polymix.tasks.text.recipe import TextRecipe
from polymix.tasks.trainer import LightningModule, decay_groups


def rate(step: int, steps: int, warmup: float, final: float) -> float:
    """Of the highest learning rate: up in a line, down by a cosine to `final` at the last step."""
    rising = max(1, round(warmup * steps))
    if step < rising:
        return (step + 1) / rising
    done = (step - rising + 1) / max(1, steps - rising)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


class TextLearner(LightningModule):
    """`note` gets a row of numbers, `say` the samples; settings: what a run can be resumed with alone.

    Order and dropout come from the seed and the step, so that an interrupted run goes on as if it had not been.
    """

    def __init__(
        self, model: Any, recipe: TextRecipe, prepared: Prepared, settings: dict[str, Any],
        note: Callable[[dict[str, Any]], None], say: Callable[[str], None],
    ) -> None:  # fmt: skip
        super().__init__()
        self.model, self.recipe, self.prepared, self.settings = model, recipe, prepared, settings
        self.average = copy.deepcopy(model).requires_grad_(False).eval() if recipe.ema else None
        self.note, self.say = note, say
        end = prepared.end if recipe.packing == "segments" else None
        self.windows = Windows(prepared.train, recipe.context, recipe.batch_size, recipe.seed, end)
        self.held = Held.of(prepared, recipe)
        self.sum: Tensor | float = 0.0
        self.numbers: dict[str, Any] = {}
        self.seen, self.clock = 0, 0.0
        if recipe.checkpointing:
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})

    @property
    def best(self) -> Any:
        """The weights that are evaluated and saved."""
        return self.model if self.average is None else self.average

    def configure_model(self) -> None:
        if self.recipe.strategy == "fsdp" and not hasattr(self, "sharded"):
            self.sharded = True
            shard(self.model, self.device_mesh["data_parallel"], learns=True)
            if self.average is not None:
                shard(self.average, self.device_mesh["data_parallel"], learns=False)

    def train_dataloader(self) -> Feed:
        trainer = self.trainer
        step: Callable[[], int] = lambda: self.global_step  # noqa: E731
        return Feed(self.windows, step, self.recipe.accumulate, trainer.global_rank, trainer.world_size)

    def configure_optimizers(self) -> dict[str, Any]:
        recipe = self.recipe
        groups = decay_groups(self.model, recipe.weight_decay)
        optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(recipe.betas[0], recipe.betas[1]))
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: rate(step, recipe.steps, recipe.warmup, recipe.final)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_start(self) -> None:
        self.clock = time.perf_counter()

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        part = batch_idx % self.recipe.accumulate
        seed_all(number(self.recipe.seed, "step", self.global_step, part, self.global_rank))

    def training_step(self, batch: Batch, index: int) -> Tensor:
        loss = summed_loss(self.model, batch) / batch["count"]
        self.sum = self.sum + loss.detach()
        self.seen += batch["input_ids"].numel() * self.trainer.world_size
        return loss * self.trainer.world_size * self.recipe.accumulate  # over which gradients are averaged

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        """And what would spoil the weights stops the run before it does."""
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
                cure = "Lower it, lengthen warmup or lower clip, and resume: the last checkpoint is from before."
                raise OptionError("learning_rate", got, "a rate at which the loss stays finite", cure)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        step = self.global_step + 1  # which is counted behind this hook
        if self.average is not None:
            self._average(self.average, step)
        if step % self.recipe.log_every == 0 or step == self.recipe.steps:
            speed = self.seen / (time.perf_counter() - self.clock)
            epochs = self.windows.epoch(step)
            self.note({"step": step, **self.numbers, "epoch": round(epochs, 4), "tokens_per_second": round(speed)})
            self._restart_clock()
        if step % self.recipe.evaluate_every == 0 or step == self.recipe.steps:
            self._evaluate(step)
            self._restart_clock()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["polymix"] = self.settings

    def _restart_clock(self) -> None:
        self.seen, self.clock = 0, time.perf_counter()

    def _average(self, average: nn.Module, step: int) -> None:
        """Of young runs a shorter one, so that the first weights do not linger."""
        decay = min(self.recipe.ema, (1 + step) / (10 + step))
        with torch.no_grad():
            for mean, value in zip(average.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(value, 1 - decay)
            for kept, now in zip(average.buffers(), self.model.buffers(), strict=True):
                kept.copy_(now)

    def _evaluate(self, step: int) -> None:
        trainer = self.trainer
        with trainer.precision_plugin.forward_context():
            said = evaluate(self.best, self.held, self.device, self.global_rank, trainer.world_size, self._total)
            told = []
            if self.prepared.tokenizer is not None:
                told = samples(self.best, self.prepared.tokenizer, self.recipe, self.device)
        self.note({"step": step, **said, "samples": told})
        for text in told:
            self.say(f"  {text!r}")

    def _total(self, value: Tensor) -> Tensor:
        """The sum over all processes."""
        return self.trainer.strategy.reduce(value, reduce_op="sum")
