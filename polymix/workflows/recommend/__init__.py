"""`polymix.recommend`: attention or a mixer, layer by layer, by what is measured on the user's machine."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from polymix.convert.find import known_input
from polymix.convert.tracing import call_of, mode, tensors
from polymix.errors import OptionError, check_choice, check_int, check_number
from polymix.measure.machine import check_device, manifest
from polymix.measure.timing import Call, Timing
from polymix.mixers import MixerConfig
from polymix.mixers.spec import parse_mixer
from polymix.workflows.recommend.advice import LayerAdvice, Recommendation
from polymix.workflows.recommend.decide import Candidate, choose, fastest, worth_it
from polymix.workflows.recommend.layers import Layer, record
from polymix.workflows.recommend.measure import CALLS, Bench, timed
from polymix.workflows.recommend.shapes import Shape, parse_shape, shapes_of

__all__ = ["CANDIDATES", "Candidate", "LayerAdvice", "Recommendation", "Shape", "parse_shape", "recommend"]

CANDIDATES = ("padre:degree=2", "padre:degree=3", "pom", "qt", "poly_nl", "poly_sa")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LEAST = 0.2  # seconds for a layer, however many there are
_LENGTHS = (0.25, 4.0)  # times the layer's own tokens: where else the best candidate is held against attention


def recommend(
    model_or_shapes: nn.Module | Sequence[Any] | dict[str, Any] | Shape,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    *,
    candidates: Sequence[str] = CANDIDATES,
    batch: int = 1,
    input: Any = None,
    training: bool = False,
    seconds: float = 30.0,
    threads: int | None = None,
) -> Recommendation:
    """Measure here whether a mixer should stand in attention's place, layer by layer, and which: or keep attention.

    A candidate is recommended if it is faster than attention by 5 % at least, and nine of its runs in ten faster than
    nine of ten of attention's. In a model attention is the model's own layer, called as the model calls it; at bare
    shapes it is polymix's softmax, PyTorch's fused kernel. Candidates are checked against float64 at a small size
    first, and those that cannot do what the layer does (causal, a context, masks) are listed with the reason. Speed
    says nothing about accuracy: `polymix compare` measures that.

    Args:
        model_or_shapes: a model with attention in it, or one shape or several: (tokens, dim), (batch, tokens, dim), or
            a dict of tokens, dim, heads, batch, grid, causal, cross, mask.
        device, dtype: where and in what to measure; a model's own if None (a copy of it is moved), else cpu, float32.
        candidates: mixers as `polymix compare --mixers` takes them.
        batch: of shapes that do not say, and of the images made for a model without `input`.
        input: what the model is called with: a tensor, a dict of keyword arguments, or a tuple. None: random images,
            where the model says of what size.
        training: time forward and backward instead of a forward without gradients.
        seconds: the budget for all measurements. A call that takes an eighth of its share or more has a single run, and
            then only a factor of two counts; many layers, or one run of attention at a great length, may pass it.
        threads: CPU threads; None leaves them as they are.
    Returns:
        a Recommendation, which prints as a table; `layers`, `headline`, `to_dict()`.
    Raises:
        OptionError: nothing in the model attends, an input is missing, or a shape, device, type or candidate is wrong.
    """
    own = model_or_shapes if isinstance(model_or_shapes, nn.Module) else None
    mixers = _mixers(candidates)
    check_int("batch", batch, 1)
    check_choice("training", training, (True, False))
    check_number("seconds", seconds, 1e-3, math.inf, "a number above 0", 30)
    with _threads(threads):
        bench = Bench(*_place(own, device, dtype), training)
        machine = manifest(bench.device, torch.get_num_threads())
        whole: Timing | None = None
        notes: list[str] = []
        if own is not None:
            model, given = _moved(own, _given(own, input, batch), bench, device is not None or dtype is not None)
            with mode(model, False):  # in which no statistics are kept
                layers, notes = record(model, _run(model, given, False), _ids(given))
            end = time.perf_counter() + seconds
            with mode(model, training):
                whole = timed({"model": _run(model, given, training)}, 0.2 * seconds, bench.device).get("model")
                advice = _advise(bench, [(layer.shape, layer) for layer in layers], mixers, end)
        elif input is not None:
            raise OptionError("input", "one for shapes", "None with shapes", "Pass the model, or leave it out.")
        else:
            shapes = [shape.placed() for shape in shapes_of(model_or_shapes, batch)]
            end = time.perf_counter() + seconds
            advice = _advise(bench, [(shape, None) for shape in dict.fromkeys(shapes)], mixers, end)
    return Recommendation(
        tuple(advice), whole, str(bench.dtype).removeprefix("torch."), training, machine, tuple(notes)
    )


def _advise(
    bench: Bench, layers: Sequence[tuple[Shape, Layer | None]], mixers: dict[str, MixerConfig], end: float
) -> list[LayerAdvice]:
    """What to do with each layer, the time that is left shared between them."""
    advice = []
    for place, (shape, layer) in enumerate(layers):
        share = max((end - time.perf_counter()) / (len(layers) - place), _LEAST)
        advice.append(_judge(bench, shape, layer, mixers, share))
    return advice


def _judge(
    bench: Bench, shape: Shape, layer: Layer | None, mixers: dict[str, MixerConfig], seconds: float
) -> LayerAdvice:
    end = time.perf_counter() + seconds
    own = layer.call(bench.training) if layer else None
    refused = layer.refused(mixers) if layer else {}
    able = {label: config for label, config in mixers.items() if label not in refused}
    attention, candidates = bench.compare(shape, able, 0.5 * seconds, own)
    candidates += [Candidate(label, reason=why) for label, why in refused.items()]
    best = choose(attention, candidates) or fastest(candidates)
    lengths: dict[int, bool] = {}
    if best is not None:
        lengths[shape.tokens] = worth_it(attention, best)
        for factor in _LENGTHS:
            other, left = shape.longer(factor), end - time.perf_counter()
            if attention and other.tokens not in lengths and attention.median * factor**2 * CALLS < left:
                its, (candidate,) = bench.compare(other, {best.mixer: mixers[best.mixer]}, 0.4 * left)
                lengths[other.tokens] = worth_it(its, candidate)
    names, kind = (layer.names, type(layer.module).__name__) if layer else ((), "softmax attention")
    return LayerAdvice(names, kind, shape, attention, tuple(candidates), lengths, layer.places if layer else ())


def _mixers(candidates: Sequence[str]) -> dict[str, MixerConfig]:
    if isinstance(candidates, str) or not candidates:
        allowed = "a sequence of mixers, one at least"
        raise OptionError("candidates", repr(candidates), allowed, 'Pass ("padre:degree=2", "pom"), say.')
    mixers = dict(map(parse_mixer, candidates))
    if len(mixers) < len(candidates) or "softmax" in mixers:
        got = ", ".join(candidates)
        raise OptionError("candidates", got, "different mixers, without softmax: it is what they are held against", "")
    return mixers


def _place(model: nn.Module | None, device: torch.device | str | None, dtype: Any) -> tuple[str, torch.dtype]:
    weight = next((p for p in model.parameters() if p.is_floating_point()), None) if model is not None else None
    where = str(device if device is not None else "cpu" if weight is None else weight.device)
    try:
        check_device(where)
    except OptionError as error:
        raise OptionError("device", error.got, error.allowed, error.cure) from error
    kind = dtype if dtype is not None else torch.float32 if weight is None else weight.dtype
    kind = getattr(torch, kind, kind) if isinstance(kind, str) else kind
    check_choice("dtype", kind, DTYPES)
    return where, kind


def _given(model: nn.Module, given: Any, batch: int) -> Any:
    if given is None:
        return known_input(model, batch)
    if not isinstance(given, (Tensor, Mapping, tuple, list)):
        allowed = "a tensor, a dict of keyword arguments, or a tuple of arguments"
        raise OptionError("input", type(given).__name__, allowed, "")
    if batch != 1:
        raise OptionError("batch", f"{batch} with an input", "1 with an input, which has its own", "Leave it out.")
    return dict(given) if isinstance(given, Mapping) else given


def _moved(model: nn.Module, given: Any, bench: Bench, elsewhere: bool) -> tuple[nn.Module, Any]:
    """The model and its input where they are measured: a copy if it must move, or if training would change it."""

    def move(t: Tensor) -> Tensor:
        return t.to(bench.device, bench.dtype if t.is_floating_point() else t.dtype)

    if elsewhere or bench.training:
        model = copy.deepcopy(model).to(bench.device, bench.dtype)
    return model, tree_map_only(Tensor, move, given)


def _run(model: nn.Module, given: Any, training: bool) -> Call:
    if isinstance(given, dict):
        return call_of(model, (), given, training)
    return call_of(model, tuple(given) if isinstance(given, (tuple, list)) else (given,), {}, training)


def _ids(given: Any) -> bool:
    return not any(t.is_floating_point() for t in tensors(given))


@contextmanager
def _threads(threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if threads is not None:
        check_int("threads", threads, 1)
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
