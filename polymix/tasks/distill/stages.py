"""The two stages: mixers imitate their attention, then the whole model learns from labels and the original model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from polymix._io import Progress
from polymix.convert import Adapter
from polymix.convert.tracing import kept, tensors, without_fast_path
from polymix.errors import DataError, OptionError
from polymix.numbers import figure, percent
from polymix.tasks.distill.batches import LOSSES, Forward, answers_of, logits_of, plain, run
from polymix.tasks.order import Ordered, number, seed_all
from polymix.tasks.trainer import LightningModule, decay_groups, one_cycle


@dataclass(frozen=True)
class Watch:
    """Where training reports its progress: bars, and lines of text. Without bars each epoch is a line."""

    progress: Progress | None = None
    say: Callable[[str], None] = lambda line: None


class Stage(LightningModule):
    """What both stages share: the data, the optimizer, the loss of each epoch.

    Seeds come from the numbers of epoch and step, so an interrupted run that is resumed gives the result of one that
    was not. beside: modules that take part but are not in this module or its checkpoints. settings: what decides the
    result besides weights and data; a resumed run must have the same. watch: where the progress goes.
    """

    name: ClassVar[str]
    rate: ClassVar[str]  # the name of the learning rate in `distill`
    losses: Tensor  # a buffer: only the state comes back from processes that a strategy starts

    def __init__(
        self, data: Any, beside: Sequence[nn.Module], settings: dict[str, Any], *, epochs: int, learning_rate: float,
        weight_decay: float, seed: int,
    ) -> None:  # fmt: skip
        super().__init__()
        self.beside = tuple(beside)  # a tuple, in which torch does not look for modules
        self.data, self.epochs, self.seed, self.process = data, epochs, seed, os.getpid()
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self.settings = {
            "epochs": epochs, self.rate: learning_rate, "weight_decay": weight_decay, "seed": seed,
            "batches": len(data), **settings,
        }  # fmt: skip
        self.register_buffer("losses", torch.full((epochs,), torch.nan))
        self.sum: Tensor | float = 0.0
        self.hits = self.count = 0
        self.watch = Watch()
        self.step: Callable[..., None] | None = None

    def setup(self, stage: str) -> None:
        if os.getpid() != self.process:  # OpenMP's threads do not survive a fork, and waiting for them hangs
            torch.set_num_threads(1)
        for module in self.beside:
            module.to(self.device)

    def train_dataloader(self) -> Ordered:
        trainer = self.trainer
        return Ordered(self.data, self.seed, lambda: self.global_step, trainer.global_rank, trainer.world_size)

    def configure_optimizers(self) -> Any:
        return one_cycle(decay_groups(self, self.weight_decay), self.learning_rate, 0.1, self.trainer)

    def on_train_epoch_start(self) -> None:
        self.sum = 0.0
        self.hits = self.count = 0
        if self.watch.progress is not None and self.step is None and self.global_rank == 0:
            self.step = self.watch.progress.start(self.name, self.epochs * int(self.trainer.num_training_batches))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        seed_all(number(self.seed, self.name, self.global_step, self.global_rank))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.sum = self.sum + outputs["loss"].float()
        if self.trainer.world_size == 1:  # of several, one that stops would leave the others waiting
            self._check(bool(outputs["loss"].isfinite()))
        if self.step is not None:
            epoch = f"epoch {self.current_epoch + 1}/{self.epochs}"
            self.step(self.global_step, f"{epoch}, {self._figures(batch_idx + 1)}")

    def on_train_epoch_end(self) -> None:
        mean = self.trainer.strategy.reduce(self.sum / self.trainer.num_training_batches, reduce_op="mean")
        self._check(bool(mean.isfinite()) and all(bool(p.isfinite().all()) for p in self.parameters()))
        self.losses[self.current_epoch] = mean
        if self.watch.progress is None and self.global_rank == 0:
            epoch = f"{self.name.capitalize()}, epoch {self.current_epoch + 1} of {self.epochs}"
            self.watch.say(f"{epoch}: {self._figures(int(self.trainer.num_training_batches))}.")

    def _figures(self, batches: int) -> str:
        """The mean loss of this epoch so far, and the accuracy on the training data where there are classes."""
        learned = f", accuracy {percent(self.hits / self.count)}" if self.count else ""
        return f"loss {figure(float(self.sum) / batches)}{learned}"

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["polymix"] = self.settings

    def _check(self, finite: bool) -> None:
        if not finite:
            where = f"epoch {self.current_epoch + 1} of {self.name}"
            got = f"{self.learning_rate}, and in {where} a number became NaN or infinite"
            cure = "Lower it, or look for NaN in the data. The checkpoint is from the epoch before."
            raise OptionError(self.rate, got, "a rate at which the loss stays finite", cure)


class Imitation(Stage):
    """Each mixer learns its attention's output on its attention's input. Loss: mean over layers of ‖ŷ - y‖² / ‖y - ȳ‖².

    The original model runs once per batch, without gradients, and all layers learn in that pass.
    """

    name, rate = "imitation", "imitate_lr"

    def __init__(
        self, host: nn.Module, adapters: Mapping[str, Adapter], data: Any, *, forward: Forward, **options: Any
    ) -> None:
        settings = {name: part.mixer.config.to_dict() for name, part in adapters.items()}
        super().__init__(data, (host, *adapters.values()), settings, **options)
        self.layers, self.call = tuple(adapters.items()), run if forward is logits_of else forward
        self.learners = nn.ModuleList(part.mixer if part.replaced_part else part for part in adapters.values())

    def training_step(self, batch: Any, index: int) -> Tensor:
        host = self.beside[0]
        losses: list[Tensor] = []
        said: dict[nn.Module, Any] = {}

        def note(module: nn.Module, args: Any, output: Any) -> None:
            said[module] = output

        def imitate(adapter: Adapter, learner: nn.Module, module: nn.Module, args: Any, kwargs: Any, _: Any) -> None:
            args, kwargs = kept(args, kwargs)
            with torch.enable_grad():
                adapter(*args, **kwargs)
                ours, theirs = (
                    tensors(said[m])[0].float() for m in (learner, module.get_submodule(adapter.replaced_part))
                )
                losses.append((ours - theirs.detach()).square().mean() / theirs.var(correction=0).clamp_min(1e-12))

        with ExitStack() as stack, torch.no_grad(), without_fast_path():
            for (name, adapter), learner in zip(self.layers, self.learners, strict=True):
                module, now = host.get_submodule(name), partial(imitate, adapter, learner)
                for told in (learner, module.get_submodule(adapter.replaced_part)):
                    stack.callback(told.register_forward_hook(note).remove)
                stack.callback(module.register_forward_hook(now, with_kwargs=True).remove)
            self.call(host, plain(batch))
        if not losses:
            raise DataError(
                "data",
                "batches with which the model calls no converted layer",
                "batches that reach one",
                "Check forward=.",
            )
        return torch.stack(losses).mean()


class FineTuning(Stage):
    """The whole converted model learns. Loss: w_labels · cross-entropy + w_teacher · T² KL(teacher ‖ student).

    loss: "squares" takes mean squares of outputs that are no logits instead.
    """

    name, rate = "fine-tuning", "learning_rate"

    def __init__(
        self, model: nn.Module, teacher: nn.Module | None, data: Any, *, labels: float, weight: float,
        temperature: float, forward: Forward, loss: str = LOSSES[0], **options: Any,
    ) -> None:  # fmt: skip
        beside = () if teacher is None else (teacher,)
        settings: dict[str, Any] = {"labels": labels, "teacher": weight, "temperature": temperature}
        settings |= {} if loss == LOSSES[0] else {"loss": loss}  # older checkpoints do not name it
        super().__init__(data, beside, settings, **options)
        self.answer: Any = answers_of(loss)
        self.model, self.weights, self.temperature, self.call = model, (labels, weight), temperature, forward

    def training_step(self, batch: Any, index: int) -> Tensor:
        (by_label, by_teacher), batch = self.weights, plain(batch)
        ours = self.answer(self.model, batch, self.call)
        parts = [by_label * ours.label_loss()] if by_label and ours.labels is not None else []
        if ours.labels is not None and ours.labels.ndim == 1:
            self.hits += int((ours.logits.argmax(-1) == ours.labels)[ours.real].sum())
            self.count += int(ours.real.sum())
        for teacher in self.beside:
            with torch.no_grad():
                theirs = self.answer(teacher, batch, self.call)
            parts.append(by_teacher * ours.teacher_loss(theirs, self.temperature))
        if not parts:
            raise DataError(
                "data", "a batch without labels, and no teacher", "labels in every batch", "Pass teacher=1.0, say."
            )
        return torch.stack(parts).sum()
