"""`polymix convert`: a model in; a faster one, its report and its card out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from polymix.compare.conversion import assess
from polymix.compare.conversion.data import Images, classes
from polymix.compare.conversion.folder import Results, earlier
from polymix.compare.conversion.inputs import check_call, made_up
from polymix.compare.conversion.notes import metadata, notes
from polymix.compare.conversion.settings import RECOMMEND, Settings
from polymix.compare.conversion.sources import Source, load_model
from polymix.compare.recommend import recommend
from polymix.convert import ConversionReport, convert, save_pretrained
from polymix.convert.files import CONFIG
from polymix.convert.plain import mixer_config
from polymix.convert.plan import KEEP
from polymix.errors import OptionError

CHECKPOINTS = "checkpoints"  # in --out, until a run has finished
BATCH = 32  # of images of the user's
_COMPANIONS = ("preprocessor_config.json", "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "spiece.*")


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
    count = None if settings.data is None else classes(settings.data)
    source = load_model(settings.model, settings.weights, classes=count, size=settings.image_size, trust=settings.trust)
    host = source.model.to(settings.device).eval()
    images = None if settings.data is None else Images(settings.data, source, settings.image_size)
    given = _given(settings, source, host, images)
    if plan == RECOMMEND:
        plan = _recommended(host, given, settings, before, say)
    torch.manual_seed(settings.seed)
    report = convert(host, plan, mixer=settings.filling, input=given, init=settings.init, windows=settings.windows)
    if not report.adapters:
        raise OptionError("--plan", f"{settings.plan}, which keeps all attention", "one that replaces some", "")
    code = _save(report.model, out, settings, {})  # what cannot be saved shows before hours of training
    results = Results.open(out, settings.to_dict(), {}, resume=before is not None)
    results.set(plan={layer.name: KEEP if layer.now is None else dict(layer.options) for layer in report.layers})
    if images is not None:
        _distil(report, images, settings, out / CHECKPOINTS, resume, say)
    report.model.eval()
    say("Measuring.")
    found = assess(report, given, seconds=settings.seconds, lengths=settings.lengths)
    said = notes(settings, source, images, code)
    about = {**results.content, "data": None if images is None else images.to_dict(), "notes": said, "code": code}
    _save(report.model, out, settings, {**found.to_dict(), "data": about["data"], "notes": said})
    for file in (file for pattern in _COMPANIONS for file in (source.folder.glob(pattern) if source.folder else ())):
        shutil.copy2(file, out)
    name = Path(settings.model).name
    title = f"{name} with {' and '.join(dict.fromkeys(layer.now for layer in report.layers if layer.now))}"
    found.write(out, title=title, card=metadata(images, title, report.accuracy), about={**about, "finished": True})
    shutil.rmtree(out / CHECKPOINTS, ignore_errors=True)
    how = f'polymix.load_pretrained("{out}"{", trust=True" if code else ""})'
    return [str(found), *said, f"Model, report.html and README.md (the card) are in {out}; {how} loads it."]


def _given(settings: Settings, source: Source, host: nn.Module, images: Images | None) -> Any:
    """What the model is calibrated and measured with: images of the user's, the input that came with it, or noise."""
    if images is not None:
        first = images.data.train[0][: settings.batch or BATCH]
        given = images.inputs(first).to(settings.device)
        images.check_head(host, given)
        return given
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
    report: ConversionReport, images: Images, settings: Settings, folder: Path, resume: bool, say: Callable[[str], None]
) -> None:
    """Also without epochs, for the accuracy before and after the conversion."""
    from polymix.tasks.distill import distill

    imitate, tune = settings.epochs
    if imitate or tune:
        say(f"Distilling on {len(images.data.train[0]):,} images: {imitate} + {tune} epochs.")
    batch = settings.batch or BATCH
    distill(
        report, images.loader(images.data.train, batch, shuffle=True),
        val=images.loader(images.data.test, batch, shuffle=False), imitate_epochs=imitate, epochs=tune, out=folder,
        resume=resume, device=settings.device, seed=settings.seed,
    )  # fmt: skip


def _save(model: nn.Module, out: Path, settings: Settings, metadata: Mapping[str, Any]) -> str | None:
    """Save the model; returns the code of the user's that builds it, where no library does."""
    try:
        save_pretrained(model, out, metadata=metadata)
    except OptionError:
        if ".py:" not in settings.model:
            raise
        save_pretrained(model, out, host=settings.model, metadata=metadata)
    code: str | None = json.loads((out / CONFIG).read_text("utf-8"))["host"].get("call")
    return code
