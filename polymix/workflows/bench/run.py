"""`polymix bench`: every mixer × implementation at every size, timed in turn, kept after each group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Protocol

import torch

from polymix.measure.machine import check_device, manifest
from polymix.measure.memory import Apart
from polymix.measure.roofline import Ceiling, ceiling
from polymix.mixers import MixerConfig
from polymix.workflows.bench.group import measure_group
from polymix.workflows.bench.settings import Group, Settings
from polymix.workflows.results import Results


class Progress(Protocol):
    """Where progress goes: a step of `total` is named, then advanced."""

    def start(self, what: str, total: int) -> Callable[[int], None]: ...


def bench(
    settings: Settings, mixers: Mapping[str, MixerConfig], folder: Path, progress: Progress, *, resume: bool = False
) -> Results:
    """Run (or resume) a benchmark of `mixers` by label and leave its results in `folder`.

    What can be wrong with the settings is found before anything is measured, and each finished group of rows is on disk
    before the next begins.
    """
    settings.check(mixers)
    device = check_device(settings.device)
    results = Results.open(folder, settings.to_dict(), manifest(device, max(settings.threads)), resume=resume)
    rows = results.content["rows"]
    done = {Group.of(row) for row in rows}
    groups = list(settings.groups())
    advance = progress.start("Measuring", len(groups))
    with Apart() as apart:
        for step, group in enumerate(groups, start=1):
            if group not in done:
                roof = _ceiling(results, group, settings)
                torch.set_num_threads(group.threads)
                torch.manual_seed(0)
                fewer = [row for row in rows if replace(Group.of(row), tokens=group.tokens) == group]
                results.add("rows", measure_group(settings, mixers, group, roof, apart, fewer))
            advance(step)
    results.set(finished=True)
    return results


def _ceiling(results: Results, group: Group, settings: Settings) -> Ceiling:
    """That of the group's type and threads, measured when it is first needed."""
    for known in results.content["ceilings"]:
        if (known["dtype"], known["threads"]) == (group.dtype, group.threads):
            return Ceiling(**known)
    found = ceiling(group.dtype, group.threads, settings.device, settings.seconds)
    results.add("ceilings", [asdict(found)])
    return found
