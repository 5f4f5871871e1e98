"""`polymix search`: load a model and its data as `polymix convert` does, and search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from polymix.errors import OptionError
from polymix.files import output_folder
from polymix.results import Progress
from polymix.workflows.convert.inputs import reads_text
from polymix.workflows.convert.noise import Noise
from polymix.workflows.convert.run import load, open_data
from polymix.workflows.convert.settings import DRAWN, Settings
from polymix.workflows.search.answer import Search
from polymix.workflows.search.run import MIXERS, search

BATCH = 16  # at the most, by default: a search takes small steps


def run(
    settings: Settings, out: Path, *, budget: float, mixers: Sequence[str] | None, steps: int, learning_rate: float,
    seconds: float, resume: bool = False, say: Callable[[str], None] = lambda line: None,
    progress: Progress | None = None,
) -> Search:  # fmt: skip
    """The command: search the plan for a model on the user's data.

    Args:
        settings: the model and the data, as `polymix convert` takes them.
        mixers: None: `MIXERS`.
        out: folder for results.json, plan.json, the trained mixers and report.html.
        budget, steps, learning_rate, seconds, resume, say, progress: as of `polymix.search`.
    """
    settings.check()
    if settings.data in DRAWN:
        got = f"{settings.data}: texts that a model draws, which a search does not measure on"
        raise OptionError("--data", got, "data of yours", "Pass a text; polymix convert --data takes such texts.")
    with output_folder(out):
        torch.manual_seed(settings.seed)
        source = load(settings)
        if not source.trained:
            got = f"{settings.model} with untrained weights, whose output carries nothing"
            raise OptionError("--model", got, "a model with trained weights", "Pass --weights FILE.")
        model = source.model.to(settings.device).eval()
        data, learning = _data(settings, source)
        return search(
            model, data, budget=budget, mixers=mixers or MIXERS, steps=steps, learning_rate=learning_rate,
            seconds=seconds, seed=settings.seed, out=out, resume=resume, say=say, progress=progress, **learning,
        )  # fmt: skip


def _data(settings: Settings, source: Any) -> tuple[Any, dict[str, Any]]:
    """Batches of the user's data, and the arguments of `polymix.search` that they need."""
    from polymix.train.distill.batches import foretells
    from polymix.workflows.search.lines import Lines

    if reads_text(source.model) and not foretells(source.model, {}):
        assert settings.data is not None
        lines = Lines(settings.data, source, settings)
        shape = {} if settings.tokens is None else {"input": lines.full(settings.batch)}
        return lines.loader(settings.batch), shape
    data = open_data(settings, source)
    batch = settings.batch or min(data.batch, BATCH)
    data.sample(source.model, batch, settings.device)  # raises where the model does not take it
    if isinstance(data, Noise):
        data.prepare(batch)
    return data.loaders(batch)[0], dict(data.learning)
