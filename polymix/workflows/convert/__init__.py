"""`polymix.assess`: what a conversion cost and gained, measured on the user's machine at the user's shapes."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from polymix.convert import Adapter, AttentionSpec, ConversionReport
from polymix.convert.find import head_count
from polymix.convert.tracing import LayerCall, call_of, mode, record_layers, token_count, with_call, without_fast_path
from polymix.errors import OptionError, check_choice, check_number
from polymix.measure.machine import manifest
from polymix.measure.timing import Call, peak_memory
from polymix.mixers import MixerConfig
from polymix.workflows.convert.assessment import Assessment, LayerCost, Length, Pair
from polymix.workflows.recommend.measure import Bench, timed
from polymix.workflows.recommend.shapes import Shape

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
    for factor in lengths:
        check_number("lengths", factor, 1e-3, math.inf, "numbers above 0", 4)
    check_number("max_seconds", max_seconds, 1e-3, math.inf, "a number above 0", 10.0)
    if not isinstance(report, ConversionReport) or report.undone or not report.adapters:
        got = type(report).__name__ if not isinstance(report, ConversionReport) else "one that was undone, or kept all"
        raise OptionError("report", got, "what polymix.convert returned", "Convert the model first.")
    device = str(next(report.model.parameters()).device)
    converted = copy.deepcopy(report)  # in training, calls change statistics
    with converted.former() as host:
        former = copy.deepcopy(host)
    attentions = {name: former.get_submodule(name) for name in converted.adapters}
    calls = record_layers(former, attentions, input)
    kwargs = dict(input) if isinstance(input, Mapping) else {}
    args = () if kwargs else tuple(input) if isinstance(input, (tuple, list)) else (input,)
    with torch.random.fork_rng(devices=[]), mode(former, training), mode(converted.model, training):
        runs = {
            _BEFORE: call_of(former, args, kwargs, training),
            _AFTER: call_of(converted.model, args, kwargs, training),
        }
        whole = _pair(runs, 0.4 * seconds, device)
        layers = _layers(attentions, converted.adapters, calls, training, 0.6 * seconds, device)
        curve = _curve(attentions, converted.adapters, calls, training, lengths, seconds, max_seconds, device)
    return Assessment(report, whole, layers, curve, training, manifest(device, torch.get_num_threads()))


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
    """2 a multiply-add; the fused kernels of attention are not all in the counter's table, the plain path is."""
    with without_fast_path(), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        run()
    return int(counter.get_total_flops())


def _layers(
    attentions: dict[str, nn.Module], adapters: dict[str, Adapter], calls: dict[str, LayerCall], training: bool,
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
        adapters[names[0]].current_grid = call.grid
        runs = {which: call_of(module, call.args, call.kwargs, training) for which, module in both.items()}
        pair = _pair(runs, seconds / len(kinds), device)
        costs |= dict.fromkeys(names, LayerCost(tuple(call.output.shape), pair))
    return costs


def _curve(
    attentions: dict[str, nn.Module], adapters: dict[str, Adapter], calls: dict[str, LayerCall], training: bool,
    lengths: Sequence[float], seconds: float, max_seconds: float, device: str,
) -> tuple[Length, ...]:  # fmt: skip
    """Attention against the mixers, all layers that mix one line of tokens together, each alone at `lengths` times its
    own tokens."""
    each = (_asked(attentions[name], adapters[name], call) for name, call in calls.items())
    shapes = Counter(shape for shape in each if shape is not None)
    if not shapes:
        return ()
    bench = Bench(device, next(p.dtype for adapter in adapters.values() for p in adapter.parameters()), training)
    found: list[Length] = []
    for factor in sorted(lengths):
        ours = theirs = 0.0
        for (shape, config), times in shapes.items():
            at = shape.longer(factor)
            timing, (candidate,) = bench.compare(at, {"mixer": config}, seconds / len(lengths) / len(shapes))
            if timing is None or candidate.timing is None:  # out of memory, as longer ones would be
                return tuple(found)
            ours, theirs = ours + times * candidate.timing.median, theirs + times * timing.median
        found.append(Length(factor, tuple(shape.longer(factor).tokens for shape, _ in shapes), theirs, ours))
        if theirs * 16 > max_seconds:
            break
    return tuple(found)


def _asked(module: nn.Module, adapter: Adapter, call: LayerCall) -> tuple[Shape, MixerConfig] | None:
    """What a layer's mixer is asked, and its config without what `Shape` settles; None where it has another context."""
    config, dim, tokens = adapter.mixer.config, adapter.mixer.dim, token_count(module, call)
    its = with_call(AttentionSpec(dim=dim, heads=1), module, call)
    grid = (call.grid if adapter.needs_current_grid else None) or adapter.grid
    windows = tokens is not None and grid is not None and math.prod(grid) > tokens  # merged: the mixer sees the map
    if tokens is None or its.cross or windows or call.output.shape[-1] != dim:
        return None
    shape = Shape(
        tokens=tokens, dim=dim, heads=head_count(module), batch=call.output.numel() // (tokens * dim),
        grid=grid, causal=bool(adapter.causal) or its.causal, mask=min(its.masks, default=None),
    )  # fmt: skip
    return shape.placed(), config.without_grid()
