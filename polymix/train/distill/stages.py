"""The two stages: mixers imitate their attention, then the whole model learns from labels and the original model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.checkpoint import checkpoint

from polymix.convert import Adapter
from polymix.convert.tracing import copied_arguments, tensors, without_fast_path
from polymix.errors import DataError, DivergedError
from polymix.numbers import figure, percent
from polymix.results import Progress
from polymix.train.data.sampling import Slices
from polymix.train.distill.batches import LOSSES, Forward, answers_of, logits_of, plain, run
from polymix.train.distill.order import epochs_of
from polymix.train.distill.pieces import as_they_are, carried, cut, fresh_cache
from polymix.train.distill.progressive import StandIns
from polymix.train.optimizers import one_cycle
from polymix.train.recipe import Recipe
from polymix.train.task import Data, Process, Task


@dataclass(frozen=True)
class Listener:
    """Where training reports its progress: bars, and lines of text. Without bars each epoch is a line."""

    progress: Progress | None = None
    say: Callable[[str], None] = lambda line: None


class Batches(Data):
    """The user's own batches."""

    def __init__(self, loader: Any) -> None:
        self.train = loader


class Stage(Task[Recipe, Batches]):
    """What both stages share: the order of the data, the optimizer, the loss of each epoch.

    Args:
        model: what learns. beside: modules that take part but do not learn.
        settings: what decides the result besides weights and data; a resumed run must have the same.
    """

    rate: ClassVar[str]  # the name of the learning rate in `distill`
    metrics = ()

    def __init__(
        self, recipe: Recipe, loader: Any, model: nn.Module, beside: Sequence[nn.Module], settings: dict[str, Any],
        listener: Listener, *, epochs: int,
    ) -> None:  # fmt: skip
        super().__init__(recipe, listener.say)
        self.model, self.beside, self.listener, self.epochs = model, tuple(beside), listener, epochs
        self.data, self.epoch_steps = Batches(loader), recipe.checkpoint_every
        self.settings_of_run = {
            "epochs": epochs, self.rate: recipe.learning_rate, "weight_decay": recipe.weight_decay, "seed": recipe.seed,
            "batches": len(loader), "precision": recipe.precision, **settings,
        }  # fmt: skip
        self.losses: list[float] = []  # the mean of each epoch
        self.sum = 0.0
        self.hits = self.count = 0
        self.bar: Callable[..., None] | None = None

    def load(self, folder: Path) -> Batches:
        return self.data

    def build(self, data: Batches) -> nn.Module:
        return self.model

    def batches(self, data: Batches, slices: Slices) -> Iterator[Any]:
        return epochs_of(data.train, self.recipe.seed, slices)

    def size(self, batch: Any) -> float:
        return 1.0

    def epoch(self, data: Batches, step: int) -> float:
        return step / self.epoch_steps

    def schedule(self, optimizer: torch.optim.Optimizer) -> LRScheduler:
        return one_cycle(optimizer, self.recipe.steps, self.recipe.warmup)

    def measure(self, model: nn.Module, data: Batches, process: Process) -> dict[str, float]:
        return {}  # `distill` measures between the stages

    def state(self, data: Batches) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state(self, data: Batches, state: Mapping[str, Any]) -> None:
        self.losses = list(state["losses"])

    def not_finite(self, what: str, value: float, step: int) -> DivergedError:
        where = f"epoch {(step - 1) // self.epoch_steps + 1} of {self.name}"
        got = f"{self.recipe.learning_rate}, and in {where} {what} is {value}"
        cure = "Lower it, or look for NaN in the data. The checkpoint is from the epoch before."
        return DivergedError(self.rate, got, "a rate at which the loss stays finite", cure)

    def after_step(self, step: int, numbers: Mapping[str, Any]) -> None:
        """Count a step's loss, and report. Raises OptionError at the end of an epoch that left weights not finite."""
        self.sum += numbers["loss"]
        epoch, place = divmod(step - 1, self.epoch_steps)
        batches = place + 1
        if batches == self.epoch_steps:
            if not all(bool(part.isfinite().all()) for part in self.model.parameters()):
                raise self.not_finite("a weight", float("nan"), step)
            self.losses.append(self.sum / batches)
        if self.slices.rank == 0:
            if self.bar is None and self.listener.progress is not None:
                self.bar = self.listener.progress.start(self.name, self.recipe.steps)
            if self.bar is not None:
                self.bar(step, f"epoch {epoch + 1}/{self.epochs}, {self._figures(batches)}")
            elif batches == self.epoch_steps:
                self.say(f"{self.name.capitalize()}, epoch {epoch + 1} of {self.epochs}: {self._figures(batches)}.")
        if batches == self.epoch_steps:
            self.sum, self.hits, self.count = 0.0, 0, 0

    def _figures(self, batches: int) -> str:
        """The mean loss of this epoch so far, and the accuracy on the training data where there are classes."""
        learned = f", accuracy {percent(self.hits / self.count)}" if self.count else ""
        return f"loss {figure(self.sum / batches)}{learned}"


class Resting(nn.ModuleList):
    """Modules that learn in evaluation mode, as they were given."""

    def train(self, mode: bool = True) -> Resting:
        return self


class Imitation(Stage):
    """Each mixer learns its attention's output on its attention's input. Loss: mean over layers of ‖ŷ - y‖² / ‖y - ȳ‖².

    The original model runs once per batch, without gradients, and all layers learn in that pass.
    """

    name, rate = "imitation", "imitate_lr"

    def __init__(
        self, recipe: Recipe, loader: Any, host: nn.Module, adapters: Mapping[str, Adapter], listener: Listener, *,
        forward: Forward, epochs: int,
    ) -> None:  # fmt: skip
        learners = Resting(part.mixer if part.replaced_part else part for part in adapters.values())
        settings = {name: part.mixer.config.to_dict() for name, part in adapters.items()}
        super().__init__(recipe, loader, learners, (host, *adapters.values()), settings, listener, epochs=epochs)
        self.layers, self.call = tuple(adapters.items()), run if forward is logits_of else forward
        self.learners = learners

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        host = self.beside[0]
        losses: list[Tensor] = []
        outputs: dict[nn.Module, Any] = {}

        def note(module: nn.Module, args: Any, output: Any) -> None:
            outputs[module] = output

        def imitate(adapter: Adapter, learner: nn.Module, module: nn.Module, args: Any, kwargs: Any, _: Any) -> None:
            args, kwargs = copied_arguments(args, kwargs)
            with torch.enable_grad():
                adapter(*args, **kwargs)
                losses.append(
                    imitation_loss(*(outputs[part] for part in (learner, module.get_submodule(adapter.replaced_part))))
                )

        with ExitStack() as stack, torch.no_grad(), without_fast_path():
            for (name, adapter), learner in zip(self.layers, self.learners, strict=True):
                module, now = host.get_submodule(name), partial(imitate, adapter, learner)
                for watched in (learner, module.get_submodule(adapter.replaced_part)):
                    stack.callback(watched.register_forward_hook(note).remove)
                stack.callback(module.register_forward_hook(now, with_kwargs=True).remove)
            self.call(host, plain(batch))
        if not losses:
            got, allowed = "batches with which the model calls no converted layer", "batches that reach one"
            raise DataError("data", got, allowed, "Check forward=.")
        return torch.stack(losses).mean()


class FineTuning(Stage):
    """The whole converted model learns. Loss: w_labels · cross-entropy + w_teacher · T² KL(teacher ‖ student).

    loss: "squares" takes mean squares of outputs that are no logits instead, "features" of the last features. `blocks`
    adds the imitation's loss of each layer with a mixer, between the two models. plan: of `progressive.schedule`.
    """

    name, rate = "fine-tuning", "learning_rate"

    def __init__(
        self, recipe: Recipe, loader: Any, model: nn.Module, teacher: nn.Module | None, listener: Listener, *,
        labels: float, weight: float, temperature: float, forward: Forward, epochs: int, loss: str = LOSSES[0],
        lora: int | None = None, piece: int | None = None, adapters: Mapping[str, Adapter] | None = None,
        blocks: float = 0.0, plan: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        settings = {"labels": labels, "teacher": weight, "temperature": temperature, "loss": loss, "lora": lora}
        settings |= {} if piece is None else {"piece": piece}
        settings |= {"blocks": blocks} if blocks else {}
        settings |= {"plan": dict(plan)} if plan else {}
        super().__init__(
            recipe, loader, model, () if teacher is None else (teacher,), settings, listener, epochs=epochs
        )
        self.answer: Any = answers_of(loss)
        self.weights, self.temperature, self.call, self.piece = (labels, weight), temperature, forward, piece
        self.stand_ins, self.blocks, self.done = StandIns(adapters or {}, teacher, plan or {}), blocks, 0

    def batches(self, data: Batches, slices: Slices) -> Iterator[Any]:
        self.done = slices.step
        return super().batches(data, slices)

    def after_step(self, step: int, numbers: Mapping[str, Any]) -> None:
        self.done = step
        super().after_step(step, numbers)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        batch = plain(batch)
        if self.piece is not None:
            return self._in_pieces(model, batch, self.piece)
        mixing = self.stand_ins.at(self.done)
        with ExitStack() as stack:
            pairs = _outputs(stack, mixing, self.beside[0]) if self.blocks else {}
            ours = self.answer(model, batch, self.call)
            with torch.no_grad():
                theirs = [self.answer(teacher, batch, self.call) for teacher in self.beside]
        loss, hits = self._compared(ours, theirs)
        if hits is not None:
            self.hits, self.count = self.hits + int(hits), self.count + int(ours.real.sum())
        blocks = [imitation_loss(*pair) for pair in pairs.values() if len(pair) == 2]
        return loss + self.blocks * torch.stack(blocks).mean() if blocks else loss

    def _in_pieces(self, model: nn.Module, batch: dict[str, Any], piece: int) -> Tensor:
        """The mean loss over a batch of sequences that are computed piece by piece."""
        call = as_they_are if self.call is logits_of else self.call
        caches: list[Any] = [fresh_cache(each) for each in (model, *self.beside)]
        sums, rows = [], 0
        for part in cut(model, batch, piece, self.call):

            def answered(place: int, each: nn.Module, part: Any = part, before: Any = tuple(caches)) -> Any:
                caches[place] = carried(before[place])
                return self.answer(each, {**part, "past_key_values": caches[place], "use_cache": True}, call)

            with torch.no_grad():
                theirs = [answered(place, teacher) for place, teacher in enumerate(self.beside, 1)]

            def compared(theirs: Any = theirs, answered: Any = answered) -> tuple[Tensor, Tensor | None, Tensor]:
                ours = answered(0, model)
                return *self._compared(ours, theirs), ours.real.sum()

            loss, hits, count = checkpoint(compared, use_reentrant=False)
            if int(count):
                sums.append(loss * count)
                rows += int(count)
            if hits is not None:
                self.hits, self.count = self.hits + int(hits), self.count + int(count)
        return torch.stack(sums).sum() / rows if sums else loss

    def _compared(self, ours: Any, theirs: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
        """The loss of a model's answers, and how many of them are right, where there are classes."""
        by_label, by_teacher = self.weights
        parts = [by_label * ours.label_loss()] if by_label and ours.labels is not None else []
        hits = None
        if ours.labels is not None and ours.labels.ndim == 1:
            hits = (ours.logits.argmax(-1) == ours.labels)[ours.real].sum()
        parts += [by_teacher * ours.teacher_loss(each, self.temperature) for each in theirs]
        if not parts:
            got = "a batch without labels, and no teacher"
            raise DataError("data", got, "labels in every batch", "Pass teacher=1.0, say.")
        return torch.stack(parts).sum(), hits


def _outputs(stack: ExitStack, adapters: Mapping[str, Adapter], teacher: nn.Module) -> dict[str, list[Any]]:
    """What each layer returns in a pass of the student, then in one of the teacher, by hooks that `stack` removes."""
    pairs: dict[str, list[Any]] = {name: [] for name in adapters}
    for name, adapter in adapters.items():
        for part in (adapter, teacher.get_submodule(name)):
            note = partial(_note, pairs[name])
            stack.callback(part.register_forward_hook(note).remove)
    return pairs


def _note(outputs: list[Any], module: nn.Module, args: Any, output: Any) -> None:
    outputs.append(output)


def imitation_loss(ours: Any, theirs: Any) -> Tensor:
    """‖ŷ - y‖² / ‖y - ȳ‖², the mean over the tensors y that both layers return, such as those of two streams."""
    pairs = [pair for pair in zip(tensors(ours), tensors(theirs), strict=False) if pair[0].shape == pair[1].shape]
    losses = [
        (y.float() - truth.detach().float()).square().mean() / truth.detach().float().var(correction=0).clamp_min(1e-12)
        for y, truth in pairs
    ]
    return torch.stack(losses).mean()
