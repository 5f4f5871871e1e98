"""`polymix convert`: load a model, convert it, distil and measure it, and save it with its report and model card."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from polymix._io import RESULTS, Results, check_folder
from polymix.convert import ConversionReport, convert
from polymix.convert.plan import KEEP
from polymix.errors import OptionError, ResultsError
from polymix.mixers.spec import mixer_config
from polymix.workflows.convert.assessment import assess
from polymix.workflows.convert.images import Images, classes
from polymix.workflows.convert.inputs import Data, check_call, random_input, reads_text
from polymix.workflows.convert.output import Saver
from polymix.workflows.convert.settings import RECOMMEND, Settings
from polymix.workflows.convert.sources import SIZES, Source, load_model
from polymix.workflows.recommend import recommend

CHECKPOINTS = "checkpoints"  # folder in --out while a run is not finished
FRESH = "No weights were given: this is the architecture with untrained weights."


def run(
    settings: Settings, out: Path, *, resume: bool = False, say: Callable[[str], None] = lambda line: None
) -> list[str]:
    """Convert the model, distil it if there is data, measure it, and write everything to `out`.

    Nothing is written before the converted model is known to be one that can be saved.

    Args:
        settings: what to do.
        out: folder to write to; new, empty, or with `resume` that of an interrupted run.
        resume: continue an interrupted run. A finished run is left alone.
        say: called with messages about the progress.
    Returns:
        Paragraphs about the result, to print.
    """
    plan: Any = settings.check()
    before = earlier_run(out, settings.to_dict(), resume=resume)
    if before is not None and before["finished"]:
        return [before["headline"], f"This run is finished. {out} was not changed."]
    torch.manual_seed(settings.seed)
    named = settings.model.partition("/")[0] in SIZES and not Path(settings.model).is_dir()
    count = classes(settings.data) if settings.data is not None and named else None
    source = load_model(settings.model, settings.weights, classes=count, size=settings.image_size, trust=settings.trust)
    host = source.model.to(settings.device).eval()
    saver = Saver.of(host, settings, out)
    data = None if settings.data is None else _open_data(settings, source)
    inputs = _inputs(settings, source, host, data)
    if plan == RECOMMEND:
        plan = _recommended(host, inputs, settings, before, say)
    torch.manual_seed(settings.seed)
    report = convert(
        host, plan, mixer=settings.filling, input=inputs, init=settings.init, windows=settings.windows,
        multi_scale=settings.multi_scale,
    )  # fmt: skip
    if not report.adapters:
        raise OptionError(
            "--plan", f"{settings.plan}, which keeps all attention", "a plan that replaces some of it", ""
        )
    code = saver.save(report.model, {})  # fail before hours of training, not after
    results = ConvertResults.open(out, settings.to_dict(), {}, resume=before is not None)
    results.set(plan={layer.name: KEEP if layer.now is None else dict(layer.options) for layer in report.layers})
    if data is not None:
        _distil(report, data, settings, out / CHECKPOINTS, resume, say)
    report.model.eval()
    say("Measuring.")
    measured = assess(report, inputs, seconds=settings.seconds, lengths=settings.lengths)
    notes = _notes(settings, source, data, code)
    about = {**results.content, "data": None if data is None else data.to_dict(), "notes": notes, "code": code}
    saver.save(report.model, {**measured.to_dict(), "data": about["data"], "notes": notes})
    saver.accompany(source.folder, host)
    name = Path(settings.model).name
    title = f"{name} with {' and '.join(dict.fromkeys(layer.now for layer in report.layers if layer.now))}"
    about |= {"finished": True, "language": saver.language}
    measured.write(out, title=title, card=_card(data, title, report.accuracy, saver), about=about)
    shutil.rmtree(out / CHECKPOINTS, ignore_errors=True)
    return [
        str(measured),
        *notes,
        f"The model, report.html and README.md (the model card) are in {out}. {saver.loading(code)}",
    ]


def _open_data(settings: Settings, source: Source) -> Data:
    """The user's data: text for a text model, else images."""
    assert settings.data is not None
    if reads_text(source.model):
        from polymix.workflows.convert.text import Text

        return Text(settings.data, source, settings)
    return Images(settings.data, source, settings.image_size)


def _inputs(settings: Settings, source: Source, host: nn.Module, data: Data | None) -> Any:
    """The input to calibrate and measure with: of the user's data, the one that came with the model, or random."""
    if data is not None:
        return data.sample(host, settings.batch or data.batch, settings.device)
    if source.input is None:
        inputs = random_input(host, batch=settings.batch or 1, size=settings.image_size, tokens=settings.tokens)
    else:
        inputs = tree_map_only(Tensor, lambda t: t.to(settings.device), source.input)
        for name in ("batch", "image_size", "tokens"):
            if getattr(settings, name) is not None:
                option = "--" + name.replace("_", "-")
                raise OptionError(option, getattr(settings, name), "no such option: the function returns the input", "")
    check_call(host, inputs)
    return inputs


def _card(data: Data | None, title: str, accuracy: Mapping[str, float], saver: Saver) -> dict[str, Any]:
    """Metadata for the model card: the library that loads the model, and its result on the data held back."""
    last = next((accuracy[name] for name in ("distilled", "imitated", "converted") if name in accuracy), None)
    library = {"library_name": "transformers", "pipeline_tag": "text-generation"} if saver.language else {}
    return {**library, **({} if data is None else data.card(title, last))}


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


def _distil(
    report: ConversionReport, data: Data, settings: Settings, folder: Path, resume: bool, say: Callable[[str], None]
) -> None:
    """Distil the model. Without epochs, measure the accuracy before and after the conversion."""
    from polymix.tasks.distill import distill, metrics

    imitate, tune = settings.epochs
    if imitate or tune:
        say(f"Distilling on {data.size}: {imitate} + {tune} epochs.")
    train, held_back = data.loaders(settings.batch or data.batch)
    distill(
        report, train, val=held_back, metric=getattr(metrics, data.metric), imitate_epochs=imitate, epochs=tune,
        out=folder, resume=resume, device=settings.device, seed=settings.seed,
    )  # fmt: skip


def _notes(settings: Settings, source: Source, data: Data | None, code: str | None) -> list[str]:
    """Sentences about the model for report and card. code: the user code that builds the model, if any."""
    notes = [] if source.trained else [FRESH]
    if any(settings.epochs):
        imitate, tune = settings.epochs
        notes.append(
            f"After the conversion it was trained for {_epochs(imitate)} in which each mixer imitated its attention, "
            f"and {_epochs(tune)} in which the whole model learned from labels and from the original model."
        )
    elif source.trained:
        notes.append(
            "The mixers have not been trained since they replaced attention. Distil the model before you use it."
        )
    notes += [] if data is None else data.notes()
    if source.unused:
        names = ", ".join(source.unused[:3]) + " …" * (len(source.unused) > 3)
        notes.append(f"{len(source.unused)} saved weights are not part of the model and were left out: {names}.")
    if code is not None:
        notes.append(f"The model is built by user code, {code}. Read that code, then load the model with trust=True.")
    return notes


def _epochs(count: int) -> str:
    return f"{count} epoch{'s' * (count != 1)}"


# The folder of results


class ConvertResults(Results):
    """results.json of a conversion: the settings, the plan, the data, and at the end the measurements."""

    schema: ClassVar[str] = "polymix.convert/1"
    command: ClassVar[str] = "polymix convert"
    parts: ClassVar[Mapping[str, Any]] = {"plan": None}


def earlier_run(folder: Path, settings: Mapping[str, Any], *, resume: bool) -> dict[str, Any] | None:
    """The results of the run to continue in `folder`; None where the folder is empty or missing.

    Raises:
        OptionError, ResultsError: the folder holds other files, a run while `resume` is off, or a run with other
            settings.
    """
    check_folder(folder)
    held = sorted(path.name for path in folder.iterdir() if path.name[0] != ".") if folder.is_dir() else []
    if not held:
        return None
    if RESULTS not in held:
        got = f"{folder}, which holds {', '.join(held[:3])}{' …' * (len(held) > 3)}"
        cure = "Choose another folder; nothing is overwritten."
        raise ResultsError("--out", got, "an empty folder or a new name", cure)
    machine = ConvertResults.load(folder / RESULTS)["machine"]  # any machine: the model does not depend on it
    return ConvertResults.open(folder, settings, machine, resume=resume).content
