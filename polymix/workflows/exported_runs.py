"""Models with data as graphs: their inputs, their own data to calibrate with, and what exported files reach on them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from polymix.errors import OptionError, PolymixError
from polymix.export.graph import Graph, about
from polymix.export.manifest import CONTEXT, Arrays
from polymix.export.web.drawing import Drawing
from polymix.workflows.convert.images import Images
from polymix.workflows.convert.sources import Source
from polymix.workflows.evaluate import Settings as Evaluated
from polymix.workflows.evaluate import evaluate

if TYPE_CHECKING:
    from polymix.train.saved import SavedRun

BATCH = 2
SAMPLES = 128  # of the training data, to calibrate with
MAX_SAMPLES = 2000  # samples that each file is measured on, where a task can measure fewer than all


class _Enough(Exception):
    """Ends an evaluation."""


class _Calls:
    """Records what a model is called with, by name, until there are enough samples."""

    def __init__(self, samples: int) -> None:
        self.samples, self.calls = samples, list[tuple[tuple[Any, ...], dict[str, Any]]]()

    def watch(self, model: nn.Module) -> nn.Module:
        model.register_forward_pre_hook(self._record, with_kwargs=True)
        return model

    def _record(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.calls.append((args, kwargs))
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.ndim)
        self.samples -= len(next(tensors, ()))
        if self.samples <= 0:
            raise _Enough


def trained_graph(run: SavedRun, data: str | None = None) -> Graph:
    """The graph of a run's model, with the first samples of its held-out data, or of those of `data`, as inputs.

    Raises:
        OptionError: the task's evaluation does not call the model.
        DataError: `data` is not what the task reads.
    """
    calls = _Calls(1)
    with contextlib.suppress(_Enough):
        run.measure(data, prepare=calls.watch)
    if not calls.calls:
        got = f"{run.folder}, whose evaluation does not call the model"
        raise OptionError("--model", got, "a model that is called with tensors", "Export it from Python.")
    args, kwargs = calls.calls[0]
    model = run.load().eval()
    inputs: Any = kwargs if kwargs and not args else args
    values = list(kwargs.values() if kwargs and not args else args)
    sizes = {len(value) for value in values if isinstance(value, Tensor) and value.ndim}
    if len(sizes) == 1 and sizes.pop() > BATCH:
        cut = [value[:BATCH].clone() if isinstance(value, Tensor) and value.ndim else value for value in values]
        inputs = dict(zip(kwargs, cut, strict=True)) if kwargs and not args else tuple(cut)
    said = about(model, f"polymix train {run.task.name}")
    said["mixer"] = run.recipe.mixer_name
    graph = Graph.of(model, inputs, **said)
    ranges = functools.cache(lambda: calibration(run, graph.inputs, data))  # int8 and qnn share them
    return replace(graph, drawing=_drawing(run), calibration=ranges)


def calibration(run: SavedRun, inputs: Mapping[str, Tensor], data: str | None = None) -> Sequence[Arrays]:
    """What the model is called with in training, for up to SAMPLES samples, in batches as large as that of `inputs`.

    Where `data` are given, a task's training calls its model otherwise, or its data are gone, what it is called with in
    evaluation: that prepares samples as the model knows them.
    """
    batches = [] if data is not None else list(_batches(_training_calls(run), inputs))
    if not batches:
        calls = _Calls(SAMPLES)
        with contextlib.suppress(_Enough):
            run.measure(data, prepare=calls.watch)
        batches = list(_batches(calls, inputs))
    return batches or [{name: value.cpu().numpy() for name, value in inputs.items()}]


def image_calibration(source: Source, data: str, size: int | None) -> Sequence[Arrays]:
    """Training images of a folder with one sub-folder per class, or the digits, prepared for the model of `source`."""
    images = Images(data, source, size)
    inputs = images.inputs(images.data.train.images)
    drawn = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))[:SAMPLES]
    name = next(iter(Graph.of(source.model, inputs[:BATCH]).inputs))
    return [{name: inputs[part].numpy()} for part in drawn.split(BATCH) if len(part) == BATCH]


def _training_calls(run: SavedRun) -> _Calls:
    from polymix.train.data.sampling import Seeded
    from polymix.train.evaluation import evaluating

    calls, task = _Calls(SAMPLES), run.task
    with TemporaryDirectory() as scratch:
        try:
            data = task.load(Path(scratch))
            model = task.restore(data, run.folder)
            calls.watch(model)
            drawn = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(0))[:SAMPLES].tolist()
            loader: Any = DataLoader(
                Seeded(data.train, run.recipe.seed), batch_size=min(SAMPLES, run.recipe.part_size),
                sampler=list(enumerate(drawn)), collate_fn=data.collate,
            )  # fmt: skip
            with evaluating(model):
                for batch in loader:
                    task.loss(model, batch)
        except _Enough:
            pass
        except (PolymixError, AttributeError, RuntimeError, TypeError, ValueError, KeyError, OSError):
            return _Calls(SAMPLES)  # losses that need a step's batch, and data that are gone
    return calls


def _batches(calls: _Calls, inputs: Mapping[str, Tensor]) -> Iterator[Arrays]:
    """The recorded calls in batches with the shapes of `inputs`."""
    for args, kwargs in calls.calls:
        arguments = {**dict(zip(inputs, args, strict=False)), **kwargs}
        if set(arguments) != set(inputs) or not all(isinstance(value, Tensor) for value in arguments.values()):
            continue
        size = max((len(value) for value in inputs.values() if value.ndim), default=1)
        for start in range(0, min(len(value) for value in arguments.values()) - size + 1, size):
            part = {name: arguments[name][start : start + size] for name in inputs}
            if all(part[name].shape == inputs[name].shape for name in inputs):
                yield {name: value.detach().cpu().numpy() for name, value in part.items()}


def measured(folder: Path, data: str | None, out: Path, entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What `polymix evaluate` says of the model in PyTorch, and of its quantised files, on held-out data.

    The first row is PyTorch's, with the path None. Compiled files are left out: their quantised source stands for them.

    Args:
        folder: of the model. data: None: those of its training.
    """
    quantised = dict.fromkeys(
        entry["path"] for entry in entries if "scheme" in entry and not entry["path"].endswith(CONTEXT)
    )
    rows = []
    for path in (None, *quantised):
        settings = Evaluated(folder, data=data, limit=MAX_SAMPLES, exported=None if path is None else out / path)
        try:
            result = evaluate(settings)
        except OptionError as error:  # a task that measures all or nothing
            if error.argument != "--limit":
                raise
            result = evaluate(replace(settings, limit=None))
        rows.append({"path": path, "count": result.count, "metrics": result.to_dict()["metrics"]})
    return rows


def _drawing(run: SavedRun) -> Drawing | None:
    """How a drawing becomes an image for a classifier of drawn images; None for other models."""
    drawn = run.task.drawn(run.summary)
    if drawn is None:
        return None
    (mean,), (std,) = run.summary["mean"], run.summary["std"]
    return Drawing.of(drawn, run.summary["classes"], run.summary["image_size"], mean, std)
