"""`polymix.assess`: what a conversion cost and gained, measured on the user's machine at the user's shapes."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from polymix.bench.machine import manifest
from polymix.bench.measure import Call, peak_memory
from polymix.compare.conversion.assessment import Assessment, LayerCost, Length, Pair
from polymix.compare.recommend.measure import Bench, timed
from polymix.compare.recommend.shapes import Shape
from polymix.convert import Adapter, ConversionReport
from polymix.convert.record import Record, record
from polymix.convert.replay import call_of, mode
from polymix.errors import OptionError, check_choice, check_number
from polymix.mixers import MixerConfig

__all__ = ["Assessment", "assess"]

_BEFORE, _AFTER = "before", "after"


def assess(
    report: ConversionReport,
    input: Any,
    *,
    training: bool = False,
    seconds: float = 20.0,
    lengths: Sequence[float] = (0.25, 1, 4, 16),
    max_seconds: float = 10.0,
) -> Assessment:
    """Time, memory and FLOPs before and after a conversion: of the whole model on `input`, of each layer as the model
    calls it, and of attention against the mixers alone at other lengths.

    Args:
        report: of `polymix.convert`, not undone. The model is left as it is.
        input: what the model is called with: a tensor, a tuple, or a dict of keyword arguments.
        training: time forward and backward instead of a forward without gradients.
        seconds: the budget for the model and its layers, and again for the lengths.
        lengths: times the layers' own number of tokens, at which attention and the mixers alone are timed.
        max_seconds: a length at which a call of attention would take longer is left out.
    """
    check_choice("training", training, (True, False))
    check_number("seconds", seconds, 1e-3, math.inf, "a number above 0", 20.0)
    check_number("max_seconds", max_seconds, 1e-3, math.inf, "a number above 0", 10.0)
    if report.undone or not report.adapters:
        got = "one that was undone, or kept all"
        raise OptionError("report", got, "what polymix.convert returned", "Convert the model first.")
    device = str(next(report.model.parameters()).device)
    former = copy.deepcopy(report.undo())
    report.redo()
    attentions = {name: former.get_submodule(name) for name in report.adapters}
    calls = record(former, attentions, input)
    kwargs = input if isinstance(input, dict) else {}
    args = () if kwargs else tuple(input) if isinstance(input, (tuple, list)) else (input,)
    with mode(former, training), mode(report.model, training):
        runs = {_BEFORE: call_of(former, args, kwargs, training), _AFTER: call_of(report.model, args, kwargs, training)}
        whole = _pair(runs, 0.4 * seconds, device)
        layers = _layers(attentions, report.adapters, calls, training, 0.6 * seconds, device)
    where = manifest(device, torch.get_num_threads())
    curve = _curve(report.adapters, calls, training, lengths, seconds, max_seconds, device)
    return Assessment(report, whole, layers, curve, training, where)


def _pair(runs: dict[str, Call], seconds: float, device: str) -> Pair:
    """Both calls timed in turn, then their memory and FLOPs."""
    times = timed(runs, seconds, device)
    memory = {name: peak_memory(run, device) for name, run in runs.items() if name in times}
    flops = {name: _flops(run) for name, run in runs.items() if name in times}
    return Pair(
        (times.get(_BEFORE), times.get(_AFTER)), (memory.get(_BEFORE), memory.get(_AFTER)),
        (flops.get(_BEFORE), flops.get(_AFTER)),
    )  # fmt: skip


def _flops(run: Call) -> int:
    """2 a multiply-add; the fused attention kernels are not all in the counter's table, the plain path is."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        run()
    return int(counter.get_total_flops())


def _layers(
    attentions: dict[str, nn.Module], adapters: dict[str, Adapter], calls: dict[str, Record], training: bool,
    seconds: float, device: str,
) -> dict[str, LayerCost]:  # fmt: skip
    """Each layer's attention and mixer on the same call; of layers alike the first is measured for all."""
    kinds: dict[Any, list[str]] = {}
    for name, call in calls.items():
        config = adapters[name].mixer.config
        kinds.setdefault((type(attentions[name]), config, tuple(call.output.shape)), []).append(name)
    costs: dict[str, LayerCost] = {}
    for names in kinds.values():
        call = calls[names[0]]
        both = {_BEFORE: attentions[names[0]], _AFTER: adapters[names[0]]}
        runs = {which: call_of(module, call.args, call.kwargs, training) for which, module in both.items()}
        pair = _pair(runs, seconds / len(kinds), device)
        costs |= dict.fromkeys(names, LayerCost(tuple(call.output.shape), pair))
    return costs


def _curve(
    adapters: dict[str, Adapter], calls: dict[str, Record], training: bool, lengths: Sequence[float], seconds: float,
    max_seconds: float, device: str,
) -> tuple[Length, ...]:  # fmt: skip
    """Attention against the mixers, all layers together, each alone at `lengths` times its own tokens."""
    shapes = Counter(_shape(adapters[name], call) for name, call in calls.items() if call.output.ndim == 3)
    bench = Bench(device, next(p.dtype for adapter in adapters.values() for p in adapter.parameters()), training)
    found = []
    for factor in sorted(lengths):
        ours = theirs = 0.0
        for (shape, config), times in shapes.items():
            at = shape.longer(factor)
            timing, (candidate,) = bench.compare(at, {"mixer": config}, seconds / len(lengths) / len(shapes))
            if timing is None or candidate.timing is None:
                break
            ours, theirs = ours + times * candidate.timing.median, theirs + times * timing.median
        else:
            found.append(Length(factor, tuple(shape.longer(factor).tokens for shape, _ in shapes), theirs, ours))
            if found[-1].attention * 16 > max_seconds:
                break
    return tuple(found)


def _shape(adapter: Adapter, call: Record) -> tuple[Shape, MixerConfig]:
    """What a layer's mixer is asked, and its config without what `Shape` settles."""
    config, mixer = adapter.mixer.config, adapter.mixer
    placed: dict[str, Any] = {"grid": None} if hasattr(config, "grid") else {}
    placed |= {"num_prefix_tokens": 0} if hasattr(config, "num_prefix_tokens") else {}
    heads = getattr(mixer, "heads", None)
    shape = Shape(
        tokens=call.output.shape[1], dim=mixer.dim, heads=heads, batch=call.output.shape[0],
        grid=adapter.grid, causal=bool(adapter.causal),
    )  # fmt: skip
    return (shape if adapter.grid is not None else shape.placed()), config.changed(**placed)
