"""The rows of results.json: one for each model trained, in the same form for every task."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from polymix.errors import ResultsError
from polymix.measure.timing import peak_memory
from polymix.numbers import metric
from polymix.tasks.recipe import CONTROL, TaskRecipe
from polymix.tasks.trainer import isolate_rng

UP, DOWN = "up", "down"
_LONG_ENOUGH = 0.2  # seconds of inference to measure

# What every row has, and the types of its values. A value of None was not measured, or the paper has none.
COLUMNS: dict[str, tuple[type, ...]] = {
    "task": (str,), "host": (str,), "mixer": (str,), "seed": (int,), "metrics": (dict,), "directions": (dict,),
    "parameters": (int,), "steps": (int,), "unit": (str,), "training_per_second": (float, int, type(None)),
    "inference_per_second": (float, int, type(None)), "peak_bytes": (int, type(None)), "paper": (dict, type(None)),
}  # fmt: skip


def make_row(
    task: Any, recipe: TaskRecipe, model: nn.Module, metrics: Mapping[str, Any], directions: Mapping[str, str],
    speed: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """A row: the model, its metrics with their directions ("up": more is better), and what it costs.

    Args:
        task: whose metrics.py may have paper(recipe), the paper's metrics for this mixer, or None.
        speed: of `measure_speed`, and "training_per_second".
    """
    return {
        "task": task.name,
        "host": task.call("model", "host_name", recipe) or type(model).__name__,
        "mixer": recipe.mixer_name,
        "seed": recipe.seed,
        "metrics": dict(metrics),
        "directions": {name: directions[name] for name in metrics},
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "steps": recipe.steps,
        **speed,
        "paper": task.call("metrics", "paper", recipe),
    }


def direction(name: str, declared: Mapping[str, str]) -> str:
    """Whether a metric is better "up" or "down": as metrics.py declares it, else by the usual words for errors."""
    if name in declared:
        return declared[name]
    errors = ("loss", "error", "perplexity", "bits", "cer", "wer", "distance", "fid")
    return DOWN if any(word in name.lower() for word in errors) else UP


def measure_speed(learner: Any, batch: Any) -> dict[str, Any]:
    """Items per second in inference, and the most memory that a training step holds beyond weights and batch.

    Args:
        learner: with the trained model, on its device. Its gradients are gone afterwards.
        batch: one batch of its data; None: nothing is measured.
    """
    if batch is None:
        return {"unit": learner.unit, "inference_per_second": None, "peak_bytes": None}
    device, times = str(next(learner.model.parameters()).device), list[float]()
    with isolate_rng(), torch.autocast(device.split(":")[0], torch.bfloat16, learner.recipe.precision == "bfloat16"):
        learner.model.eval()
        with torch.no_grad():
            learner.infer(batch)
            while not times or (sum(times) < _LONG_ENOUGH and len(times) < 10):
                start = time.perf_counter()
                learner.infer(batch)
                if device.startswith("cuda"):
                    torch.cuda.synchronize()
                times.append(time.perf_counter() - start)
        learner.model.train()
        peak = peak_memory(lambda: learner.loss(batch).backward(), device)
        learner.model.zero_grad(set_to_none=True)
    speed = learner.size(batch) / statistics.median(times)
    return {"unit": learner.unit, "inference_per_second": round(speed, 2), "peak_bytes": peak}


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
    found = {mixer: _mean([row for row in others if row["mixer"] == mixer], name)
             for mixer in dict.fromkeys(row["mixer"] for row in others)}  # fmt: skip
    if floor is None or None in found.values():
        return f"{CONTROL} or another mixer has no {name}: they cannot be compared."
    shown = " and ".join(f"{metric(value, name)} for {mixer}" for mixer, value in found.items())
    end = "mixes nothing between tokens"
    sign = 1 if floors[0]["directions"][name] == UP else -1
    best = max(sign * value for value in found.values() if value is not None)
    verdict = "" if best > sign * floor else ": mixing added nothing in this run"
    return f"{CONTROL}, which {end}, reaches {name} {metric(floor, name)}, against {shown}{verdict}."


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [row["metrics"].get(name) for row in rows]
    return None if any(value is None for value in values) else statistics.fmean(values)


def check_rows(content: Mapping[str, Any], source: str) -> list[dict[str, Any]]:
    """The rows of a results.json. Raises ResultsError where one lacks a column or has another type in it."""
    rows = content.get("rows")
    for row in rows if isinstance(rows, list) else [None]:
        wrong = [name for name, kinds in COLUMNS.items() if type(_values(row).get(name)) not in kinds]
        if wrong:
            raise ResultsError("rows", f"{source} with a row without {wrong[0]}", "rows of polymix train", "")
    return list(rows or [])


def _values(row: Any) -> dict[str, Any]:
    return row if isinstance(row, dict) else {}
