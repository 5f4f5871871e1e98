"""The rows of results.json: one for each model trained, in the same form for every task."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypedDict

import torch
from torch import nn

from polymix.errors import ResultsError
from polymix.limits import too_large
from polymix.measure import peak_memory, repeated
from polymix.measure.clock import Clock
from polymix.numbers import metric
from polymix.results import Machine, wrong_part
from polymix.train.data.sampling import isolated_random_state
from polymix.train.place import Place
from polymix.train.recipe import CONTROL
from polymix.train.task import Metric, Task

UP, DOWN = "up", "down"
MIN_SECONDS = 0.2  # seconds of inference to measure


class TrainRow(TypedDict):
    """A trained model, in the same form for every task. A value of None was not measured, or the paper has none."""

    task: str
    host: str
    mixer: str
    seed: int
    metrics: Annotated[dict[str, float | None], "by name, the headline first; null: not finite"]
    directions: Annotated[dict[str, Literal["up", "down"]], "of each metric; up: more is better"]
    units: Annotated[dict[str, Literal["", "%"]], "of each metric; %: a share from 0 to 1, written in per cent"]
    parameters: int
    steps: Annotated[int, "of the training"]
    unit: Annotated[str, "what the speeds count"]
    training_per_second: float | None
    inference_per_second: float | None
    clock: Annotated[Clock, "of the speeds"]
    peak_bytes: Annotated[int | None, "the most that a training step holds beyond weights and batch"]
    paper: Annotated[dict[str, Any] | None, "the paper's metrics for this mixer, and their source"]


class _WhenFinished(TypedDict, total=False):
    data: Annotated[Any, "what the task keeps of its data, to evaluate and predict without them"]
    about: dict[str, Any]
    pictures: Annotated[list[str], "files beside results.json"]
    control: Annotated[str | None, "how far the model that mixes nothing is from this one"]


class TrainContent(_WhenFinished):
    """What results.json of `polymix train` holds."""

    schema: Literal["polymix.train/1"]
    finished: Annotated[bool, "false while a run or its control goes on, or after it was interrupted"]
    task: str
    settings: Annotated[dict[str, Any], "the recipe"]
    parameters: int
    machine: Machine
    metrics: Annotated[dict[str, Any], "the last value of each"]
    evaluations: Annotated[list[dict[str, Any]], "each measurement on held-out data, with its step"]
    rows: Annotated[list[TrainRow], "the model's, once it is trained, then its control's"]


class PredictContent(TypedDict):
    """What predictions.json of `polymix predict` holds."""

    schema: Literal["polymix.predict/1"]
    task: str
    model: Annotated[str, "its folder"]
    results: Annotated[list[dict[str, Any]], "what the model says of each file, in the task's own form"]


def make_row(
    task: Task[Any, Any], model: nn.Module, metrics: Mapping[str, Any], kinds: Mapping[str, Metric],
    speed: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """A row: the model, its metrics with their directions and units, and what it costs.

    Args:
        kinds: what the task declares, by metric. speed: of `measure_speed`, and "training_per_second".
    """
    recipe = task.recipe
    return {
        "task": task.name,
        "host": task.host_name(model),
        "mixer": recipe.mixer_name,
        "seed": recipe.seed,
        "metrics": dict(metrics),
        "directions": {name: UP if kinds[name].better == "higher" else DOWN for name in metrics},
        "units": {name: kinds[name].unit for name in metrics},
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "steps": recipe.steps,
        "clock": "wall",
        **speed,
        "paper": task.published(),
    }


def measure_speed(task: Task[Any, Any], model: nn.Module, place: Place, batch: Any) -> dict[str, Any]:
    """Items per second in inference, and the most memory that a training step holds beyond weights and batch.

    None where there is too little memory for it: several processes may share a sequence that one alone cannot hold.

    Args:
        model: on its device. Its gradients are gone afterwards.
        batch: one batch of its data; None: nothing is measured.
    """
    found: dict[str, Any] = {"unit": task.unit, "inference_per_second": None, "peak_bytes": None}
    if batch is None:
        return found
    device = str(place.device)
    try:
        with isolated_random_state(), place.autocast():
            model.eval()
            with torch.no_grad():
                timing = repeated(lambda: task.infer(model, batch), seconds=MIN_SECONDS, most=10, device=device)
            found["inference_per_second"] = round(task.size(batch) / timing.median, 2)
            model.train()
            found["peak_bytes"] = peak_memory(lambda: task.loss(model, batch).backward(), device)
    except (RuntimeError, MemoryError) as error:
        if not too_large(error):
            raise
    model.zero_grad(set_to_none=True)
    return found


def headline(row: Mapping[str, Any]) -> str | None:
    """The name of a row's first metric; None where nothing was measured."""
    return next(iter(row["metrics"]), None)


def floor_sentence(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """How far the model that mixes nothing is from each mixer, in one sentence; None without such a row."""
    floors = [row for row in rows if row["mixer"] == CONTROL]
    others = [row for row in rows if row["mixer"] != CONTROL]
    name = headline(floors[0]) if floors else None
    if name is None or not others:
        return None
    floor = _mean(floors, name)
    means = {mixer: _mean([row for row in others if row["mixer"] == mixer], name)
             for mixer in dict.fromkeys(row["mixer"] for row in others)}  # fmt: skip
    if floor is None or None in means.values():
        return f"{CONTROL} or another mixer has no {name}: they cannot be compared."
    unit = floors[0]["units"][name]
    shown = " and ".join(f"{metric(value, unit)} for {mixer}" for mixer, value in means.items())
    end = "mixes nothing between tokens"
    sign = 1 if floors[0]["directions"][name] == UP else -1
    best = max(sign * value for value in means.values() if value is not None)
    verdict = "" if best > sign * floor else ": mixing added nothing in this run"
    return f"{CONTROL}, which {end}, reaches {name} {metric(floor, unit)}, against {shown}{verdict}."


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [row["metrics"].get(name) for row in rows]
    return None if any(value is None for value in values) else statistics.fmean(values)


def check_rows(content: Mapping[str, Any], source: str) -> list[dict[str, Any]]:
    """The rows of a results.json. Raises ResultsError where one lacks a column or has another type in it."""
    rows = content.get("rows")
    if wrong := wrong_part(rows, list[TrainRow], "rows"):
        raise ResultsError("rows", f"{source} with {wrong}", "rows of polymix train", "")
    return list(rows or [])
