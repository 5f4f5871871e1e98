"""`polymix.assess`: what a conversion changed in time, memory and FLOPs, and the Assessment that holds the figures."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from polymix.convert import Adapter, AttentionSpec, ConversionReport
from polymix.convert.find import head_count
from polymix.convert.tracing import (
    LayerCall,
    call_of,
    mode,
    record_layers,
    token_count,
    with_call,
    without_fast_path,
)
from polymix.errors import OptionError, check_choice, check_number
from polymix.measure.candidates import CandidateTimer, milliseconds
from polymix.measure.machine import manifest
from polymix.measure.shapes import Shape
from polymix.measure.timing import Call, Timing, interleaved_within, peak_memory
from polymix.mixers import MixerConfig
from polymix.numbers import arrow, figure, fixed, spanned
from polymix.workflows.verdict import FASTER, SIMILAR, SLOWER, Contender, Speed, Verdict, judge, span, wins_from

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
    """Measure time, memory and FLOPs before and after a conversion.

    It measures the whole model on `input`, each converted layer in the call that the model makes, and attention and
    mixers alone at other sequence lengths. The model is not changed.

    Args:
        report: from `polymix.convert`, not undone.
        input: an input of the model: a tensor, a tuple, or a dict of keyword arguments.
        training: measure forward and backward, instead of forward without gradients.
        seconds: time to spend on the model and its layers, and as much again on the lengths.
        lengths: sequence lengths, as multiples of the layers' own.
        max_seconds: skip lengths at which attention would take longer than this per call.
    """
    check_choice("training", training, (True, False))
    check_number("seconds", seconds, 1e-3, math.inf, "a number above 0", 20.0)
    for factor in lengths:
        check_number("lengths", factor, 1e-3, math.inf, "numbers above 0", 4)
    check_number("max_seconds", max_seconds, 1e-3, math.inf, "a number above 0", 10.0)
    if not isinstance(report, ConversionReport) or report.undone or not report.adapters:
        ours = isinstance(report, ConversionReport)
        got = "a report that was undone or converted nothing" if ours else type(report).__name__
        raise OptionError("report", got, "the report of polymix.convert", "Convert the model first.")
    device = str(next(report.model.parameters()).device)
    converted = copy.deepcopy(report)  # calls in training mode change running statistics
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
    """Time both calls in turn, then measure their memory and FLOPs."""
    times = interleaved_within(runs, seconds, device)
    memory = {name: peak_memory(run, device) for name, run in runs.items() if name in times}
    flops = {name: _flops(run) for name, run in runs.items() if name in times}
    return Pair(
        (times.get(_BEFORE), times.get(_AFTER)), (memory.get(_BEFORE), memory.get(_AFTER)),
        (flops.get(_BEFORE), flops.get(_AFTER)),
    )  # fmt: skip


def _flops(run: Call) -> int:
    """FLOPs of a call, 2 per multiply-add. Attention runs unfused: the counter does not know all fused kernels."""
    with without_fast_path(), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        run()
    return int(counter.get_total_flops())


def _layers(
    attentions: dict[str, nn.Module], adapters: dict[str, Adapter], calls: dict[str, LayerCall], training: bool,
    seconds: float, device: str,
) -> dict[str, LayerCost]:  # fmt: skip
    """Measure each layer's attention and mixer on the same call. Identical layers are measured once."""
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
    """Time attention and mixers of all layers that mix a sequence, at multiples of each layer's length."""
    each = (_shape_of(attentions[name], adapters[name], call) for name, call in calls.items())
    shapes = Counter(shape for shape in each if shape is not None)
    if not shapes:
        return ()
    dtype = next(p.dtype for adapter in adapters.values() for p in adapter.parameters())
    timer = CandidateTimer(device, dtype, training)
    curve: list[Length] = []
    for factor in sorted(lengths):
        ours = theirs = 0.0
        for (shape, config), times in shapes.items():
            at = shape.longer(factor)
            timing, (candidate,) = timer.compare(at, {"mixer": config}, seconds / len(lengths) / len(shapes))
            if timing is None or candidate.timing is None:  # out of memory, as at longer lengths too
                return tuple(curve)
            ours, theirs = ours + times * candidate.timing.median, theirs + times * timing.median
        curve.append(Length(factor, tuple(shape.longer(factor).tokens for shape, _ in shapes), theirs, ours))
        if theirs * 16 > max_seconds:
            break
    return tuple(curve)


def _shape_of(module: nn.Module, adapter: Adapter, call: LayerCall) -> tuple[Shape, MixerConfig] | None:
    """The shape of a layer's call, and the mixer's config without its grid; None where the layer mixes no sequence."""
    config, dim, tokens = adapter.mixer.config, adapter.mixer.dim, token_count(module, call)
    spec = with_call(AttentionSpec(dim=dim, heads=1), module, call)
    if tokens is None or spec.cross or call.output.shape[-1] != dim:
        return None
    grids = [grid for grid in (call.grid if adapter.needs_current_grid else None, adapter.grid) if grid is not None]
    grid = next((grid for grid in grids if math.prod(grid) <= tokens), None)  # in windows: a window's, not the map's
    if grids and grid is None:  # merged windows: the mixer sees the whole map
        return None
    shape = Shape(
        tokens=tokens, dim=dim, heads=head_count(module), batch=call.output.numel() // (tokens * dim),
        grid=grid, causal=bool(adapter.causal) or spec.causal, mask=min(spec.masks, default=None),
    )  # fmt: skip
    return shape.placed(), config.without_grid()


# The result


class Pair(NamedTuple):
    """Before and after: seconds per call, peak memory in bytes, FLOPs. None where memory ran out."""

    times: tuple[Timing | None, Timing | None]
    memory: tuple[int | None, int | None]
    flops: tuple[int | None, int | None]

    @property
    def gain(self) -> float | None:
        """Speedup: time before over time after."""
        before, after = self.times
        return None if before is None or after is None else before.median / after.median

    def to_dict(self) -> dict[str, Any]:
        return {
            "before": milliseconds(self.times[0]), "after": milliseconds(self.times[1]), "gain": self.gain,
            "memory_bytes": list(self.memory), "flops": list(self.flops),
        }  # fmt: skip


class LayerCost(NamedTuple):
    """One layer in the call that the model makes. shape: of its output."""

    shape: tuple[int, ...]
    pair: Pair


class Length(NamedTuple):
    """All converted layers at `factor` times their own tokens. attention, mixers: seconds per call."""

    factor: float
    tokens: tuple[int, ...]
    attention: float
    mixers: float


@dataclass(frozen=True)
class Assessment:
    """What `polymix.assess` measured. Printing it shows a table.

    report: of the conversion. whole: costs of the model. layers: costs of each converted layer. curve: times at other
    lengths. training: whether forward and backward were measured. machine: what it was measured on.
    """

    report: ConversionReport
    whole: Pair
    layers: Mapping[str, LayerCost]
    curve: tuple[Length, ...]
    training: bool
    machine: Mapping[str, Any]

    @property
    def speed(self) -> Speed | None:
        """The speedup of the whole model; None where memory ran out."""
        before, after = self.whole.times
        return None if before is None else Speed.of(before, after)

    @property
    def verdict(self) -> Verdict:
        """Whether the conversion is worth it on this input, as data; by accuracy too, where it was measured."""
        names = dict.fromkeys(layer.now for layer in self.report.layers if layer.now)
        tokens, speed = self.tokens, self.speed
        mixers = Contender(" and ".join(names), {tokens: speed} if speed else {}, self._accuracy_change)
        return judge([mixers], tokens, "On this input")

    @property
    def tokens(self) -> int:
        """The tokens of the largest converted layer."""
        return max(math.prod(cost.shape[1:-1]) for cost in self.layers.values())

    @property
    def _accuracy_change(self) -> tuple[float, float] | None:
        """The range of the accuracy after minus before, one percentage point either way."""
        known, last = self.report.accuracy, self.report.result
        if last is None or "before" not in known or self.report.metric != "accuracy":
            return None
        return last - known["before"] - 0.01, last - known["before"] + 0.01

    @property
    def _wins(self) -> dict[int, bool]:
        """Whether the mixers alone are faster than attention alone, for each entry of `curve`."""
        gains = [length.attention / length.mixers for length in self.curve]
        return {place: Speed(gain, gain, gain).outcome == FASTER for place, gain in enumerate(gains)}

    @property
    def wins_from(self) -> float | None:
        """The shortest measured length, as a multiple of the layers' own, from which on the mixers are faster."""
        start = wins_from(self._wins)
        return None if start is None else self.curve[start].factor

    @property
    def finding(self) -> str:
        """The headline for who uses the model: without advice on how to measure it better."""
        speed = self.speed
        if speed is None or speed.outcome in (FASTER, SLOWER, SIMILAR):
            return self.headline
        what = f"{fixed(speed.gain, 2)} × as fast" if speed.gain >= 1 else f"{fixed(1 / speed.gain, 2)} × as slow"
        return f"In a short measurement, which decides nothing, the model was {what} as with attention."

    @property
    def headline(self) -> str:
        """How the model's speed changed, and at which lengths the mixers alone are faster."""
        speed, what = self.speed, "A training step" if self.training else "The model"
        if speed is None:
            return f"{what} ran out of memory before or after the conversion."
        if speed.outcome == SIMILAR:
            change = f"{what} is about as fast as before on this input ({fixed(speed.gain, 2)} ×)."
        elif speed.gain >= 1:
            change = f"{what} is {fixed(speed.gain, 2)} × as fast on this input."
        else:
            change = f"{what} takes {fixed(1 / speed.gain, 2)} × as long on this input."
        if speed.outcome not in (FASTER, SLOWER, SIMILAR):
            change = f"{change[:-1]}, but {speed.doubt}: measure for longer, by --seconds."
        if not self.curve:
            return change
        wins = self._wins
        where = span(wins, lambda place: _tokens(self.curve[place]))
        if len(wins) > 1 and all(length.mixers > length.attention for length in self.curve):
            return f"{change} The mixers alone are slower than attention at every measured length."
        faster = "faster" if any(wins.values()) else "not clearly faster"
        return f"{change} The mixers alone are {faster} than attention {where}."

    def __str__(self) -> str:
        lines = [self.headline, "", str(self.report), ""]
        lines.append("One call with the whole input, MFLOPs as counted:")
        lines.append(f"the model: {_change(self.whole)}")
        for change, group in groupby(self.layers.items(), lambda item: _change(item[1].pair)):
            lines.append(f"{spanned([name for name, _ in group])}: {change}")
        for length in self.curve:
            times = f"attention {figure(1e3 * length.attention)} ms, mixers {figure(1e3 * length.mixers)} ms"
            lines.append(f"{_tokens(length)} tokens: {times}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return {
            "headline": self.headline, "finding": self.finding, "training": self.training,
            "machine": dict(self.machine), "conversion": self.report.to_dict(), "model": self.whole.to_dict(),
            "layers": {k: {"shape": list(c.shape), **c.pair.to_dict()} for k, c in self.layers.items()},
            "lengths": [length._asdict() for length in self.curve], "wins_from": self.wins_from,
            "verdict": self.verdict.to_dict(),
        }  # fmt: skip

    def write(
        self, folder: str | Path, *, title: str = "A converted model", card: Mapping[str, Any] | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> Path:  # fmt: skip
        """Write results.json, report.html with its pictures, and README.md, the model card; return the page's path.

        Args:
            folder: where to write.
            title: headline of page and card.
            card: metadata for the head of the card.
            about: further content of results.json. `notes` in it, a list of sentences, also goes on page and card;
                `code`, the user code that builds the model, on the card.
        """
        from polymix.workflows.convert.page import write

        return write({**(about or {}), **self.to_dict()}, Path(folder), title, card or {})


def _tokens(length: Length) -> str:
    return " / ".join(f"{n:,}" for n in dict.fromkeys(length.tokens))


def _change(pair: Pair) -> str:
    """Time, memory and FLOPs, before → after."""
    times = [None if timing is None else 1e3 * timing.median for timing in pair.times]
    memory = [None if size is None else size / 2**20 for size in pair.memory]
    flops = [None if count is None else count / 1e6 for count in pair.flops]
    return f"{arrow(times)} ms, {arrow(memory)} MiB peak beside weights, {arrow(flops)} MFLOPs"
