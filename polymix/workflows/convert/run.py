"""`polymix convert`: load a model, convert it, distil and measure it, and save it with its report and model card."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from polymix.convert import ConversionReport, convert
from polymix.convert.context import Extension, extended
from polymix.convert.plan import KEEP
from polymix.convert.trained import TrainedPlan
from polymix.devices import processes
from polymix.errors import OptionError, PolymixError, ResultsError
from polymix.files import output_folder
from polymix.mixers.spec import mixer_config
from polymix.numbers import plural
from polymix.results import RESULTS, START_AGAIN, Progress, Results
from polymix.workflows.convert.assessment import assess
from polymix.workflows.convert.card import class_names, metadata, usage
from polymix.workflows.convert.content import ConvertContent
from polymix.workflows.convert.drawn import Drawn
from polymix.workflows.convert.generators import generates
from polymix.workflows.convert.hub import push_to_hub
from polymix.workflows.convert.images import Images, class_folders
from polymix.workflows.convert.inputs import Data, reads_text
from polymix.workflows.convert.noise import Noise, own_input
from polymix.workflows.convert.output import Saver
from polymix.workflows.convert.settings import DRAWN, MADE, NOISE, PRECISION, RECOMMEND, Settings
from polymix.workflows.convert.sources import SIZES, Source, load_model, refit
from polymix.workflows.recommend import recommend

CHECKPOINTS = "checkpoints"  # folder in --out while a run is not finished
_TEACHING = {"logits": "labels and from ", "features": "the last features of "}  # before "the original model"
UNTRAINED = "No weights were given: this is the architecture with untrained weights."


def run(
    settings: Settings, out: Path, *, resume: bool = False, say: Callable[[str], None] = lambda line: None,
    progress: Progress | None = None,
) -> list[str]:  # fmt: skip
    """Convert the model, distil it if there is data, measure it, write everything to `out`, and upload it if asked.

    Nothing is left in `out` if the run is refused before training begins.

    Args:
        settings: what to do.
        out: folder to write to; new, empty, or with `resume` that of an interrupted run.
        resume: continue an interrupted run. A finished run is left alone.
        say: called with messages about the progress.
        progress: shows bars; None: each epoch is a message.
    Returns:
        Paragraphs about the result, to print.
    Raises:
        OptionError: as `Settings.check`, or this is one of several processes of torchrun.
    """
    plan: Any = settings.check()
    if (world := processes()[1]) > 1:
        cure = "Start it without torchrun, or start a script with polymix.convert and polymix.distill in it."
        raise OptionError("torchrun", f"{world} processes, all of which would write {out}", "one process", cure)
    with output_folder(out):
        paragraphs = _run(settings, plan, out, resume, say, progress)
    return [*paragraphs, *_pushed(settings, out)]


def _run(
    settings: Settings, plan: Any, out: Path, resume: bool, say: Callable[[str], None], progress: Progress | None
) -> list[str]:
    before = earlier_run(out, settings.to_dict(), resume=resume)
    if before is not None and before["finished"]:
        return [before["headline"], f"This run is finished. {out} was not changed."]
    torch.manual_seed(settings.seed)
    source = load(settings)
    host = source.model.to(settings.device).eval()
    longer = None if settings.context is None else extended(host, settings.context, settings.positions, "--context")
    saver = Saver.of(host, settings, out)
    data = None if settings.data is None else open_data(settings, source)
    inputs = _inputs(settings, source, host, data)
    if isinstance(data, Noise):
        data.prepare(settings.batch or data.batch)
    if plan == RECOMMEND:
        plan = _recommended(host, inputs, settings, before, say)
    torch.manual_seed(settings.seed)
    report = convert(
        host, plan, mixer=settings.filling, input=inputs, init=settings.init, windows=settings.windows,
        positions=settings.positions if longer is None else None, match=settings.match,
        multi_scale=settings.multi_scale, drop=settings.dropped,
    )  # fmt: skip
    report.context = longer
    if not report.adapters:
        raise OptionError(
            "--plan", f"{settings.plan}, which keeps all attention", "a plan that replaces some of it", ""
        )
    if settings.lora is not None:
        from polymix.train.distill.lora import matrices

        matrices(report.adapters, settings.lora, "--lora")
    with _nothing_left(out, keep=before is not None):
        results = ConvertResults.open(out, settings.to_dict(), {}, resume=before is not None)  # first: to resume by it
        results.set(plan={layer.name: KEEP if layer.now is None else dict(layer.options) for layer in report.layers})
        code = saver.save(report.model, {})  # fail before hours of training, not after
        if data is not None:
            _learn(report, source, data, settings, out / CHECKPOINTS, resume, progress, say)
        report.model.eval()
        say("Measuring.")
        measured = assess(report, inputs, seconds=settings.seconds, lengths=settings.lengths)
    searched = isinstance(plan, TrainedPlan) and bool(plan.parts)
    warning = [report.unimproved] if report.unimproved else []
    notes = [*([report.worse] if report.worse else []), *_notes(settings, source, data, code, longer, searched)]
    all_notes = [*notes, *warning]
    about = {**results.content, "data": None if data is None else data.to_dict(), "notes": all_notes, "code": code}
    names = class_names(host, data)
    # No times, which results.json has: equal runs save equal files.
    saver.save(report.model, {**report.to_dict(), "data": about["data"], "notes": all_notes, "classes": names})
    saver.accompany(source.folder, host)
    name = Path(settings.model).name
    title = f"{name} with {' and '.join(dict.fromkeys(layer.now for layer in report.layers if layer.now))}"
    about |= {
        "worse": report.worse is not None,
        "finished": True,
        "trained": source.trained,
        "language": saver.language,
        "generator": generates(host),
    }
    about["usage"] = usage(source, host, data, inputs, saver, code)._asdict()
    result = None if settings.aligns_features else report.result  # an error of features says nothing of the task
    card = metadata(settings, source, data, title, result, saver)
    measured.write(out, title=title, card=card, about=about)
    shutil.rmtree(out / CHECKPOINTS, ignore_errors=True)
    return [
        str(measured),
        *notes,
        f"The model, report.html and README.md (the model card) are in {out}. {saver.loading(code)}",
        *warning,  # last of all, where it is seen
    ]


def load(settings: Settings) -> Source:
    """The model, with a head and an image size that fit the options and the data."""
    from polymix.train.distill.batches import foretells

    named = settings.model.partition("/")[0] in SIZES and not Path(settings.model).is_dir()
    count, pictures = settings.classes, None if settings.data in MADE else settings.data
    if named and pictures is not None:
        count = _count(settings)
    source = load_model(settings.model, settings.weights, classes=count, size=settings.image_size, trust=settings.trust)
    if settings.aligns_features and reads_text(source.model) and foretells(source.model, {}):
        got = "features for a language model, which answers with logits"
        raise OptionError("--distill-loss", got, "logits", "Leave it out.")
    if reads_text(source.model):
        if settings.classes is not None:
            raise OptionError("--classes", settings.classes, "no classes for a text model", "Leave it out.")
    elif generates(source.model):
        if settings.classes is not None:
            raise OptionError("--classes", settings.classes, "no classes for a generator", "Leave it out.")
    elif not named:
        names = None
        if pictures is not None:
            count, names = _count(settings), class_folders(pictures)
        source = refit(source, count, settings.image_size, names, asked=settings.classes is not None)
    if any(settings.epochs) and not source.trained and not settings.from_scratch:
        got = f"{settings.model} with untrained weights, which have nothing to teach"
        cure = "Pass --weights FILE, or --from-scratch to train on the labels alone."
        raise OptionError("--distill-epochs", got, "a model with trained weights", cure)
    if settings.from_scratch and source.trained:
        got = f"{settings.model}, whose weights are trained"
        raise OptionError("--from-scratch", got, "a model with untrained weights", "Leave --from-scratch out.")
    return source


def _count(settings: Settings) -> int:
    """The number of classes of the data. Raises OptionError where --classes says another."""
    assert settings.data is not None
    count = len(class_folders(settings.data))
    if settings.classes not in (None, count):
        got = f"{settings.classes}, and {settings.data} has {count} classes"
        raise OptionError("--classes", got, "as many classes as the data has", "Leave it out.")
    return count


@contextmanager
def _nothing_left(out: Path, *, keep: bool) -> Iterator[None]:
    """Remove what this run has written to `out` if it is refused before its first checkpoint."""
    held = {path.name for path in out.iterdir()}
    try:
        yield
    except PolymixError:
        if not keep and not any((out / CHECKPOINTS).rglob("*.ckpt")):
            for path in out.iterdir():
                if path.name not in held:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        raise


def _pushed(settings: Settings, out: Path) -> list[str]:
    """Upload the folder if that was asked for; the sentence that says so."""
    if settings.push_to_hub is None:
        return []
    return [f"Uploaded to {push_to_hub(out, settings.push_to_hub)}."]


def open_data(settings: Settings, source: Source) -> Data:
    """The user's data: text for a text model, or what it draws; noise for a generator, else images."""
    assert settings.data is not None
    if settings.data in DRAWN:
        return Drawn(settings.data, source, settings)
    if reads_text(source.model):
        from polymix.workflows.convert.text import Text

        return Text(settings.data, source, settings)
    if settings.data == NOISE:
        return Noise(source.model, source, settings.image_size, settings.seed)
    if generates(source.model):
        got = f"{settings.data} for {type(source.model).__name__}, which turns noise into images"
        raise OptionError("--data", got, NOISE, f"Pass --data {NOISE}.")
    return Images(settings.data, source, settings.image_size, features=settings.aligns_features)


def _inputs(settings: Settings, source: Source, host: nn.Module, data: Data | None) -> Any:
    """The input to calibrate and measure with: of the user's data, the one that came with the model, or random."""
    if data is not None:
        return data.sample(host, settings.batch or data.batch, settings.device)
    return own_input(host, source, settings.batch, settings.image_size, settings.length)


def _recommended(
    host: nn.Module, inputs: Any, settings: Settings, before: dict[str, Any] | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """The plan of the run that is continued, since measurements vary; else the plan of a new recommendation."""
    if before is not None and before["plan"]:
        return {name: mixer if mixer == KEEP else mixer_config(mixer) for name, mixer in before["plan"].items()}
    say("Measuring attention and mixers, to recommend a plan.")
    answer = recommend(host, input=inputs, seconds=settings.seconds)
    say(answer.headline)
    plan = answer.plan()
    if set(plan.values()) == {KEEP}:
        got = f"{RECOMMEND}, which on this machine keeps attention everywhere"
        raise OptionError("--plan", got, "a plan that replaces attention", "To convert anyway, name a mixer.")
    return dict(plan)


def _learn(
    report: ConversionReport, source: Source, data: Data, settings: Settings, folder: Path, resume: bool,
    progress: Progress | None, say: Callable[[str], None],
) -> None:  # fmt: skip
    """Fit a new head, then distil the model. Without epochs, measure the accuracy before and after the conversion.

    The accuracy of untrained weights is not measured: it says nothing about the conversion.
    """
    from polymix.train.distill import LEARNING_RATE, REST_RATE, distill, fit_head, metrics

    imitate, tune = settings.epochs
    train, held_back = data.loaders(settings.batch or data.batch)
    if source.loaded.new_head:
        say(f"Fitting the new head on {data.size}.")
        layers = list(dict.fromkeys(name.rpartition(".")[0] for name in source.loaded.new_head))
        with torch.random.fork_rng(devices=[]), report.former() as host:
            torch.manual_seed(settings.seed)
            fit_head(host, train, layers=layers, device=settings.device)
    if imitate or tune:
        how = "Training from scratch" if settings.from_scratch else "Distilling"
        say(f"{how} on {data.size}: {imitate} + {tune} epochs.")
    learning = {**data.learning, "metric": getattr(metrics, data.metric)}
    if settings.aligns_features:
        learning = {"loss": "features", "metric": metrics.relative_error}
    if source.trained or tune:
        distill(
            report, train, val=held_back, imitate_epochs=imitate, epochs=tune,
            learning_rate=settings.learning_rate or LEARNING_RATE,
            rest_rate=1.0 if settings.from_scratch else REST_RATE,
            teacher=0.0 if settings.from_scratch else 1.0, out=folder, resume=resume, device=settings.device,
            precision=PRECISION[settings.precision], lora=settings.lora, progressive=settings.progressive,
            seed=settings.seed,
            piece=_piece(report, settings), progress=progress, say=say, **learning,
        )  # fmt: skip
    if not source.trained:
        report.accuracy = {"trained": report.accuracy[report.kept or "distilled"]} if tune else {}
        report.kept = None


def _piece(report: ConversionReport, settings: Settings) -> int | None:
    """The tokens to learn at a time: as many as the model took before, if its mixers carry a state further."""
    longer, (_, tune) = report.context, settings.epochs
    if longer is None or not tune or (settings.length or 0) <= longer.before:
        return None
    mixers = [adapter.mixer for adapter in report.adapters.values() if adapter.causal]
    recurrent = len(mixers) == len(report.adapters) and all(mixer.capabilities.recurrent for mixer in mixers)
    return longer.before if recurrent else None


def _notes(
    settings: Settings, source: Source, data: Data | None, code: str | None, longer: Extension | None, searched: bool
) -> list[str]:
    """Sentences about the model for report and card.

    code: the user code that builds the model, if any. searched: whether the plan came with trained mixers.
    """
    imitate, tune = settings.epochs
    notes = [] if source.trained else [UNTRAINED]
    if settings.from_scratch:
        notes = [f"The model was trained from scratch for {plural(tune, 'epoch')}, on the labels alone."]
    elif imitate or tune:
        learned = "the whole model" if settings.lora is None else f"a term of rank {settings.lora} for every matrix"
        notes.append(
            f"After the conversion it was trained for {plural(imitate, 'epoch')} in which each mixer imitated its "
            f"attention, and {plural(tune, 'epoch')} in which {learned} learned from "
            f"{'' if isinstance(data, (Noise, Drawn)) else _TEACHING[settings.distill_loss]}the original "
            f"model{'' if settings.lora is None else ' (LoRA, merged afterwards)'}."
        )
        if settings.progressive is not None:
            every = plural(settings.progressive, "step")
            notes[-1] += f" The layers got their mixers one by one, the last first, every {every}."
    elif searched:
        notes.append("The mixers were trained by polymix search, each to do what the attention in its place did.")
    elif source.trained:
        notes.append(
            "The mixers have not been trained since they replaced attention. Distil the model before you use it."
        )
    notes += [str(source.loaded)] if str(source.loaded) else []
    notes += [] if longer is None else [str(longer)]
    if source.loaded.new_head:
        fitted = "It was fitted to the training images by logistic regression on the original model's features."
        notes[-1] += f" {'Train it: its outputs mean nothing yet.' if data is None else fitted}"
    if PRECISION[settings.precision] != "float32":
        notes.append(f"It was trained in mixed precision ({PRECISION[settings.precision]}).")
    notes += [] if data is None else data.notes()
    if source.unused:
        names = ", ".join(source.unused[:3]) + " …" * (len(source.unused) > 3)
        notes.append(f"{len(source.unused)} saved weights are not part of the model and were left out: {names}.")
    if code is not None:
        notes.append(f"The model is built by user code, {code}. Read that code, then load the model with trust=True.")
    return notes


# The folder of results


class ConvertResults(Results):
    """results.json of a conversion: the settings, the plan, the data, and at the end the measurements."""

    kind: ClassVar[Any] = ConvertContent
    command: ClassVar[str] = "polymix convert"


def earlier_run(folder: Path, settings: Mapping[str, Any], *, resume: bool) -> dict[str, Any] | None:
    """The results of the run to continue in `folder`; None where the folder is empty or missing.

    Raises:
        ResultsError: the folder holds other files, a run while `resume` is off, or a run with other
            settings.
    """
    held = sorted(path.name for path in folder.iterdir() if path.name[0] != ".") if folder.is_dir() else []
    if not held:
        return None
    if RESULTS not in held:
        got = f"{folder}, which holds {', '.join(held[:3])}{' …' * (len(held) > 3)}"
        cure = "Choose another folder; nothing is overwritten."
        raise ResultsError("--out", got, "an empty folder or a new name", cure)
    machine = ConvertResults.load(folder / RESULTS, START_AGAIN)[
        "machine"
    ]  # any machine: the model does not depend on it
    content: dict[str, Any] = ConvertResults.open(folder, settings, machine, resume=resume).content
    if content["finished"] and "headline" not in content:
        got = f"{folder / RESULTS}, by which the run is finished and has no result"
        raise ResultsError("--resume", got, "results as polymix convert wrote them", "Choose another --out.")
    return content
