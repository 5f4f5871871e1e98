"""`polymix evaluate`: how good a saved model is on data, whether polymix trained it, converted it or only found it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from polymix.devices import check_device
from polymix.errors import DataError, OptionError, PolymixError, check_choice, check_int

if TYPE_CHECKING:
    from polymix.train.saved import SavedRun
    from polymix.train.task import Task

SPLITS = ("held-out", "all")
WINDOWS = 4  # of text at once
_LANGUAGE = "CausalLM|LMHeadModel"
_FLAGS = {"context": "--tokens", "data": "--data", "held_out": "--split", "layout": "--layout"}  # for a recipe's option


@dataclass(frozen=True)
class Settings:
    """What to evaluate, and on what.

    Args:
        folder: of a model that polymix train, polymix convert, save_pretrained, timm or transformers wrote.
        data: a folder of images with one sub-folder per class, or text files; None: the data of the training.
        split: "held-out", the part that training on this data leaves out, or "all".
        limit: images or tokens to evaluate at most; None: no limit.
        batch: images or windows of text at once; None: as in the training, or 32 images and 4 windows.
        image_size: side of the images in pixels; None: the model's own.
        tokens: length of a window of text; None: the training's context, or 512 and at most the model's maximum.
        device: such as "cpu" or "cuda".
        trust: run code that the folder names.
        layout: how the files of `data` are arranged, for runs of polymix train; None: as its files say.
        exported: an ONNX file of this model, such as one in 8 bits, which is measured in its place.
        options: of the model's use or of the data, such as "beam=50" or "broken=skip", for runs of polymix train.
    """

    folder: Path
    data: str | None = None
    split: str = "held-out"
    limit: int | None = None
    batch: int | None = None
    image_size: int | None = None
    tokens: int | None = None
    device: str = "cpu"
    trust: bool = False
    layout: str | None = None
    exported: Path | None = None
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.exported is not None and not self.exported.is_file():
            raise DataError("--exported", f"{self.exported}, which does not exist", "an ONNX file", "Check the path.")
        check_choice("--split", self.split, SPLITS)
        for name in ("limit", "batch", "image_size", "tokens"):
            if getattr(self, name) is not None:
                check_int("--" + name.replace("_", "-"), getattr(self, name), 1)
        check_device(self.device, "--device")
        if not self.folder.is_dir():
            allowed = "the folder of a saved model"
            what = "is no folder" if self.folder.exists() else "does not exist"
            raise DataError("folder", f"{self.folder}, which {what}", allowed, "Check the path.")

    def without(self, option: str, kind: str) -> None:
        """OptionError if an option was given that means nothing for this kind of model."""
        value = getattr(self, option)
        if value is not None:
            name = "--" + option.replace("_", "-")
            raise OptionError(name, value, f"no {name} for {kind}", "Leave it out.")


@dataclass(frozen=True)
class Evaluation:
    """What was measured: `metrics` by name, with the units in which they are written, and for images each class."""

    model: str
    task: str
    data: str
    split: str
    count: int | None
    unit: str
    metrics: dict[str, float | None]
    units: dict[str, str] = field(default_factory=dict)
    classes: list[dict[str, Any]] = field(default_factory=list)
    schema: Literal["polymix.evaluate/1"] = "polymix.evaluate/1"

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: a number that is not finite becomes None."""
        metrics = {name: value if value is not None and math.isfinite(value) else None
                   for name, value in self.metrics.items()}  # fmt: skip
        return {"schema": self.schema, **asdict(self), "metrics": metrics}


def evaluate(settings: Settings, say: Callable[[str], None] = lambda text: None) -> Evaluation:
    """Measure a saved model. Nothing is downloaded and nothing is written.

    Raises:
        DataError, OptionError, ResultsError: there is no such model or data, they do not fit each other, or an option
            means nothing for them.
    """
    from polymix.train.saved import SavedRun, is_run

    folder = settings.folder
    try:
        if is_run(folder):
            return _of_run(SavedRun.of(folder), settings, say)
        if settings.options:
            raise OptionError("--set", settings.options[0], "no --set for this model", "Leave it out.")
        settings.without("layout", "a model that polymix train did not write")
        return _of_text(settings, say) if _reads_text(folder) else _of_images(settings, say)
    except PolymixError as error:
        if error.argument not in _FLAGS:
            raise
        raise type(error)(_FLAGS[error.argument], error.got, error.allowed, error.cure) from error


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        content = json.loads(path.read_text("utf-8"))
        return dict(content)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        got = f"{folder}, whose config.json cannot be read ({type(error).__name__})"
        allowed = "the folder of a model that polymix, timm or transformers saved"
        raise DataError("folder", got, allowed, "Check the path.") from error


def _reads_text(folder: Path) -> bool:
    """Whether the folder's config is of a causal language model."""
    config = _config(folder)
    kinds = config.get("architectures") or [(config.get("host") or {}).get("class", "")]
    return any(re.search(_LANGUAGE, str(kind)) for kind in kinds)


def _exported(settings: Settings) -> Callable[[nn.Module], nn.Module] | None:
    """Puts the exported file in place of a model; None without one."""
    if settings.exported is None:
        return None
    from polymix.export.substitute import substitute

    return partial(substitute, path=settings.exported)


# Runs of polymix train


def _of_run(run: SavedRun, settings: Settings, say: Callable[[str], None]) -> Evaluation:
    kind = f"a run of polymix train, whose recipe sets it ({run.task.name})"
    settings.without("image_size", kind)
    if run.recipe.sequence_option is None:
        settings.without("tokens", kind)
    details = run.measure(
        settings.data, whole=settings.split == "all", limit=settings.limit, batch=settings.batch,
        device=settings.device, say=say, layout=settings.layout, prepare=_exported(settings), length=settings.tokens,
        options=settings.options,
    )  # fmt: skip
    pairs = (word.partition("=")[::2] for word in settings.options)
    other = next((value for name, value in pairs if name in run.recipe.sources), None)
    data = settings.data or other or run.recipe.source or run.summary.get("name") or "the task's own"
    return _evaluation(settings, run.task, str(data), details)


def _evaluation(settings: Settings, task: Task[Any, Any], data: str, details: Mapping[str, Any]) -> Evaluation:
    from polymix.train.task import unit_of

    rows = details.get("classes", [])
    count = details["count"] if "count" in details else sum(row.get("images", 0) for row in rows) or None
    unit = details.get("unit", task.unit)
    units = {name: unit_of(task.metrics, name) for name in details["metrics"]}
    return Evaluation(
        str(settings.folder), task.name, data, settings.split, count, unit, details["metrics"], units, rows
    )


# Models that polymix train did not write, by the tasks of their domains


def _measured(task: Task[Any, Any], model: nn.Module, data: Any, settings: Settings) -> Evaluation:
    """What a task says of a model on data."""
    from polymix.train.evaluation import evaluating
    from polymix.train.task import Process

    model = model.to(settings.device)
    with evaluating(model):
        details = task.details(model, data, Process(torch.device(settings.device)))
    return _evaluation(settings, task, str(settings.data), details)


def _of_text(settings: Settings, say: Callable[[str], None]) -> Evaluation:
    """Of a causal language model and its tokenizer."""
    from polymix.train.registry import task_of
    from polymix.workflows.convert.inputs import sequence_length
    from polymix.workflows.generate.folder import load

    settings.without("image_size", "a language model")
    settings.without("exported", "a language model, whose exported graphs carry a state")
    if settings.data is None:
        raise OptionError("--data", None, "text files", "Only runs of polymix train know their data.")
    model, _ = load(settings.folder, trust=settings.trust)
    context = sequence_length(model, settings.tokens)
    task = task_of("text", say, data=settings.data, context=context, batch_size=settings.batch or WINDOWS)
    task.folder = settings.folder
    return _measured(task, model, task.for_evaluation({}, settings.split == "all", settings.limit), settings)


def _of_images(settings: Settings, say: Callable[[str], None]) -> Evaluation:
    from polymix.convert.tracing import mode
    from polymix.train.distill.batches import logits_of
    from polymix.train.registry import task_of
    from polymix.workflows.convert.images import Images
    from polymix.workflows.convert.inputs import reads_text
    from polymix.workflows.convert.sources import load_model

    if settings.data is None:
        raise OptionError("--data", None, "a folder of images", "Only runs of polymix train know their data.")
    source = load_model(str(settings.folder), trust=settings.trust).with_weights("folder")
    if reads_text(source.model):
        got = f"{settings.folder}, a {type(source.model).__name__}"
        raise DataError("folder", got, "a classifier of images or a causal language model", "")
    settings.without("tokens", "a classifier of images")
    images = Images(settings.data, source, settings.image_size)
    for path in images.data.skipped:
        say(f"Skipped {path}")
    names = _names(settings.folder)
    model, first = source.model.to(settings.device), images.inputs(images.data.test.images[:1]).to(settings.device)
    if names:
        with mode(model, False), torch.no_grad():
            outputs = logits_of(model, first)
        if outputs.ndim != 2 or outputs.shape[1] != len(names):
            got = f"outputs {tuple(outputs.shape)} for {len(names)} classes"
            raise DataError("folder", got, "a classifier of these classes", "Evaluate it from Python.")
    else:
        images.check_head(model, first)
    if (prepare := _exported(settings)) is not None:
        model = prepare(model)
    data = images.as_the_model_knows_them(names).restricted(settings.split == "all", settings.limit)
    # A task measures four of its batches at once.
    task = task_of(
        "classify", say, data=settings.data, image_size=data.image_size, patch_size=data.image_size,
        batch_size=-(-(settings.batch or images.batch) // 4),
    )  # fmt: skip
    evaluation = _measured(task, images.logits(model), data, settings)
    return replace(evaluation, classes=[row for row in evaluation.classes if row["images"]])


def _names(folder: Path) -> list[str]:
    """The classes of a model that polymix convert saved, in the order of its outputs."""
    metadata = _config(folder).get("metadata") or {}
    data = metadata.get("data") if isinstance(metadata, dict) else None
    names = data.get("classes") if isinstance(data, dict) else None
    return list(map(str, names)) if isinstance(names, list) else []
