"""What a domain says: a typed class, whose methods the engine calls by name and nothing by string."""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

from polymix.convert.saving.files import read_tensors
from polymix.errors import MAX_SHOWN, DataError, DivergedError, OptionError, check_choice, shortened, shown
from polymix.files import write_whole
from polymix.train.data.sampling import Order, Seeded, Slices, loaded
from polymix.train.initial import WEIGHTS, FoundWeights, read_weights
from polymix.train.optimizers import decay_groups, warmup_and_cosine
from polymix.train.recipe import Recipe

R = TypeVar("R", bound=Recipe)
D = TypeVar("D", bound="Data")
Say = Callable[[str], None]
IGNORED = -100  # a target that PyTorch's cross-entropy leaves out


def silent(text: str) -> None:
    """Says nothing."""


@dataclass(frozen=True)
class Metric:
    """A number that `Task.measure` returns, and which way is better.

    `NAME_…`, such as "accuracy_16" or "iou_road", is of the kind of the declared metric NAME.
    """

    name: str
    better: Literal["higher", "lower"]
    unit: Literal["", "%"] = ""  # in which every table and sentence writes it; "%": it is a share from 0 to 1

    def __post_init__(self) -> None:
        check_choice(f"better of the metric {self.name}", self.better, ("higher", "lower"))
        check_choice(f"unit of the metric {self.name}", self.unit, ("", "%"))

    def score(self, value: float | None) -> float:
        """A number of which more is better; −∞ for what is not finite."""
        if value is None or not math.isfinite(value):
            return -math.inf
        return value if self.better == "higher" else -value


def declared(metrics: Sequence[Metric], name: str) -> Metric | None:
    """The metric of a measurement: NAME itself, or the longest whose name it begins with; None: there is none."""
    kinds = [metric for metric in metrics if name == metric.name or name.startswith(f"{metric.name}_")]
    return max(kinds, key=lambda metric: len(metric.name), default=None)


def unit_of(metrics: Sequence[Metric], name: str) -> str:
    """The unit of a number by its name; what is no metric has none."""
    metric = declared(metrics, name)
    return "" if metric is None else metric.unit


@dataclass(frozen=True)
class Process:
    """One of `world` processes that work together, and its device.

    total: sums a tensor over all of them. local: of a batch on the device, what this process computes: its tokens,
    where several processes share each sequence. These have the same rank.
    """

    device: Any = "cpu"
    rank: int = 0
    world: int = 1
    total: Callable[[Tensor], Tensor] = lambda value: value
    local: Callable[[Any], Any] = lambda batch: batch


class Data:
    """What `Task.load` returns: at least `train`, a data set with a length. A domain's data extend it."""

    train: Any

    def collate(self, samples: list[Any]) -> Any:
        """Join samples to a batch. Default: PyTorch's own way."""
        return default_collate(samples)

    def fingerprint(self) -> Any:
        """Tells data of different content apart, as JSON has it. Default: a checksum of 64 samples."""
        length, crc = len(self.train), 0
        samples = Seeded(self.train, 0)
        for place in range(64):
            for part in tree_leaves(samples[place, length * place // 64]):
                crc = zlib.crc32(_as_bytes(part), crc)
        return [length, crc]

    def summary(self) -> dict[str, Any]:
        """What results.json keeps: enough to build the model and to prepare new inputs. Default: nothing."""
        return {}

    def thumbnail(self, place: int) -> bytes | None:
        """A held-out sample as a PNG file, for a report; None: it is no picture."""
        return None


def _as_bytes(part: Any) -> bytes:
    """What a checksum sees of a part of a sample."""
    if isinstance(part, Tensor):
        return repr(tuple(part.shape)).encode() + part.flatten().view(torch.uint8).numpy().tobytes()
    return repr(part).encode()


class Task(ABC, Generic[R, D]):
    """A domain: its data, model, loss and metrics, for one recipe.

    Class attributes:
        name: as the commands take it, which is that of the entry point. metrics: what `measure` returns, a tuple, the
            headline first.
        layouts: arrangements of files that `load` reads, the usual one first; empty: there is one.
        unit: what is counted per second. fresh: prefixes of weights that `--init` may leave fresh, such as the head's.
        answers: whether `polymix compare` is to show which classes are taken for which. Then `details` has "labels" and
            "predictions", the class of each held-out sample and the model's answer, by number, and the data's summary
            has "classes", their names.
        plain: metrics that are also taken of the weights that are not averaged, at the end, as NAME_plain.
        chosen_by: the metric by which keep="best" chooses the weights; None: the headline.
        start_counts: whether keep="best" may keep the weights before the first step.
        splits: how several processes share a sequence. "tokens": each has its own tokens from the batch to the loss,
            and `local` cuts them out; "blocks": each has the whole batch, and its own tokens within `shared_blocks`;
            None: they cannot.

    Attributes:
        recipe: the options. say: where lines for the user go. slices: of the present run, which the engine sets.
        folder: of the trained model that is used; None in training.
    """

    name: ClassVar[str]
    metrics: ClassVar[tuple[Metric, ...]]
    layouts: ClassVar[tuple[str, ...]] = ()
    unit: ClassVar[str] = "samples"
    fresh: ClassVar[tuple[str, ...]] = ()
    answers: ClassVar[bool] = False
    plain: ClassVar[tuple[str, ...]] = ()
    chosen_by: ClassVar[str | None] = None
    start_counts: ClassVar[bool] = False
    splits: ClassVar[Literal["tokens", "blocks"] | None] = None

    def __init__(self, recipe: R, say: Say = silent) -> None:
        its = type(self).__name__
        if not isinstance(getattr(self, "name", None), str):
            raise TypeError(f"{its} has no name, such as name = 'majority'")
        metrics = getattr(self, "metrics", None)
        if not isinstance(metrics, tuple) or not all(isinstance(metric, Metric) for metric in metrics):
            raise TypeError(f"{its} has {shown(metrics)} as metrics instead of a tuple of Metric")
        self.recipe, self.say, self.slices = recipe, say, Slices()
        self.folder: Path | None = None

    # What every domain says

    @abstractmethod
    def load(self, folder: Path) -> D:
        """The data. What is prepared or synthetic is kept in `folder`. Raises DataError: the first problem of all."""

    @abstractmethod
    def build(self, data: D) -> nn.Module:
        """The model with fresh weights."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean loss of a batch."""

    @abstractmethod
    def measure(self, model: nn.Module, data: D, process: Process) -> dict[str, float]:
        """Every metric on the held-out part, the headline first. The model is in evaluation mode, without gradients."""

    # Before anything is computed

    def check(self) -> None:
        """Raise what `load` and `build` would raise about the recipe alone."""

    def problems(self, source: str) -> list[str]:
        """All problems of the data at `source`, for --check: sentences that name file and entry, by `load`'s code."""
        raise OptionError(
            "check", f"the domain {self.name}", "a domain that can check data", "Training checks as it reads."
        )

    # How it learns

    def advance(self, model: nn.Module, step: int) -> None:
        """Called before each training step with the number of those that are done: what changes in training."""

    def augmented(self, batch: Any) -> Any:
        """A training batch on its device, once a step, before its loss is computed: once or, if SAM learns, twice."""
        return batch

    def infer(self, model: nn.Module, batch: Any) -> Any:
        """What the model computes for a batch in use; timed for items per second. Default: the loss, forward alone."""
        return self.loss(model, batch)

    def batches(self, data: D, slices: Slices) -> Iterator[Any]:
        """This process's slices, step after step, from slices.step on, without end."""
        recipe = self.recipe
        return loaded(data.train, self.order(data, slices), data.collate, recipe.workers)

    def order(self, data: D, slices: Slices) -> Order:
        """The order of the training samples."""
        return Order(len(data.train), self.recipe.batch_size, self.recipe.seed, slices)

    def size(self, batch: Any) -> float:
        """How many `unit`s a slice has."""
        return self.recipe.batch_size / self.slices.total

    def epoch(self, data: D, step: int) -> float:
        """How often the training data have been seen before a step; 0 where every sample is new.

        Raises DataError: there are none.
        """
        if not len(data.train):
            got = f"{self.recipe.source or 'data'} with nothing to train on"
            raise DataError("data", got, "training samples", "Add some.")
        return step * self.recipe.batch_size / len(data.train)

    def optimizer(self, model: nn.Module) -> Optimizer:
        """AdamW on `decay_groups`."""
        recipe = self.recipe
        groups = decay_groups(model, recipe)
        return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=recipe.betas)

    def schedule(self, optimizer: Optimizer) -> LRScheduler:
        """The learning rate by step: a linear rise, then a cosine down to `final`."""
        recipe = self.recipe
        return LambdaLR(optimizer, warmup_and_cosine(recipe.steps, recipe.warmup, recipe.final, recipe.cosine_from))

    def validation(self, data: D) -> D:
        """Data whose held-out part is the one to choose weights by, for keep="best"."""
        raise OptionError("keep", "'best'", f"'last': {self.name} has no validation part", "Leave it out.")

    def prepare(self, model: nn.Module, data: D, step: int) -> None:
        """Called before `model` is measured after `step`, the last time before it is saved: batch norms, say."""

    def shown_at(self, step: int) -> bool:
        """Whether `prepare` is called after this step too, without a measurement."""
        return False

    def done_early(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the training may end now, by the measurements so far, the last one last."""
        return False

    def state(self, data: D) -> dict[str, Any]:
        """What a checkpoint keeps of the task besides weights: tensors and plain values by name."""
        return {}

    def load_state(self, data: D, state: Mapping[str, Any]) -> None:
        """Take back what `state` returned."""

    def not_finite(self, what: str, value: float, step: int) -> DivergedError:
        """The error for a number that is not finite, raised before it reaches the weights."""
        recipe = self.recipe
        got = f"{recipe.learning_rate}, and {what} is {value} at step {step}"
        saved = step > recipe.checkpoint_every
        after = "resume: the last checkpoint is from before" if saved else "start anew: no checkpoint exists yet"
        cure = f"Lower it, lengthen warmup or lower clip, and {after}."
        return DivergedError("learning_rate", got, "a rate at which the loss stays finite", cure)

    # One sequence on several processes

    def local(self, batch: Any, share: Callable[[Tensor], Tensor]) -> Any:
        """This process's tokens of a batch whose sequences several processes share, where the task splits "tokens".

        share: cuts them out of a tensor (B, N, …). The losses of the processes must add up to that of the whole batch.
        """
        raise TypeError(f"{type(self).__name__} splits tokens and has no local")

    def shared_blocks(self, model: nn.Module) -> Sequence[Sequence[nn.Module]]:
        """Runs of blocks, one after another, within each of which several processes share a sequence (B, N, D)."""
        blocks: Any = getattr(model, "blocks", None)
        if not isinstance(blocks, (nn.ModuleList, nn.Sequential)) or not len(blocks):
            got = f"{self.recipe.sequence_parallel} for a {type(model).__name__}"
            raise OptionError("sequence_parallel", got, "a model with `blocks`, one after another", "Pass 1.")
        return [list(blocks)]

    def check_shared(self, model: nn.Module) -> None:
        """For `check`: raise, of a model on the meta device, what would keep processes from sharing its sequences."""
        if self.recipe.sequence_parallel > 1:
            from polymix.parallel.style import check_split

            for block in (block for run in self.shared_blocks(model) for block in run):
                check_split(block)

    # What is said of it

    def better(self, name: str) -> Metric:
        """The declared metric of a measurement. Raises TypeError: there is none."""
        metric = declared(self.metrics, name)
        if metric is None:
            raise TypeError(f"{type(self).__name__}.measure returned {name!r}, which its metrics do not declare")
        return metric

    def checked(self, measured: Mapping[str, Any]) -> dict[str, Any]:
        """What `measure` returned. Raises TypeError for what its metrics do not declare, or what is no number."""
        for name, value in measured.items():
            self.better(name)
            if not isinstance(value, (int, float, type(None))):
                got = f"{type(self).__name__}.measure returned {shown(value)} as {name!r}"
                raise TypeError(f"{got}, which is no number; of a tensor, return .item()")
        return dict(measured)

    def grid(self) -> tuple[int, int] | None:
        """The model's own grid of tokens, where `at_grid` builds it for others, for `polymix compare`; else None."""
        return None

    def at_grid(self, data: D, grid: tuple[int, int], **options: Any) -> tuple[nn.Module, Tensor]:
        """A fresh model for another grid of tokens, and an input of batch 1. options: device and dtype."""
        raise TypeError(f"{type(self).__name__} has no at_grid")

    def details(self, model: nn.Module, data: D, process: Process) -> dict[str, Any]:
        """What `polymix evaluate` reports: "metrics", and optionally a table, and what was measured.

        Returns:
            "metrics": numbers by name. "classes": a dict for each class, its "name" and what was measured of it.
            "count" and "unit": how many of what were measured; without a unit they are the task's. "labels" and
            "predictions": where the task `answers`.
        """
        return {"metrics": self.measure(model, data, process)}

    def samples(self, model: nn.Module, data: D, process: Process) -> list[str]:
        """Texts that the model writes at each evaluation."""
        return []

    def draw(self, model: nn.Module, data: D, folder: Path) -> list[Path]:
        """Pictures or pages in `folder` for the report, predictions beside the truth first."""
        return []

    def describe(self, data: D) -> str:
        """A sentence for the report: model, data, sizes."""
        return ""

    def host_name(self, model: nn.Module) -> str:
        """The model into which the mixer was put, as results name it."""
        return type(model).__name__

    def published(self) -> dict[str, Any] | None:
        """A paper's metrics where data, host, mixer and metric are the paper's, with their "source"; else None."""
        return None

    def drawn(self, summary: Mapping[str, Any]) -> Tensor | None:
        """Training images (n, 1, H, W) that may be drawings, to whose ink a web page fits its user's; None: it cannot.

        summary: of the data, with "classes", "image_size" and one value each in "mean" and "std" where this is no None.
        """
        return None

    # What is left, and what it is good for

    def settings(self, model: nn.Module) -> dict[str, Any]:
        """Options of the model beside the recipe's that a resumed run must not change."""
        return {}

    def save(self, model: nn.Module, data: D, folder: Path) -> None:
        """Save the trained model. Default: model.pt, a state dict."""
        write_whole(folder / WEIGHTS, lambda path: torch.save(model.state_dict(), path))

    def restore(self, data: D, folder: Path) -> nn.Module:
        """The model that `save` left, on the CPU. Raises whatever a damaged file raises."""
        model = self.build(data)
        model.load_state_dict(read_tensors(folder / WEIGHTS))
        return model

    def read_weights(self, folder: Path) -> FoundWeights:
        """The weights in a folder that `init` names. Raises ResultsError where there are none."""
        return read_weights(folder)

    def check_weights(self, folder: Path) -> None:
        """Raise what `read_weights` raises, as far as that shows without reading the numbers of a model.pt."""
        read_weights(folder, mmap=True)

    def usage(self, data: D, folder: Path) -> list[str]:
        """Python lines that load the model, for the report."""
        return []

    def next_commands(self, data: D, folder: Path) -> list[tuple[str, str]]:
        """What to run next: pairs of a reason and a command."""
        return []

    def from_summary(self, summary: Mapping[str, Any]) -> D | None:
        """Data with what `build` and `predict` need, from results.json; None: `load` is needed."""
        return None

    def for_evaluation(self, summary: Mapping[str, Any], whole: bool, limit: int | None) -> D | None:
        """Data to measure a trained model on, prepared as its training data were; None: those of `load`.

        Args:
            summary: of the training data. whole: all of the data, not the held-out part. limit: samples at most.
        """
        return None

    def check_like_training(self, data: D, summary: Mapping[str, Any]) -> None:
        """Raise DataError where data of `load` do not fit a trained model. Default: for other classes than its own.

        Labels are numbers of classes: with other classes the same number means another class.
        """
        its, ours = (list(one.get("classes", ())) for one in (data.summary(), summary))
        if its != ours:
            got, allowed = (shortened(", ".join(names) or "no classes", MAX_SHOWN) for names in (its, ours))
            raise DataError("data", f"data of {got}", f"data of the model's classes, {allowed}", "Use such data.")

    predicts: ClassVar[bool] = False  # whether `predict` is there

    def predict(
        self, model: nn.Module, data: D, files: Sequence[Path], folder: Path, process: Process
    ) -> list[dict[str, Any]]:
        """For each file a dict for predictions.json, of what JSON holds.

        "file" is its path. "answer", the prediction in words, and other texts and numbers are also printed. Pictures
        are written into `folder`, and named in "picture".
        """
        got = f"a model of the domain {self.name}"
        raise OptionError("folder", got, "a model of a domain that can predict files", "Load it from Python.")
