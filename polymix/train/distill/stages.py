"""The two stages: mixers imitate their attention, then the whole model learns from labels and the original model."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from polymix.convert import Adapter
from polymix.convert.tracing import copied_arguments, tensors, without_fast_path
from polymix.errors import DataError, DivergedError
from polymix.numbers import figure, percent
from polymix.results import Progress
from polymix.train.data.sampling import Slices
from polymix.train.distill.batches import Forward, logits_of, moved, plain, run
from polymix.train.distill.comparison import Comparison
from polymix.train.distill.guard import HeldBack
from polymix.train.distill.order import epochs_of
from polymix.train.distill.progressive import StandIns
from polymix.train.optimizers import rated_groups
from polymix.train.recipe import Recipe
from polymix.train.task import Data, Metric, Process, Task


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
    """What both stages share: the order of the data, the loss of each epoch, and the loss on what was held back.

    With keep="best" the weights are kept that are best on what was held back, those before the first step included.

    Args:
        model: what learns. beside: modules that take part but do not learn. held: what is not learnt from.
        settings: what decides the result besides weights and data; a resumed run must have the same.
    """

    rate: ClassVar[str]  # the name of the learning rate in `distill`
    metrics = (Metric("held_back", better="lower"),)
    start_counts = True

    def __init__(
        self, recipe: Recipe, loader: Any, model: nn.Module, beside: Sequence[nn.Module], settings: dict[str, Any],
        listener: Listener, held: HeldBack, *, epochs: int,
    ) -> None:  # fmt: skip
        super().__init__(recipe, listener.say)
        self.model, self.beside, self.listener, self.epochs = model, tuple(beside), listener, epochs
        self.data, self.epoch_steps, self.held = Batches(loader), recipe.checkpoint_every, held
        self.watched = Batches(held.batches)
        self.settings_of_run = {
            "epochs": epochs, self.rate: recipe.learning_rate, "weight_decay": recipe.weight_decay, "seed": recipe.seed,
            "batches": len(loader), "precision": recipe.precision, "keep": recipe.keep, **settings,
        }  # fmt: skip
        self.done = 0  # steps
        self.losses: list[float] = []  # the mean of each epoch
        self.looks: dict[int, float] = {}  # the loss on what was held back, after so many steps
        self.sum = 0.0
        self.hits = self.count = 0
        self.bar: Callable[..., None] | None = None

    def load(self, folder: Path) -> Batches:
        return self.data

    def build(self, data: Batches) -> nn.Module:
        return self.model

    def batches(self, data: Batches, slices: Slices) -> Iterator[Any]:
        self.done = slices.step
        return epochs_of(data.train, self.recipe.seed, slices)

    def size(self, batch: Any) -> float:
        return 1.0

    def epoch(self, data: Batches, step: int) -> float:
        return step / self.epoch_steps

    def validation(self, data: Batches) -> Batches:
        return self.watched

    def measure(self, model: nn.Module, data: Batches, process: Process) -> dict[str, float]:
        if data is not self.watched:
            return {}  # `distill` measures the held-out data between the stages
        mine = torch.tensor(self.held_back_loss(process), dtype=torch.float64)
        # Statistics of batch norms differ between processes; the weights to keep must not.
        value = mine if process.world == 1 else process.total(mine.float().to(process.device)).cpu() / process.world
        self.looks[self.done] = float(value)
        return {"held_back": self.looks[self.done]}

    @abstractmethod
    def held_back_loss(self, process: Process) -> float:
        """The loss on what was held back, in evaluation mode and without gradients."""

    @property
    def kept_step(self) -> int | None:
        """The steps after which the weights were best, the last weights where none were watched."""
        finite = [step for step, value in self.looks.items() if math.isfinite(value)]
        return min(finite, key=lambda step: (self.looks[step], step), default=None)

    def state(self, data: Batches) -> dict[str, Any]:
        return {"losses": self.losses, "looks": dict(self.looks)}

    def load_state(self, data: Batches, state: Mapping[str, Any]) -> None:
        self.losses, self.looks = list(state["losses"]), dict(state["looks"])

    def not_finite(self, what: str, value: float, step: int) -> DivergedError:
        where = f"epoch {(step - 1) // self.epoch_steps + 1} of {self.name}"
        got = f"{self.recipe.learning_rate}, and in {where} {what} is {value}"
        cure = "Lower it, or look for NaN in the data. The checkpoint is from the epoch before."
        return DivergedError(self.rate, got, "a rate at which the loss stays finite", cure)

    def after_step(self, step: int, numbers: Mapping[str, Any]) -> None:
        """Count a step's loss, and report. Raises OptionError at the end of an epoch that left weights not finite."""
        self.done = step
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
        self, recipe: Recipe, loader: Any, host: nn.Module, adapters: Mapping[str, Adapter], listener: Listener,
        held: HeldBack, *, forward: Forward, epochs: int,
    ) -> None:  # fmt: skip
        learners = Resting(part.mixer if part.replaced_part else part for part in adapters.values())
        settings = {name: part.mixer.config.to_dict() for name, part in adapters.items()}
        super().__init__(recipe, loader, learners, (host, *adapters.values()), settings, listener, held, epochs=epochs)
        self.layers, self.call = tuple(adapters.items()), run if forward is logits_of else forward
        self.learners = learners

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self._imitated(batch)

    def held_back_loss(self, process: Process) -> float:
        losses = [float(self._imitated(moved(batch, process.device))) for batch in self.held.batches]
        return sum(losses) / len(losses)

    def _imitated(self, batch: Any) -> Tensor:
        host, learns = self.beside[0], torch.is_grad_enabled()
        losses: list[Tensor] = []
        outputs: dict[nn.Module, Any] = {}
        masks = RealTokens()

        def note(module: nn.Module, args: Any, output: Any) -> None:
            outputs[module] = output

        def imitate(adapter: Adapter, learner: nn.Module, module: nn.Module, args: Any, kwargs: Any, _: Any) -> None:
            args, kwargs = copied_arguments(args, kwargs)
            with torch.set_grad_enabled(learns):
                adapter(*args, **kwargs)
                ours, theirs = (outputs[part] for part in (learner, module.get_submodule(adapter.replaced_part)))
                losses.append(imitation_loss(ours, theirs, masks.of(adapter, module)))

        with ExitStack() as stack, torch.no_grad(), without_fast_path():
            for (name, adapter), learner in zip(self.layers, self.learners, strict=True):
                module, now = host.get_submodule(name), partial(imitate, adapter, learner)
                stack.callback(masks.watch(adapter).remove)
                for watched in (learner, module.get_submodule(adapter.replaced_part)):
                    stack.callback(watched.register_forward_hook(note).remove)
                stack.callback(module.register_forward_hook(now, with_kwargs=True).remove)
            self.call(host, plain(batch))
        if not losses:
            got, allowed = "batches with which the model calls no converted layer", "batches that reach one"
            raise DataError("data", got, allowed, "Check forward=.")
        return torch.stack(losses).mean()


class FineTuning(Stage):
    """The whole converted model learns, all but the mixers at `rest_rate` times the rate. Loss: of `Comparison`.

    `blocks` adds the imitation's loss of each layer with a mixer, between both models. plan: of `progressive.schedule`.
    """

    name, rate = "fine-tuning", "learning_rate"

    def __init__(
        self, recipe: Recipe, loader: Any, model: nn.Module, teacher: nn.Module | None, listener: Listener,
        held: HeldBack, comparison: Comparison, settings: dict[str, Any], *, epochs: int, rest_rate: float = 1.0,
        adapters: Mapping[str, Adapter] | None = None, blocks: float = 0.0, plan: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        labels, weight = comparison.weights
        settings = {"labels": labels, "teacher": weight, "temperature": comparison.temperature, "rest_rate": rest_rate,
                    **settings}  # fmt: skip
        settings |= {} if comparison.piece is None else {"piece": comparison.piece}
        settings |= {"blocks": blocks} if blocks else {}
        settings |= {"plan": dict(plan)} if plan else {}
        teachers = () if teacher is None else (teacher,)
        super().__init__(recipe, loader, model, teachers, settings, listener, held, epochs=epochs)
        self.compare, self.rest_rate, self.adapters = comparison, rest_rate, dict(adapters or {})
        self.stand_ins, self.blocks = StandIns(self.adapters, teacher, plan or {}), blocks

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        mixers = tuple(f"{name}." if name else "" for name in self.adapters)
        groups = rated_groups(model, self.recipe, mixers, 1.0, self.rest_rate)
        return torch.optim.AdamW(groups, lr=self.recipe.learning_rate, betas=self.recipe.betas)

    def held_back_loss(self, process: Process) -> float:
        self.stand_ins.clear()
        return self.held.loss(self.model, process.device)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        mixing = self.stand_ins.at(self.done)
        masks = RealTokens()
        with ExitStack() as stack:
            pairs = _outputs(stack, mixing, self.beside[0], masks) if self.blocks else {}
            comparison = self.compare(model, self.beside, batch)
        if comparison.hits is not None:
            self.hits, self.count = self.hits + comparison.hits, self.count + comparison.rows
        blocks = [
            imitation_loss(pair[0], pair[1], masks.of(mixing[name], self.beside[0].get_submodule(name)))
            for name, pair in pairs.items()
            if len(pair) == 2
        ]
        return comparison.loss + self.blocks * torch.stack(blocks).mean() if blocks else comparison.loss


class RealTokens:
    """Which tokens of a layer's call are real, by the padding mask of its mixer's self-attention."""

    def __init__(self) -> None:
        self.masks: dict[nn.Module, Tensor | None] = {}

    def watch(self, adapter: Adapter) -> RemovableHandle:
        """A hook that notes the mask of each call."""
        return adapter.mixer.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, mixer: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        context, mask = args[1] if len(args) > 1 else kwargs.get("context"), kwargs.get("mask")
        plain = isinstance(mask, Tensor) and mask.ndim == 2 and context is None
        self.masks[mixer] = mask.bool() if plain and mask is not None else None

    def of(self, adapter: Adapter, attention: nn.Module) -> Tensor | None:
        """(B, N) or, where the attention has its batches second, (N, B); True for real tokens. None: all are."""
        mask = self.masks.get(adapter.mixer)
        return mask if mask is None or getattr(attention, "batch_first", True) else mask.t()


def _outputs(
    stack: ExitStack, adapters: Mapping[str, Adapter], teacher: nn.Module, masks: RealTokens
) -> dict[str, list[Any]]:
    """What each layer returns in a pass of the student, then in one of the teacher, by hooks that `stack` removes."""
    pairs: dict[str, list[Any]] = {name: [] for name in adapters}
    for name, adapter in adapters.items():
        stack.callback(masks.watch(adapter).remove)
        for part in (adapter, teacher.get_submodule(name)):
            note = partial(_note, pairs[name])
            stack.callback(part.register_forward_hook(note).remove)
    return pairs


def _note(outputs: list[Any], module: nn.Module, args: Any, output: Any) -> None:
    outputs.append(output)


def imitation_loss(ours: Any, theirs: Any, real: Tensor | None = None) -> Tensor:
    """‖ŷ - y‖² / ‖y - ȳ‖², the mean over the tensors y that both layers return, such as those of two streams.

    real: (B, N), which tokens of y (B, N, D) count. None: all.
    """
    pairs = [pair for pair in zip(tensors(ours), tensors(theirs), strict=False) if pair[0].shape == pair[1].shape]
    return torch.stack([_relative(y.float(), truth.detach().float(), real) for y, truth in pairs]).mean()


def _relative(y: Tensor, truth: Tensor, real: Tensor | None) -> Tensor:
    if real is None or truth.ndim != 3 or real.shape != truth.shape[:2]:
        return (y - truth).square().mean() / truth.var(correction=0).clamp_min(1e-12)
    weight = real.unsqueeze(-1)
    count = (weight.sum() * truth.shape[-1]).clamp_min(1)
    spread = truth - torch.where(weight, truth, 0.0).sum() / count
    error, variance = (torch.where(weight, part, 0.0).square().sum() / count for part in (y - truth, spread))
    return error / variance.clamp_min(1e-12)
