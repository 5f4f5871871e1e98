"""The time of each layer with its attention and with each candidate, at the shape of the example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from polymix.convert.plan import KEEP
from polymix.convert.tracing import LayerCall, call_of, tensors
from polymix.measure.candidates import milliseconds
from polymix.measure.timing import interleaved_within
from polymix.workflows.search.candidates import Candidates


def layer_times(
    candidates: Candidates, seconds: float, device: str, done: Callable[[int], None]
) -> list[dict[str, Any]]:
    """A row for each layer and candidate, its attention ("keep") first. Equal layers are timed once.

    A call that runs out of memory has no time.
    """
    alike: dict[Any, list[str]] = {}
    for name, module in candidates.layers.items():
        key = (type(module), tuple(candidates.labels(name)), _shapes(module, candidates.calls[name]))
        alike.setdefault(key, []).append(name)
    rows: dict[str, list[dict[str, Any]]] = {}
    for names in alike.values():
        first, call = names[0], candidates.calls[names[0]]
        modules = {KEEP: candidates.layers[first]}
        modules |= {label: candidates.adapters[first, label] for label in candidates.labels(first)}
        for label in candidates.labels(first):
            candidates.adapters[first, label].current_grid = call.grid
        calls = {label: call_of(module, call.args, call.kwargs, False) for label, module in modules.items()}
        timings = interleaved_within(calls, seconds / len(alike), device)
        for name in names:
            rows[name] = [{"layer": name, "mixer": label, **milliseconds(timings.get(label))} for label in modules]
        done(len(rows))
    return [row for name in candidates.layers for row in rows[name]]


def _shapes(module: nn.Module, call: LayerCall) -> Any:
    """What decides a layer's time: the sizes of its weights and arguments."""
    weights = tuple((name, tuple(value.shape)) for name, value in module.named_parameters())
    return weights, tuple((tuple(part.shape), part.dtype) for part in tensors((call.args, call.kwargs)))
