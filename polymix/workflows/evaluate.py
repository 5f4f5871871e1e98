"""`polymix evaluate`: how good a saved model is on data, whether polymix trained it, converted it or only found it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from polymix._io import check_device
from polymix.errors import DataError, OptionError, PolymixError, check_choice, check_int

SPLITS = ("held-out", "all")
_LANGUAGE = "CausalLM|LMHeadModel"
_OPTIONS = {"context": "--tokens", "data": "--data", "held_out": "--split"}  # the command's option for a recipe's


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
        options: of the model's use, such as "beam=50", for runs of polymix train.
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
            raise DataError("folder", f"{self.folder}, which does not exist", allowed, "Check the path.")

    def without(self, option: str, kind: str) -> None:
        """OptionError if an option was given that means nothing for this kind of model."""
        value = getattr(self, option)
        if value is not None:
            name = "--" + option.replace("_", "-")
            raise OptionError(name, value, f"no {name} for {kind}", "Leave it out.")


@dataclass(frozen=True)
class Evaluation:
    """What was measured: `metrics` by name, and for images the accuracy of each class."""

    model: str
    task: str
    data: str
    split: str
    count: int | None
    unit: str
    metrics: dict[str, float | None]
    classes: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: a number that is not finite becomes None."""
        metrics = {name: value if value is not None and math.isfinite(value) else None
                   for name, value in self.metrics.items()}  # fmt: skip
        return {"schema": "polymix.evaluate/1", **asdict(self), "metrics": metrics}


def evaluate(settings: Settings, say: Callable[[str], None] = lambda text: None) -> Evaluation:
    """Measure a saved model. Nothing is downloaded and nothing is written.

    Raises:
        DataError, OptionError, ResultsError: there is no such model or data, they do not fit each other, or an option
            means nothing for them.
    """
    from polymix.tasks.saved import SavedRun, is_run

    folder = settings.folder
    run = SavedRun.of(folder) if is_run(folder) else None
    if run is not None and run.task.name != "text":
        return _of_run(run.changed(settings.options), settings, say)
    if settings.options:
        raise OptionError("--set", settings.options[0], "no --set for this model", "Leave it out.")
    if run is not None or _reads_text(folder):
        return _of_text(settings, None if run is None else run.recipe, say)
    return _of_images(settings, say)


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


def _of_run(run: Any, settings: Settings, say: Callable[[str], None]) -> Evaluation:
    for option in ("tokens", "image_size"):
        settings.without(option, f"a run of polymix train, whose recipe sets it ({run.task.name})")
    found = run.measure(
        settings.data, whole=settings.split == "all", limit=settings.limit, batch=settings.batch,
        device=settings.device, say=say,
        layout=settings.layout, prepare=_exported(settings),
    )  # fmt: skip
    rows = found.get("classes", [])
    data = settings.data or run.recipe.data or run.summary.get("name") or "the task's own"
    count = found["count"] if "count" in found else sum(row.get("images", 0) for row in rows) or None
    return Evaluation(
        str(settings.folder), run.task.name, str(data), settings.split, count, found.get("unit", "images"),
        found["metrics"], rows,
    )  # fmt: skip


# Text


def _of_text(settings: Settings, recipe: Any, say: Callable[[str], None]) -> Evaluation:
    """Of a causal language model and its tokenizer. recipe: of its training, if polymix train wrote it."""
    from polymix.tasks.processes import Process
    from polymix.tasks.text.data import load
    from polymix.tasks.text.metrics import HeldOut
    from polymix.tasks.text.metrics import evaluate as measure
    from polymix.tasks.text.recipe import TextRecipe
    from polymix.workflows.convert.inputs import sequence_length
    from polymix.workflows.generate.folder import load as load_model

    settings.without("image_size", "a language model")
    settings.without("exported", "a language model, whose exported graphs carry a state")
    settings.without("layout", "a language model")
    if settings.data is None and recipe is None:
        raise OptionError("--data", None, "text files", "Only runs of polymix train know their data.")
    model, _ = load_model(settings.folder, trust=settings.trust)
    base = TextRecipe() if recipe is None else recipe
    context = sequence_length(model, settings.tokens) if recipe is None else settings.tokens or recipe.context
    vocab = None if recipe is None or not _is_shards(settings.data or recipe.data, recipe) else recipe.vocab
    wanted = replace(
        TextRecipe(), data=settings.data or base.data, tokenizer=str(settings.folder), context=context,
        column=base.column, held_out=base.held_out, packing=base.packing, vocab=vocab, accumulate=1,
        batch_size=settings.batch or (4 if recipe is None else base.part_size), evaluate_tokens=settings.limit or 2**62,
    )  # fmt: skip
    with TemporaryDirectory(prefix="polymix-text-") as scratch:
        try:
            data = load(wanted, Path(scratch), say)
            for tokens in (data.train, data.val):
                tokens.check(model.config.vocab_size)
        except PolymixError as error:
            raise type(error)(_OPTIONS.get(error.argument, error.argument), error.got, error.allowed,
                              error.cure) from error  # fmt: skip
        parts = [data.val] if settings.split == "held-out" else [data.train, data.val]
        left, held = settings.limit or 2**62, []
        for tokens in parts:
            if left > 0 and len(tokens) > 1:
                held.append(HeldOut.of(replace(data, val=tokens), replace(wanted, evaluate_tokens=left)))
                left -= held[-1].targets
        model.to(settings.device)
        process = Process(torch.device(settings.device))
        figures = [(part, measure(model, part, process)["val_loss"]) for part in held]
    count = sum(part.targets for part in held)
    nats = sum(part.targets * loss for part, loss in figures)
    loss = nats / max(count, 1)
    metrics: dict[str, float | None] = {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}
    if all(part.bytes for part in held):
        metrics["bits_per_byte"] = nats / math.log(2) / sum(part.bytes or 0 for part in held)
    return Evaluation(str(settings.folder), "text", str(settings.data or base.data or "Python's own prose"),
                      settings.split, count, "tokens", metrics)  # fmt: skip


def _is_shards(data: str | None, recipe: Any) -> bool:
    from polymix.tasks.text.data import find_source

    return find_source(data, recipe.column).kind == "shards"


# Images


@torch.no_grad()
def _of_images(settings: Settings, say: Callable[[str], None]) -> Evaluation:
    from polymix.convert.tracing import mode
    from polymix.tasks.classify.metrics import scores
    from polymix.tasks.distill.batches import logits_of
    from polymix.workflows.convert.images import Images
    from polymix.workflows.convert.inputs import reads_text
    from polymix.workflows.convert.sources import load_model

    settings.without("layout", "a folder of images")
    if settings.data is None:
        raise OptionError("--data", None, "a folder of images", "Only runs of polymix train know their data.")
    source = load_model(str(settings.folder), trust=settings.trust)
    if reads_text(source.model):
        got = f"{settings.folder}, a {type(source.model).__name__}"
        raise DataError("folder", got, "a classifier of images or a causal language model", "")
    settings.without("tokens", "a classifier of images")
    images = Images(settings.data, source, settings.image_size)
    for path in images.data.skipped:
        say(f"Skipped {path}")
    names = _names(settings.folder)
    if names:
        odd = [name for name in images.data.classes if name not in names]
        if odd:
            got, allowed = f"the class {odd[0]!r} in {settings.data}", f"the model's classes: {', '.join(names[:20])}"
            raise DataError("--data", got, allowed, "Rename its folder.")
        images.order = torch.tensor([names.index(name) for name in images.data.classes])
    inputs, labels = _chosen(images, settings)
    model: nn.Module = source.model.to(settings.device)
    if not names:
        images.check_head(model, images.inputs(inputs[:1]).to(settings.device))
    if (prepare := _exported(settings)) is not None:
        model = prepare(model)
    size, found = settings.batch or images.batch, []
    with mode(model, False):
        for start in range(0, len(labels), size):
            batch = images.inputs(inputs[start : start + size]).to(settings.device)
            found.append(logits_of(model, batch).float().cpu())
    logits = torch.cat(found)
    known = names or [name for _, name in sorted(zip(images.order.tolist(), images.data.classes, strict=True))]
    if logits.ndim != 2 or logits.shape[1] != len(known):
        got = f"outputs {tuple(logits.shape)} for {len(known)} classes"
        raise DataError("folder", got, "a classifier of these classes", "Evaluate it from Python.")
    result = scores(logits, images.order[labels], known)
    return Evaluation(str(settings.folder), "images", settings.data, settings.split, len(labels), "images",
                      result["metrics"], [row for row in result["classes"] if row["images"]])  # fmt: skip


def _names(folder: Path) -> list[str]:
    """The classes of a model that polymix convert saved, in the order of its outputs."""
    metadata = _config(folder).get("metadata") or {}
    data = metadata.get("data") if isinstance(metadata, dict) else None
    names = data.get("classes") if isinstance(data, dict) else None
    return list(map(str, names)) if isinstance(names, list) else []


def _chosen(images: Any, settings: Settings) -> tuple[Tensor, Tensor]:
    """The images of the split, at most `limit` of them, drawn at random with a fixed seed."""
    parts = [images.data.test] if settings.split == "held-out" else [images.data.train, images.data.test]
    inputs, labels = (torch.cat(part) for part in zip(*parts, strict=True))
    if settings.limit is None or settings.limit >= len(labels):
        return inputs, labels
    drawn = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[: settings.limit]
    return inputs[drawn], labels[drawn]
