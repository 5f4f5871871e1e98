"""Attention and candidate mixers at one shape: checked against float64, then timed in turn within a budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch

from polymix.convert.tracing import call_of
from polymix.errors import CapabilityError, PolymixError
from polymix.measure.case import INFERENCE, Case, Setting, check, prepare
from polymix.measure.harness import Contender, Measurement, Stopped, measure
from polymix.measure.shapes import Shape
from polymix.measure.timing import Call, Timing, interleaved_within
from polymix.mixers import MixerConfig, SoftmaxConfig

ATTENTION = "attention"


@dataclass(frozen=True)
class Candidate:
    """One mixer at one shape: its time, or why there is none."""

    mixer: str
    config: MixerConfig | None = None  # with what the shape settles
    timing: Timing | None = None
    reason: str | None = None
    folded: bool = False  # timed after mixer.fold()

    @property
    def options(self) -> dict[str, Any]:
        """The options to pass to `create_mixer` besides the name and the width."""
        if self.config is None:
            return {}
        values = {field.name: getattr(self.config, field.name) for field in fields(self.config)}
        return {f.name: values[f.name] for f in fields(self.config) if values[f.name] != f.default}

    def to_dict(self) -> dict[str, Any]:
        return {
            "mixer": self.mixer, "options": self.options, "folded": self.folded, "reason": self.reason,
            **milliseconds(self.timing),
        }  # fmt: skip


def milliseconds(timing: Timing | None) -> dict[str, Any]:
    """Median, quantiles and number of runs, as JSON holds them."""
    if timing is None:
        return {"ms": None, "low_ms": None, "high_ms": None, "runs": 0, "clock": "wall"}
    ms = timing.milliseconds()
    return {"ms": ms.median, "low_ms": ms.low, "high_ms": ms.high, "runs": len(ms.runs), "clock": timing.clock}


@dataclass(frozen=True)
class CandidateTimer:
    """Times attention and candidates on one device, in one type, in inference or training."""

    device: str
    dtype: torch.dtype
    training: bool

    def compare(
        self, shape: Shape, mixers: Mapping[str, MixerConfig], seconds: float, attention: Call | None = None
    ) -> tuple[Timing | None, list[Candidate]]:
        """Attention's time at `shape`, and each candidate with its time or the reason why it has none.

        attention: a call of the model's own layer; None times polymix's softmax.
        """
        contenders: dict[str, Callable[[], Contender]] = {ATTENTION: partial(self._attention, shape, attention)}
        contenders |= {label: partial(self._candidate, shape, config) for label, config in mixers.items()}
        measurements = measure(contenders, lambda calls: interleaved_within(calls, seconds, self.device))
        its = measurements.pop(ATTENTION)
        if its.error is not None:
            raise its.error
        return its.timing, [_candidate(label, measurement) for label, measurement in measurements.items()]

    def _attention(self, shape: Shape, call: Call | None) -> Contender:
        return Contender(call or self._call(self._case(SoftmaxConfig(), shape)))

    def _candidate(self, shape: Shape, config: MixerConfig) -> Contender:
        """The mixer at `shape`, once it has passed its check at a small size."""
        small = self._case(config, shape.small())
        if shape.mask and not small.mixer.capabilities.has(shape.mask):
            raise CapabilityError("mask", f"no {shape.mask} masks", "a mixer that takes them")
        if reason := check(small):
            raise Stopped(reason)
        case = self._case(config, shape)
        figures = {"config": case.mixer.config, "folded": bool(case.mixer.folded)}
        return Contender(self._call(case), figures=figures)

    def _case(self, config: MixerConfig, shape: Shape) -> Case:
        pass_ = "training" if self.training else INFERENCE
        return prepare(config, Setting(shape, pass_, self.device, self.dtype))

    def _call(self, case: Case) -> Call:
        return call_of(case.module, case.args, case.kwargs, self.training)  # as a model's own layer is called


def _candidate(label: str, measurement: Measurement) -> Candidate:
    error = measurement.error
    if isinstance(error, PolymixError):
        return Candidate(label, reason=" ".join(str(error.got).split()))
    if error is not None or measurement.timing is None:
        return Candidate(label, reason=measurement.stopped or "ran out of memory")
    return Candidate(label, timing=measurement.timing, **measurement.figures)
