"""`polymix.distill`: recover the accuracy that a conversion has cost."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polymix._io import Progress
from polymix.convert import ConversionReport
from polymix.convert.tracing import mode
from polymix.errors import OptionError, check_choice, check_int, check_number
from polymix.numbers import figure, percent
from polymix.tasks.distill.batches import LOSSES, Forward, answers_of, first_of, logits_of, moved
from polymix.tasks.distill.fit import Fit
from polymix.tasks.distill.head import fit_head
from polymix.tasks.distill.lora import low_rank, matrices
from polymix.tasks.distill.metrics import Metric, accuracy, perplexity, relative_error
from polymix.tasks.distill.noise import noise_batches, prediction
from polymix.tasks.distill.stages import FineTuning, Imitation, Watch
from polymix.tasks.trainer import isolate_rng

__all__ = [
    "Distillation", "accuracy", "distill", "fit_head", "noise_batches", "perplexity", "prediction", "relative_error",
]  # fmt: skip


@dataclass(frozen=True)
class Distillation:
    """The mean loss of each epoch of both stages, and `accuracy` as in the report."""

    imitation: tuple[float, ...]
    fine_tuning: tuple[float, ...]
    accuracy: dict[str, float]


def distill(
    report: ConversionReport,
    data: Any,
    *,
    val: Any = None,
    imitate_epochs: int = 1,
    epochs: int = 1,
    labels: float = 1.0,
    teacher: float = 1.0,
    temperature: float = 2.0,
    loss: str = "logits",
    imitate_lr: float = 2e-3,
    learning_rate: float = 5e-4,
    weight_decay: float = 0.05,
    forward: Forward = logits_of,
    metric: Metric = accuracy,
    out: str | Path | None = None,
    resume: bool = False,
    device: str = "cpu",
    devices: int = 1,
    strategy: str = "auto",
    precision: str = "float32",
    lora: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Distillation:
    """Train a converted model, in place, to do what it did before.

    Stage 1: each mixer learns to reproduce its attention's output on the original model's activations. All layers
    learn in one pass, and nothing else is trained. Stage 2: the whole model, except what has requires_grad=False, is
    fine-tuned on labels and on the logits of the original model. Afterwards `report.undo()` still restores the
    attention and every weight that stage 2 changed.

    Args:
        report: from `polymix.convert`, not undone.
        data: a DataLoader with a length, or a list of batches: (inputs, labels), dicts of keyword arguments with
            `labels`, or inputs alone (teacher only).
        val: batches with labels. report.accuracy gets the accuracy before and after conversion and after each stage.
        metric: `accuracy`, or another measure: `perplexity` for language models, or a function like them.
        imitate_epochs, epochs: of stage 1 and stage 2; 0 leaves a stage out.
        labels, teacher: weights of the two losses of stage 2. The teacher's is taken at `temperature`.
        loss: "logits" for classifiers and language models: cross-entropy and Kullback-Leibler divergence; "squares" for
            outputs that are no logits, such as a generator's predictions: mean squares, without a temperature.
        imitate_lr, learning_rate, weight_decay: of AdamW, with a warm-up over a tenth of the steps, a cosine decay, and
            gradients clipped at 1.
        forward: (model, batch) -> logits (…, classes), for models that return neither logits nor an output with them.
        out: folder for a checkpoint after every epoch. resume: continue from it, to the same result.
        device, devices, strategy: the kind of device, how many, and Lightning's strategy for several, such as "ddp".
        precision: "float32"; "bfloat16" or "float16" use autocast (mixed precision).
        lora: rank of a low-rank term for every matrix of the mixers, as in LoLCATs. In stage 2 nothing else learns;
            afterwards the terms are merged into the weights. None: stage 2 trains the whole model.
        seed: of the order of the data and of dropout. The global random state is restored afterwards.
        progress, say: where bars and lines about the progress go; without bars each epoch is a line.
    Raises:
        OptionError, DataError, ResultsError: before any compute. OptionError later if a loss becomes NaN or infinite.
    """
    watch = Watch(progress, say)
    fit = Fit(None if out is None else Path(out), resume, device, devices, strategy, precision, watch)
    for name, count in (("imitate_epochs", imitate_epochs), ("epochs", epochs), ("seed", seed)):
        check_int(name, count, 0)
    for name, weight in (("labels", labels), ("teacher", teacher), ("weight_decay", weight_decay)):
        check_number(name, weight, 0.0, math.inf, "a number of at least 0", 1.0)
    for name, size in (("temperature", temperature), ("imitate_lr", imitate_lr), ("learning_rate", learning_rate)):
        check_number(name, size, 1e-12, math.inf, "a number above 0", 1e-3)
    check_choice("loss", loss, LOSSES)
    if loss == "squares" and temperature != 2.0:
        got = f"{temperature} with loss='squares'"
        raise OptionError("temperature", got, "none, as it has no effect", "Leave it out.")
    if lora is not None:
        check_int("lora", lora, 1)
        if not epochs:
            raise OptionError("lora", f"{lora} with epochs=0", "epochs of at least 1", "Leave lora out.")
    _check_report(report)
    if lora is not None:
        matrices(report.adapters, lora)
    common: dict[str, Any] = {"forward": forward, "weight_decay": weight_decay, "seed": seed}
    with isolate_rng(), _at_home(report):
        batch = first_of(data, "data", devices)
        if val is not None:
            first_of(val, "val")
        if epochs:
            _try(report.model, batch, forward, labels, teacher, loss)
        measure = partial(_measure, report, val, forward, metric, fit.place, say)
        with report.former() as host:
            measure("before", host)
        measure("converted", report.model)
        with report.former() as host:
            imitated: tuple[float, ...] = ()
            if imitate_epochs:
                imitated = _imitate(report, host, fit, data, epochs=imitate_epochs, learning_rate=imitate_lr, **common)
            former = copy.deepcopy(host).eval().requires_grad_(False) if epochs and teacher else None
        if imitate_epochs:
            measure("imitated", report.model)
        tuned: tuple[float, ...] = ()
        if epochs:
            report.remember()
            learned = nullcontext() if lora is None else low_rank(report.model, report.adapters, lora, seed)
            with learned, mode(report.model, True):
                stage = FineTuning(
                    report.model, former, data, labels=labels, weight=teacher, temperature=temperature, loss=loss,
                    epochs=epochs, learning_rate=learning_rate, **common,
                )  # fmt: skip
                stage.settings |= {} if lora is None else {"lora": lora}
                tuned = fit(stage)
            measure("distilled", report.model)
    return Distillation(imitated, tuned, dict(report.accuracy))


def _check_report(report: Any) -> None:
    if not isinstance(report, ConversionReport) or report.undone or not report.adapters:
        got = (
            type(report).__name__
            if not isinstance(report, ConversionReport)
            else "a report that was undone, or that converted nothing"
        )
        raise OptionError("report", got, "what polymix.convert returned", "Convert the model first.")


@torch.no_grad()
def _try(model: nn.Module, batch: Any, forward: Forward, labels: float, teacher: float, loss: str) -> None:
    """Pass one batch through the model, so that mistakes show before hours of training."""
    with mode(model, False):
        found = answers_of(loss)(model, moved(batch, next(model.parameters()).device), forward)
    if labels and found.labels is not None:
        found.label_loss()
    elif not teacher:
        raise OptionError(
            "labels, teacher", (labels, teacher), "labels in the batches, or a teacher", "Pass teacher=1.0, say."
        )


def _measure(
    report: ConversionReport, val: Any, forward: Forward, metric: Metric, device: str, say: Callable[[str], None],
    name: str, model: nn.Module,
) -> None:  # fmt: skip
    if val is not None:
        report.metric = getattr(metric, "__name__", report.metric)
        value = report.accuracy[name] = metric(model.to(device), val, forward, device)
        what = report.metric.capitalize().replace("_", " ")
        say(f"{what}, {name}: {percent(value) if metric is accuracy else figure(value)}.")


def _imitate(report: ConversionReport, host: nn.Module, fit: Fit, data: Any, **options: Any) -> tuple[float, ...]:
    """Stage 1. The original model does not learn and stays in evaluation mode; the mixers have no dropout."""
    stage = Imitation(host, report.adapters, data, **options)
    learning = [p for p in host.parameters() if p.requires_grad]
    hooks = report.follow_grids()
    try:
        for p in learning:
            p.requires_grad_(False)
        with mode(host, False), mode(stage, False):
            return fit(stage)
    finally:
        for p in learning:
            p.requires_grad_(True)
        for hook in hooks:
            hook.remove()


@contextmanager
def _at_home(report: ConversionReport) -> Iterator[None]:
    """Bring model and attention back to the model's device afterwards: a trainer may leave them elsewhere."""
    home = next(report.model.parameters()).device
    try:
        yield
    finally:
        for part in (report.model, *report.attentions.values()):
            part.to(home)
