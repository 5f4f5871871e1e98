"""`polymix.distill`: recover the accuracy that a conversion has cost."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polymix.convert import ConversionReport
from polymix.convert.replacement import Replacement
from polymix.convert.tracing import mode
from polymix.devices import processes
from polymix.errors import CapabilityError, OptionError, check_choice, check_int, check_number
from polymix.files import output_folder
from polymix.numbers import figure, plural
from polymix.results import Progress
from polymix.train.data.sampling import isolated_random_state
from polymix.train.distill.batches import (
    LOSSES,
    Forward,
    answers_of,
    features_of,
    first_of,
    logits_of,
    moved,
    with_features,
)
from polymix.train.distill.comparison import Comparison
from polymix.train.distill.fit import Fit
from polymix.train.distill.guard import Guard, HeldBack, hold_back
from polymix.train.distill.head import fit_head
from polymix.train.distill.lora import low_rank, matrices
from polymix.train.distill.metrics import Measure, accuracy, perplexity, relative_error
from polymix.train.distill.pieces import check_pieces
from polymix.train.distill.progressive import schedule
from polymix.train.distill.samples import KINDS, Samples
from polymix.train.distill.stages import FineTuning, Imitation, Listener, Stage
from polymix.train.recipe import Recipe

__all__ = [
    "Distillation", "Samples", "accuracy", "distill", "fit_head", "perplexity", "relative_error",
]  # fmt: skip


@dataclass(frozen=True)
class Distillation:
    """The mean loss of each epoch of both stages, and `accuracy` and `kept` as in the report.

    held_back: the loss of fine-tuning on the samples held back, by stage, beginning with "converted"; with keep="best".
    """

    imitation: tuple[float, ...]
    fine_tuning: tuple[float, ...]
    accuracy: dict[str, float]
    kept: str | None = None
    held_back: dict[str, float] = field(default_factory=dict)


LEARNING_RATE, REST_RATE = 5e-4, 0.1  # of fine-tuning: of the mixers; of weights that were trained before, a share


def distill(
    report: Replacement,
    data: Any,
    *,
    val: Any = None,
    imitate_epochs: int = 1,
    epochs: int = 1,
    labels: float = 1.0,
    teacher: float = 1.0,
    temperature: float = 2.0,
    loss: str = "logits",
    imitate_lr: float = 6e-3,
    learning_rate: float = LEARNING_RATE,
    rest_rate: float = REST_RATE,
    weight_decay: float = 0.05,
    forward: Forward = logits_of,
    metric: Measure = accuracy,
    out: str | Path | None = None,
    resume: bool = False,
    device: str = "cpu",
    devices: int = 1,
    precision: str = "float32",
    lora: int | None = None,
    progressive: int | None = None,
    blocks: float = 0.0,
    piece: int | None = None,
    keep: str = "best",
    seed: int = 0,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Distillation:
    """Train a converted model, or a polynomial that was a network, in place, to do what it did before.

    Stage 1: each mixer learns to reproduce its attention's output on the original model's activations. All layers
    learn in one pass, and nothing else is trained. Stage 2: the whole model, except what has requires_grad=False, is
    fine-tuned on labels and on the logits of the original model. Afterwards `report.undo()` still restores the
    attention and every weight that stage 2 changed. A polynomial has no mixers to learn in stage 1: it is fine-tuned.

    Args:
        report: from `polymix.convert` or `polymix.polynomialize`, not undone.
        data: a DataLoader with a length, or a list of batches: (inputs, labels), dicts of keyword arguments with
            `labels`, or inputs alone (teacher only). "self": texts that the original model, a causal or a masked
            language model, draws itself; "random": random tokens; or `Samples`, which has options for both.
        val: batches with labels. report.accuracy gets the accuracy before and after conversion and after each stage.
        metric: `accuracy`, or another measure: `perplexity` for language models, or a function like them.
        imitate_epochs, epochs: of stage 1 and stage 2; 0 leaves a stage out. A polynomial has stage 2 alone.
        labels, teacher: weights of the two losses of stage 2. The teacher's is taken at `temperature`.
        loss: "logits" for classifiers and language models: cross-entropy and Kullback-Leibler divergence; "squares" for
            outputs that are no logits, such as a generator's predictions: mean squares, without a temperature;
            "features" for models without logits: mean squares of the last features, after stage 1 has aligned each
            layer's output (the recipe of ViT-AdaLA, arXiv:2603.16063). Labels play no part; on `val`, `relative_error`
            compares the features with the original model's.
        imitate_lr, learning_rate, weight_decay: of AdamW, with a linear warm-up over a tenth of the steps, at least 20
            or half of fewer than 40, then a cosine decay, and gradients clipped at 1. learning_rate is the mixers'.
        rest_rate: share of learning_rate for all but the mixers, trained before: of a polynomial, all.
        forward: (model, batch) -> logits (…, classes), for models that return neither logits nor an output with them.
        out: folder for a checkpoint after every epoch. resume: continue from it, to the same result.
        device: the kind of device. devices: how many; so many processes are forked, each of which takes every
            devices-th batch. Under torchrun its processes are used instead.
        precision: "float32"; "bfloat16" or "float16" use autocast (mixed precision).
        lora: rank of a low-rank term for every matrix of the mixers, as in LoLCATs. In stage 2 nothing else learns;
            afterwards the terms are merged into the weights. None: stage 2 trains the whole model.
        progressive: steps of stage 2 after which one more layer gets its mixer, the last layer first (as PoM's authors
            convert Stable Diffusion 3.5, one every 1,000 steps); until then it is the original model's attention.
            report.schedule has the plan. None: all have theirs from the start.
        blocks: weight in stage 2 of each layer's imitation loss against the original model (theirs: 0.1).
        piece: tokens that stage 2 computes at a time, in language models. The mixers' states, and keys and values of
            attention that was kept, are carried from piece to piece without gradients, and a piece is computed again in
            the backward pass: memory grows with the piece instead of the sequence. Stage 1 takes whole sequences.
        keep: "best": 64 samples of the data, or an eighth of fewer than 512, are held back. The loss on them, without
            `blocks`, is taken before each stage and five times in it, and a stage ends with its best weights, be they
            those that it began with. At the end the model gets the weights of the best stage, the conversion included:
            by the metric on `val`, if it is one of polymix; else, or between equals, by the loss on what was held back.
            "last": the last weights stay. report.kept names the stage.
        seed: of the order of the data and of dropout. The global random state is restored afterwards.
        progress, say: where bars and lines about the progress go; without bars each epoch is a line.
    Raises:
        OptionError, DataError, ResultsError, CapabilityError: before any compute. OptionError later if a loss becomes
            NaN or infinite.
    """
    listener = Listener(progress, say if processes()[0] == 0 else lambda line: None)
    fit = Fit(None if out is None else Path(out), resume, device, devices, precision, listener)
    for name, count in (("imitate_epochs", imitate_epochs), ("epochs", epochs), ("seed", seed)):
        check_int(name, count, 0)
    for name, weight in (
        ("labels", labels), ("teacher", teacher), ("weight_decay", weight_decay), ("blocks", blocks),
        ("rest_rate", rest_rate),
    ):  # fmt: skip
        check_number(name, weight, 0.0, math.inf, "a number of at least 0", 1.0)
    for name, size in (("temperature", temperature), ("imitate_lr", imitate_lr), ("learning_rate", learning_rate)):
        check_number(name, size, 1e-12, math.inf, "a number above 0", 1e-3)
    check_choice("loss", loss, LOSSES)
    check_choice("keep", keep, ("best", "last"))
    if loss != "logits" and temperature != 2.0:
        got = f"{temperature} with loss={loss!r}"
        raise OptionError("temperature", got, "none, as it has no effect", "Leave it out.")
    if lora is not None:
        check_int("lora", lora, 1)
    if piece is not None:
        check_int("piece", piece, 1)
    for name, number in (("lora", lora), ("piece", piece)):
        if number is not None and not epochs:
            raise OptionError(name, f"{number} with epochs=0", "epochs of at least 1", f"Leave {name} out.")
    for name, option in (("progressive", progressive), ("blocks", blocks or None)):
        if option is not None and not (epochs and teacher):
            got = f"{option} with {'teacher=0' if epochs else 'epochs=0'}"
            raise OptionError(name, got, "fine-tuning beside the original model", f"Leave {name} out.")
    _check_report(report)
    if not isinstance(report, ConversionReport):
        for name, option in (
            ("imitate_epochs", imitate_epochs if imitate_epochs > 1 else None), ("lora", lora), ("piece", piece),
            ("progressive", progressive), ("blocks", blocks or None),
        ):  # fmt: skip
            if option is not None:
                got = f"{option} for a model without new mixers"
                raise OptionError(name, got, "none, as it is for mixers", f"Leave {name} out.")
        imitate_epochs = 0
    if isinstance(data, str):
        check_choice("data", data, KINDS)
        data = Samples(kind=data)
    if progressive is not None and report.taken_out:
        got = f"{progressive} for {type(report.model).__name__}, which runs without its {', '.join(report.taken_out)}"
        allowed = "a model whose attention can still stand in for a mixer"
        raise CapabilityError("progressive", got, allowed, "Leave progressive out.")
    if piece is not None and (progressive is not None or blocks):
        name = "blocks" if progressive is None else "progressive"
        why = "losses of layers are of whole sequences" if progressive is None else "attention carries no mixer's state"
        raise OptionError("piece", f"{piece} with {name}", "one of the two", f"Leave piece or {name} out: {why}.")
    if lora is not None:
        matrices(report.adapters, lora)
    if loss == "features":
        forward = features_of if forward is logits_of else forward
        metric = relative_error if metric is accuracy else metric
    alone = nullcontext() if out is None else output_folder(out, "out")
    with alone, isolated_random_state(), _at_home(report):
        if isinstance(data, Samples):
            needed = data if imitate_epochs or epochs else replace(data, batches=1)
            data = _drawn(report, needed, fit, seed)
        batch = first_of(data, "data", fit.world)
        if val is not None:
            first_of(val, "val")
        steps = epochs * (len(data) // fit.world)
        report.schedule = {} if progressive is None else schedule(report.adapters, progressive, steps)
        if piece is not None:
            check_pieces(report, batch, piece, loss)
        if epochs:
            _try(report.model, batch, forward, labels, teacher, loss)
        watches = keep == "best" and bool(imitate_epochs or epochs)
        data, apart = hold_back(data, seed) if watches else (data, [])
        comparison = Comparison(labels, teacher, temperature, forward=forward, loss=loss, piece=piece)
        if not epochs:  # there are no labels, and perhaps no logits
            comparison = Comparison(0.0, 1.0, forward=features_of if forward is logits_of else forward, loss="features")
        with report.former() as host:
            if loss == "features" and val is not None:
                with mode(host, False):
                    val = with_features(host, val, forward, fit.place)
            measure = partial(_measure, report, val, forward, metric, fit.place, say)
            measure("before", host)
            taught = comparison.weights[1] and (epochs or watches)
            former = copy.deepcopy(host).eval().requires_grad_(False) if taught else None
        held = HeldBack(apart, comparison, () if former is None else (former,))
        guard = Guard(report, metric, held if watches else None, fit.place)

        def note(stage: str) -> None:
            measure(stage, report.model)
            guard.note(stage)

        if resume and report.untrained:  # an interrupted run in this process has trained the model already
            report.model.load_state_dict(report.untrained)
        note("converted")
        imitated: tuple[float, ...] = ()
        if imitate_epochs and isinstance(report, ConversionReport):
            recipe = fit.recipe(data, imitate_epochs, imitate_lr, weight_decay, seed, keep)
            with report.former() as host:
                imitated = imitate(report, host, fit, data, held, recipe, forward, imitate_epochs)
            note("imitated")
        tuned: tuple[float, ...] = ()
        if epochs:
            report.remember()
            learned = nullcontext() if lora is None else low_rank(report.model, report.adapters, lora, seed)
            with learned, mode(report.model, True):
                recipe = fit.recipe(data, epochs, learning_rate, weight_decay, seed, keep)
                stage = FineTuning(
                    recipe, data, report.model, former, listener, held, comparison, {"loss": loss, "lora": lora},
                    epochs=epochs, rest_rate=rest_rate, adapters=report.adapters, blocks=blocks, plan=report.schedule,
                )  # fmt: skip
                try:
                    tuned = fit(stage)
                finally:
                    stage.stand_ins.clear()
            _say_kept(stage, say)
            note("distilled")
        if guard.restore():
            say(f"The weights of the stage {guard.stage} are kept: a later one made the model worse.")
        if report.unimproved:
            say(report.unimproved)
    return Distillation(imitated, tuned, dict(report.accuracy), report.kept, guard.losses)


def _drawn(report: Replacement, samples: Samples, fit: Fit, seed: int) -> list[dict[str, torch.Tensor]]:
    """Batches that the original model draws. They are kept beside the checkpoints."""
    listener = fit.listener
    with report.former() as host:
        host.to(fit.place)
        return samples.draw(host, seed, file=fit.samples, say=listener.say, progress=listener.progress)


def _say_kept(stage: Stage, say: Callable[[str], None]) -> None:
    """Say so where other weights than the last ones are kept."""
    best, last = stage.kept_step, stage.recipe.steps
    if best is not None and stage.looks[last] != stage.looks[best]:
        after = f"after {plural(best, 'step')} of {last:,}" if best else "from before its first step"
        losses = f"{figure(stage.looks[best])} there, {figure(stage.looks[last])} at the end"
        say(f"{stage.name.capitalize()}: the weights {after} are kept. Loss on samples held back: {losses}.")


def _check_report(report: Any) -> None:
    if not isinstance(report, Replacement) or report.undone or not report.originals:
        ours = isinstance(report, Replacement)
        got = "a report that was undone, or that replaced nothing" if ours else type(report).__name__
        allowed = "what polymix.convert or polymix.polynomialize returned"
        raise OptionError("report", got, allowed, "Convert the model first.")


@torch.no_grad()
def _try(model: nn.Module, batch: Any, forward: Forward, labels: float, teacher: float, loss: str) -> None:
    """Pass one batch through the model, so that mistakes show before hours of training."""
    with mode(model, False):
        answer = answers_of(loss)(model, moved(batch, next(model.parameters()).device), forward)
    if labels and answer.labels is not None:
        answer.label_loss()
    elif not teacher:
        raise OptionError(
            "labels, teacher", (labels, teacher), "labels in the batches, or a teacher", "Pass teacher=1.0, say."
        )


def _measure(
    report: Replacement, val: Any, forward: Forward, metric: Measure, device: str, say: Callable[[str], None],
    name: str, model: nn.Module,
) -> None:  # fmt: skip
    if val is not None:
        report.metric = getattr(metric, "__name__", report.metric)
        value = report.accuracy[name] = metric(model.to(device), val, forward, device)
        what = report.metric.capitalize().replace("_", " ")
        say(f"{what}, {name}: {report.written(value)}.")


def imitate(
    report: ConversionReport, host: nn.Module, fit: Fit, data: Any, held: HeldBack, recipe: Recipe, forward: Forward,
    epochs: int,
) -> tuple[float, ...]:  # fmt: skip
    """Stage 1. The original model does not learn and stays in evaluation mode; the mixers have no dropout."""
    stage = Imitation(recipe, data, host, report.adapters, fit.listener, held, forward=forward, epochs=epochs)
    learning = [p for p in host.parameters() if p.requires_grad]
    hooks = report.follow_grids()
    try:
        for p in learning:
            p.requires_grad_(False)
        with ExitStack() as stack:
            for module in (host, *report.adapters.values()):
                stack.enter_context(mode(module, False))
            losses = fit(stage)
            _say_kept(stage, fit.listener.say)
            return losses
    finally:
        for p in learning:
            p.requires_grad_(True)
        for hook in hooks:
            hook.remove()


@contextmanager
def _at_home(report: Replacement) -> Iterator[None]:
    """Bring model and attention back to the model's device afterwards: a trainer may leave them elsewhere."""
    home = next(report.model.parameters()).device
    try:
        yield
    finally:
        for part in (report.model, *report.originals.values()):
            part.to(home)
