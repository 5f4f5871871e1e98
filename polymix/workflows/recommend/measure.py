"""Attention and the candidates at one shape: built, checked against float64, timed in turn within a budget."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from polymix.convert.tracing import call_of, tensors
from polymix.errors import PolymixError
from polymix.measure.sweep import disagreement
from polymix.measure.timing import Call, Timing, interleaved, once
from polymix.mixers import MixerConfig, SoftmaxConfig, TokenMixer
from polymix.workflows.recommend.decide import Candidate
from polymix.workflows.recommend.shapes import Shape

ATTENTION = "attention"
CALLS = 8  # warm-up and rounds, at the least, of a call that is timed in turn
K = TypeVar("K", bound=Hashable)


def timed(calls: Mapping[K, Call], seconds: float, device: str) -> dict[K, Timing]:
    """All calls in turn in about `seconds`. The slowest, where there is no time for more, have a single run; a call
    that runs out of memory has none."""
    first = {name: run for name, call in calls.items() if (run := _first(call, seconds, device)) is not None}
    left, in_turn = seconds, {}
    for name in sorted(first, key=first.__getitem__):
        left -= CALLS * first[name]
        if left >= 0:
            in_turn[name] = calls[name]
    timings = interleaved(in_turn, seconds=seconds / max(len(in_turn), 1), device=device)
    return {name: timings[name] if name in timings else Timing((run,)) for name, run in first.items()}


def _first(call: Call, seconds: float, device: str) -> float | None:
    try:
        run = once(call, device)
    except (MemoryError, RuntimeError) as error:  # PyTorch's CPU allocator raises a plain RuntimeError
        if isinstance(error, RuntimeError) and "memory" not in str(error).lower():
            raise
        return None
    return run if run * CALLS > seconds else min(run, once(call, device))


@dataclass(frozen=True)
class Bench:
    """Where and how the calls of one recommendation are timed."""

    device: str
    dtype: torch.dtype
    training: bool

    def compare(
        self, shape: Shape, mixers: Mapping[str, MixerConfig], seconds: float, attention: Call | None = None
    ) -> tuple[Timing | None, list[Candidate]]:
        """Attention's time at `shape` (of `attention`, else of polymix's softmax), and each candidate's or why none."""
        calls = {ATTENTION: attention or self._ready(SoftmaxConfig(), shape)[1]}
        built: dict[str, TokenMixer] = {}
        reasons: dict[str, str] = {}
        for label, config in mixers.items():
            try:
                if reason := self._wrong(config, shape.small()):
                    reasons[label] = reason
                else:
                    built[label], calls[label] = self._ready(config, shape)
            except PolymixError as error:
                reasons[label] = " ".join(str(error.got).split())
        timings = timed(calls, seconds, self.device)
        candidates = [
            Candidate(label, built[label].config, timings[label], folded=bool(built[label].folded))
            if label in timings
            else Candidate(label, reason=reasons.get(label, "ran out of memory"))
            for label in mixers
        ]
        return timings.get(ATTENTION), candidates

    def _ready(self, config: MixerConfig, shape: Shape) -> tuple[TokenMixer, Call]:
        """The mixer as this shape needs it, folded where no gradients are asked for, and a call of it."""
        mixer = self._built(self._fitted(config, shape), shape.dim)
        args, kwargs = self._inputs(mixer, shape)
        return mixer, call_of(mixer, args, kwargs, self.training)

    def _fitted(self, config: MixerConfig, shape: Shape) -> MixerConfig:
        assert shape.grid is not None
        config = config.for_heads(shape.heads) if shape.heads else config
        if shape.causal:
            config = config.for_order()
        return config.for_grid(shape.grid, shape.prefix)

    def _built(self, config: MixerConfig, dim: int) -> TokenMixer:
        mixer = config.build(dim, device=self.device, dtype=self.dtype).train(self.training)
        if not self.training:
            with torch.no_grad():  # what is folded serves calls without gradients alone
                mixer.fold()
        return mixer

    def _inputs(self, mixer: TokenMixer, shape: Shape) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        assert shape.grid is not None
        kw: dict[str, Any] = {"device": self.device, "dtype": self.dtype, "requires_grad": self.training}
        args = tuple(torch.randn(shape.batch, n, shape.dim, **kw) for n in (shape.tokens, shape.cross) if n)
        kwargs = mixer.config.call_options(shape.grid)
        if shape.causal:
            kwargs["causal"] = True
        if shape.mask:
            context = shape.cross or shape.tokens
            size = (shape.batch, context) if shape.mask == "padding" else (shape.batch, shape.tokens, context)
            kwargs["mask"] = torch.ones(size, dtype=torch.bool, device=self.device)
        return args, kwargs

    def _wrong(self, config: MixerConfig, shape: Shape) -> str | None:
        """What the mixer cannot do, or how far off its own eager, unfolded code in float64 it is, if too far."""
        mixer = self._built(self._fitted(config, shape), shape.dim)
        if shape.mask and not mixer.capabilities.has(shape.mask):
            return f"no {shape.mask} masks"
        args, kwargs = self._inputs(mixer, shape)
        wide = mixer.config.changed(impl="eager").build(shape.dim, device="cpu", dtype=torch.float64)
        wide.load_state_dict(mixer.state_dict())
        exact = tuple(x.detach().to("cpu", torch.float64).requires_grad_(self.training) for x in args)
        options = {key: value.cpu() if isinstance(value, Tensor) else value for key, value in kwargs.items()}
        got = tensors(call_of(mixer, args, kwargs, self.training)())
        expected = tensors(call_of(wide.train(self.training), exact, options, self.training)())
        if self.training:
            got, expected = _joined(got, len(args)), _joined(expected, len(args))
        return next(filter(None, map(disagreement, got, expected)), None)


def _joined(parts: list[Tensor], inputs: int) -> list[Tensor]:
    """[y, weights' gradients …, inputs' …] with the weights' as one: that of a key's bias alone is zero."""
    weights, rest = parts[1:-inputs], parts[-inputs:]
    return [parts[0], torch.cat([gradient.flatten() for gradient in weights]), *rest]
