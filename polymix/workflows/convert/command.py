"""`polymix convert`: a model in; a faster one, its report and its card out."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from polymix.convert import ConversionReport, convert
from polymix.convert.plan import KEEP
from polymix.errors import OptionError
from polymix.mixers.spec import mixer_config
from polymix.workflows.convert import assess
from polymix.workflows.convert.data import Data
from polymix.workflows.convert.folder import Results, earlier
from polymix.workflows.convert.images import Images, classes
from polymix.workflows.convert.inputs import check_call, made_up, reads_text
from polymix.workflows.convert.named import SIZES
from polymix.workflows.convert.notes import notes
from polymix.workflows.convert.output import Saver
from polymix.workflows.convert.settings import RECOMMEND, Settings
from polymix.workflows.convert.sources import Source, load_model
from polymix.workflows.recommend import recommend

CHECKPOINTS = "checkpoints"  # in --out, until a run has finished


def run(
    settings: Settings, out: Path, *, resume: bool = False, say: Callable[[str], None] = lambda line: None
) -> list[str]:
    """Convert, distil where there is data, measure, write everything to `out`; returns what is to be said of it.

    Nothing is written before the conversion stands and can be saved. `resume` goes on with a run that was interrupted,
    and leaves one alone that had finished.
    """
    plan: Any = settings.check()
    before = earlier(out, settings.to_dict(), resume=resume)
    if before is not None and before["finished"]:
        return [before["headline"], f"This run had finished: {out} is left as it is."]
    torch.manual_seed(settings.seed)
    named = settings.model.partition("/")[0] in SIZES and not Path(settings.model).is_dir()
    count = classes(settings.data) if settings.data is not None and named else None
    source = load_model(settings.model, settings.weights, classes=count, size=settings.image_size, trust=settings.trust)
    host = source.model.to(settings.device).eval()
    saver = Saver.of(host, settings, out)
    data = None if settings.data is None else _open_data(settings, source)
    given = _given(settings, source, host, data)
    if plan == RECOMMEND:
        plan = _recommended(host, given, settings, before, say)
    torch.manual_seed(settings.seed)
    report = convert(host, plan, mixer=settings.filling, input=given, init=settings.init, windows=settings.windows)
    if not report.adapters:
        raise OptionError("--plan", f"{settings.plan}, which keeps all attention", "one that replaces some", "")
    code = saver.save(report.model, {})  # what cannot be saved shows before hours of training
    results = Results.open(out, settings.to_dict(), {}, resume=before is not None)
    results.set(plan={layer.name: KEEP if layer.now is None else dict(layer.options) for layer in report.layers})
    if data is not None:
        _distil(report, data, settings, out / CHECKPOINTS, resume, say)
    report.model.eval()
    say("Measuring.")
    found = assess(report, given, seconds=settings.seconds, lengths=settings.lengths)
    said = notes(settings, source, data, code)
    about = {**results.content, "data": None if data is None else data.to_dict(), "notes": said, "code": code}
    saver.save(report.model, {**found.to_dict(), "data": about["data"], "notes": said})
    saver.accompany(source.folder, host)
    name = Path(settings.model).name
    title = f"{name} with {' and '.join(dict.fromkeys(layer.now for layer in report.layers if layer.now))}"
    about |= {"finished": True, "language": saver.language}
    found.write(out, title=title, card=_card(data, title, report.accuracy, saver), about=about)
    shutil.rmtree(out / CHECKPOINTS, ignore_errors=True)
    return [str(found), *said, f"Model, report.html and README.md (the card) are in {out}; {saver.loading(code)}"]


def _open_data(settings: Settings, source: Source) -> Data:
    """Text for a model that foretells the next token, else images."""
    assert settings.data is not None
    if reads_text(source.model):
        from polymix.workflows.convert.text import Text

        return Text(settings.data, source, settings)
    return Images(settings.data, source, settings.image_size)


def _given(settings: Settings, source: Source, host: nn.Module, data: Data | None) -> Any:
    """What the model is calibrated and measured with: data of the user's, the input that came with it, or noise."""
    if data is not None:
        return data.given(host, settings.batch or data.batch, settings.device)
    if source.input is None:
        given = made_up(host, batch=settings.batch or 1, size=settings.image_size, tokens=settings.tokens)
    else:
        given = tree_map_only(Tensor, lambda t: t.to(settings.device), source.input)
        for name in ("batch", "image_size", "tokens"):
            if getattr(settings, name) is not None:
                option = "--" + name.replace("_", "-")
                raise OptionError(option, getattr(settings, name), "none beside an input of the model's own", "")
    check_call(host, given)
    return given


def _card(data: Data | None, title: str, accuracy: Mapping[str, float], saver: Saver) -> dict[str, Any]:
    """Beside tags, in a hub's terms: which library loads it, and what it reached on data that was held back."""
    last = next((accuracy[name] for name in ("distilled", "imitated", "converted") if name in accuracy), None)
    library = {"library_name": "transformers", "pipeline_tag": "text-generation"} if saver.language else {}
    return {**library, **({} if data is None else data.card(title, last))}


def _recommended(
    host: nn.Module, given: Any, settings: Settings, before: dict[str, Any] | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """The plan of the run that is gone on with, since no two measurements are alike; else of a new one."""
    if before is not None and before["plan"]:
        return {name: said if said == KEEP else mixer_config(said) for name, said in before["plan"].items()}
    say("Measuring what to recommend.")
    answer = recommend(host, input=given, seconds=settings.seconds)
    say(answer.headline)
    plan = answer.plan()
    if set(plan.values()) == {KEEP}:
        got = f"{RECOMMEND}, and by what was measured here attention is best kept everywhere"
        raise OptionError("--plan", got, "a mixer", "Name one to convert all the same.")
    return dict(plan)


def _distil(
    report: ConversionReport, data: Data, settings: Settings, folder: Path, resume: bool, say: Callable[[str], None]
) -> None:
    """Also without epochs, for the accuracy before and after the conversion."""
    from polymix.tasks.distill import distill, metrics

    imitate, tune = settings.epochs
    if imitate or tune:
        say(f"Distilling on {data.size}: {imitate} + {tune} epochs.")
    train, held_back = data.loaders(settings.batch or data.batch)
    distill(
        report, train, val=held_back, metric=getattr(metrics, data.metric), imitate_epochs=imitate, epochs=tune,
        out=folder, resume=resume, device=settings.device, seed=settings.seed,
    )  # fmt: skip
