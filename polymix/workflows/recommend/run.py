"""`polymix.recommend` and `polymix recommend`: should I replace attention, and with which mixer?"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from polymix.convert.find import known_input
from polymix.convert.tracing import call_of, mode, tensors
from polymix.devices import DTYPES, check_device, float_type
from polymix.errors import OptionError, check_choice, check_int, check_number
from polymix.files import check_folder, write_whole
from polymix.measure import Stopwatch
from polymix.measure.candidates import Candidate, CandidateTimer
from polymix.measure.machine import manifest
from polymix.measure.shapes import Shape, parse_shape, shapes_of
from polymix.measure.timing import MIN_CALLS, Call, Timing, interleaved_within
from polymix.mixers import MixerConfig
from polymix.mixers.spec import parse_mixer
from polymix.workflows.convert.noise import own_input
from polymix.workflows.convert.sources import load_model
from polymix.workflows.recommend.advice import LayerAdvice, Recommendation
from polymix.workflows.recommend.decide import choose, fastest, worth_it
from polymix.workflows.recommend.layers import Layer, record

CANDIDATES = ("padre:degree=2", "padre:degree=3", "pom", "qt", "poly_nl", "poly_sa")
_MIN_SECONDS = 0.2  # seconds for a layer, however many there are
_LENGTH_FACTORS = (0.25, 4.0)  # times the layer's own tokens: other lengths at which the best candidate is timed


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
    """Measure on this machine whether to replace attention, layer by layer, and with which mixer.

    A candidate is recommended if its median is at least 1.1 times as fast as attention's, and nine in ten of its
    runs are faster than nine in ten of attention's. In a model, attention is the model's own layer, called as the
    model calls it; for shapes it is polymix's softmax, PyTorch's fused kernel. Candidates are first checked at a
    small size, in float64. Those that cannot do what the layer does (causal, a context, masks) are listed with the
    reason. Speed says nothing about accuracy: `polymix compare` measures that.

    Args:
        model_or_shapes: a model with attention, or one shape or several: (tokens, dim), (batch, tokens, dim), or a
            dict of tokens, dim, heads, batch, grid, causal, cross, mask.
        device, dtype: where, and in which type, to measure. None: the model's own, or cpu and float32 for shapes. A
            model is copied to be moved.
        candidates: mixers, written as for `polymix compare --mixers`.
        batch: the default batch of shapes, and of the images made for a model without `input`.
        input: what the model is called with: a tensor, a dict of keyword arguments, or a tuple. None: random images
            of the size that the model states.
        training: time forward and backward instead of a forward without gradients.
        seconds: the budget for all measurements. A call that takes an eighth of its share or more has a single run;
            then only a factor of two counts. Many layers, or one slow run of attention, can exceed the budget.
        threads: CPU threads; None leaves them as they are.
    Returns:
        a Recommendation, which prints as a table and has `layers`, `headline` and `to_dict()`.
    Raises:
        OptionError: the model has no attention, its input is missing, or a shape, device, type or candidate is wrong.
    """
    own = model_or_shapes if isinstance(model_or_shapes, nn.Module) else None
    mixers = _mixers(candidates)
    check_int("batch", batch, 1)
    check_choice("training", training, (True, False))
    check_number("seconds", seconds, 1e-3, math.inf, "a number above 0", 30)
    with _threads(threads):
        timer = CandidateTimer(*_place(own, device, dtype), training)
        machine = manifest(timer.device, torch.get_num_threads())
        whole: Timing | None = None
        notes: list[str] = []
        if own is not None:
            model, inputs = _moved(own, _input_of(own, input, batch), timer, device is not None or dtype is not None)
            with mode(model, False):  # in evaluation, so that no statistics change
                layers, notes = record(model, _run(model, inputs, False), _ids(inputs), inputs)
            watch = Stopwatch()
            with mode(model, training):
                run = {"model": _run(model, inputs, training)}
                whole = interleaved_within(run, 0.2 * seconds, timer.device).get("model")
                advice = _advise(timer, [(layer.shape, layer) for layer in layers], mixers, seconds, watch)
        elif input is not None:
            raise OptionError("input", "an input", "None for shapes", "Pass a model, or leave input out.")
        else:
            shapes = [shape.placed() for shape in shapes_of(model_or_shapes, batch)]
            for shape in shapes:
                shape.check_memory(timer.device)
            watch = Stopwatch()
            advice = _advise(timer, [(shape, None) for shape in dict.fromkeys(shapes)], mixers, seconds, watch)
    return Recommendation(
        tuple(advice), whole, str(timer.dtype).removeprefix("torch."), training, machine, tuple(notes)
    )


def _advise(
    timer: CandidateTimer, layers: Sequence[tuple[Shape, Layer | None]], mixers: dict[str, MixerConfig],
    seconds: float, watch: Stopwatch,
) -> list[LayerAdvice]:  # fmt: skip
    """What to do with each layer. They share what the watch leaves of the seconds."""
    advice = []
    for place, (shape, layer) in enumerate(layers):
        share = max((seconds - watch.seconds()) / (len(layers) - place), _MIN_SECONDS)
        advice.append(_judge(timer, shape, layer, mixers, share))
    return advice


def _judge(
    timer: CandidateTimer, shape: Shape, layer: Layer | None, mixers: dict[str, MixerConfig], seconds: float
) -> LayerAdvice:
    watch = Stopwatch()
    own = layer.call(timer.training) if layer else None
    refused = layer.refused(mixers) if layer else {}
    able = {label: config for label, config in mixers.items() if label not in refused}
    attention, candidates = timer.compare(shape, able, 0.5 * seconds, own)
    candidates += [Candidate(label, reason=why) for label, why in refused.items()]
    best = choose(attention, candidates) or fastest(candidates)
    lengths: dict[int, bool] = {}
    if best is not None:
        lengths[shape.tokens] = worth_it(attention, best)
        for factor in _LENGTH_FACTORS:
            other, left = shape.longer(factor), seconds - watch.seconds()
            if attention and other.tokens not in lengths and attention.median * factor**2 * MIN_CALLS < left:
                its, (candidate,) = timer.compare(other, {best.mixer: mixers[best.mixer]}, 0.4 * left)
                lengths[other.tokens] = worth_it(its, candidate)
    names, kind = (layer.names, type(layer.module).__name__) if layer else ((), "softmax attention")
    return LayerAdvice(names, kind, shape, attention, tuple(candidates), lengths, layer.places if layer else ())


def _mixers(candidates: Sequence[str]) -> dict[str, MixerConfig]:
    if not isinstance(candidates, (tuple, list)) or not candidates:
        allowed = "a sequence of at least one mixer"
        raise OptionError("candidates", repr(candidates), allowed, 'For example ("padre:degree=2", "pom").')
    mixers = dict(map(parse_mixer, candidates))
    if len(mixers) < len(candidates) or "softmax" in mixers:
        got = ", ".join(candidates)
        allowed = "different mixers without softmax, which they are compared with"
        raise OptionError("candidates", got, allowed, "")
    return mixers


def _place(model: nn.Module | None, device: torch.device | str | None, dtype: Any) -> tuple[str, torch.dtype]:
    weight = next((p for p in model.parameters() if p.is_floating_point()), None) if model is not None else None
    where = str(device if device is not None else "cpu" if weight is None else weight.device)
    check_device(where)
    kind = dtype if dtype is not None else torch.float32 if weight is None else weight.dtype
    kind = float_type(kind) or torch.float32
    check_choice("dtype", kind, [getattr(torch, name) for name in DTYPES])
    return where, kind


def _input_of(model: nn.Module, inputs: Any, batch: int) -> Any:
    if inputs is None:
        return known_input(model, batch)
    if not isinstance(inputs, (Tensor, Mapping, tuple, list)):
        allowed = "a tensor, a dict of keyword arguments, or a tuple of arguments"
        raise OptionError("input", type(inputs).__name__, allowed, "")
    if batch != 1:
        raise OptionError("batch", batch, "1 with an input, which has a batch of its own", "Leave it out.")
    return dict(inputs) if isinstance(inputs, Mapping) else inputs


def _moved(model: nn.Module, inputs: Any, timer: CandidateTimer, elsewhere: bool) -> tuple[nn.Module, Any]:
    """The model and its input where they are measured. The model is copied if it must move or is trained."""

    def move(t: Tensor) -> Tensor:
        return t.to(timer.device, timer.dtype if t.is_floating_point() else t.dtype)

    if elsewhere or timer.training:
        model = copy.deepcopy(model).to(timer.device, timer.dtype)
    return model, tree_map_only(Tensor, move, inputs)


def _run(model: nn.Module, inputs: Any, training: bool) -> Call:
    if isinstance(inputs, dict):
        return call_of(model, (), inputs, training)
    return call_of(model, tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {}, training)


def _ids(inputs: Any) -> bool:
    return not any(t.is_floating_point() for t in tensors(inputs))


@contextmanager
def _threads(threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if threads is not None:
        check_int("threads", threads, 1, 4096)
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run(
    shapes: Sequence[str], model: str | None, out: Path | None, *, batch: int | None = None,
    image_size: int | None = None, tokens: int | None = None, trust: bool = False, **options: Any,
) -> Recommendation:  # fmt: skip
    """The command: a recommendation for `shapes` ("4096x192:heads=3") or for `model`.

    Args:
        model: as `polymix convert` takes it: timm/NAME, torchvision/NAME, a folder, or file.py:function, which returns
            a model, or a model and its input. By name it has untrained weights.
        out: a file for the answer as JSON.
        image_size, tokens: of the random input of a model by name or in a folder; None: its own.
        trust: run the user code that a folder names.
        options: those of `polymix.recommend`.
    """
    if bool(shapes) == bool(model):
        got = "both --shape and --model" if model else "neither --shape nor --model"
        raise OptionError("--shape", got, "one of the two", "Try --shape 4096x192:heads=3.")
    if out is not None:
        check_folder(out.parent, "--out")
        if out.is_dir():
            raise OptionError("--out", f"{out}, which is a folder", "a file", "Name a file in it.")
    if model is None:
        for option, value in (("--image-size", image_size), ("--tokens", tokens), ("--trust", trust or None)):
            if value is not None:
                raise OptionError(option, value, "no such option for shapes", "Leave it out.")
        answer = recommend([parse_shape(shape) for shape in shapes], batch=1 if batch is None else batch, **options)
    else:
        answer = recommend(**_loaded(model, batch, image_size, tokens, trust), **options)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, json.dumps(answer.to_dict(), indent=1, allow_nan=False) + "\n")
    return answer


def _loaded(name: str, batch: int | None, size: int | None, tokens: int | None, trust: bool) -> dict[str, Any]:
    """A model and its input as arguments of `recommend`, loaded as `polymix convert` loads it."""
    source = load_model(name, size=size, trust=trust)
    return {"model_or_shapes": source.model, "input": own_input(source.model.eval(), source, batch, size, tokens)}
