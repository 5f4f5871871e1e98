"""The answer of `polymix.recommend`: replace or keep, layer by layer, as a table, sentences and JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polymix.convert.plan import KEEP
from polymix.errors import OptionError
from polymix.measure.candidates import Candidate, milliseconds
from polymix.measure.shapes import Shape
from polymix.measure.timing import Timing
from polymix.mixers import MixerConfig
from polymix.mixers.spec import parse_mixer
from polymix.numbers import figure, plural, speedup, terminal_width
from polymix.workflows.recommend.decide import choose, fastest, gain, verdict
from polymix.workflows.verdict import OPEN, Verdict, span, wins_from

SPEED_ALONE = (
    "Speed says nothing about accuracy: a replaced layer is untrained. `polymix compare` trains with each mixer and "
    "measures the accuracy."
)
_WIDE, _LABEL = 94, 34  # characters of a line, and of a mixer's name in it


def _width() -> int:
    return min(_WIDE, terminal_width())


@dataclass(frozen=True)
class LayerAdvice:
    """What to do with the attention layers of one kind and shape.

    Args:
        names: the layers' names, one for each call in a forward of the model; empty for shapes.
        kind: the class of the layers.
        shape: what each is called with.
        attention: its time, None if it ran out of memory.
        candidates: each candidate's time, or why it has none.
        lengths: for each number of tokens, whether the chosen (or the fastest) candidate won.
        places: the layers as `polymix.convert` names them; empty if it knows none.
    """

    names: tuple[str, ...]
    kind: str
    shape: Shape
    attention: Timing | None
    candidates: tuple[Candidate, ...]
    lengths: Mapping[int, bool]
    places: tuple[str, ...] = ()

    @property
    def chosen(self) -> Candidate | None:
        return choose(self.attention, self.candidates)

    @property
    def action(self) -> str:
        return "replace" if self.chosen else "keep"

    @property
    def mixer(self) -> str | None:
        """The mixer to replace attention with; None means keep attention."""
        return self.chosen.mixer if self.chosen else None

    @property
    def options(self) -> dict[str, Any]:
        """The mixer's options at this shape."""
        return self.chosen.options if self.chosen else {}

    @property
    def gains(self) -> tuple[float, float, float] | None:
        """(median, low, high) speedup over attention of the mixer, or of the fastest candidate if attention is kept.

        None if there is no candidate, or attention could not run.
        """
        best = self.chosen or fastest(self.candidates)
        return gain(self.attention, best) if best else None

    @property
    def gain(self) -> float | None:
        """The median of `gains`."""
        return self.gains[0] if self.gains else None

    @property
    def low(self) -> float | None:
        return self.gains[1] if self.gains else None

    @property
    def high(self) -> float | None:
        return self.gains[2] if self.gains else None

    @property
    def wins_from(self) -> int | None:
        """The smallest measured number of tokens from which the candidate wins at all longer ones too."""
        return wins_from(self.lengths)

    @property
    def code(self) -> str | None:
        """Python that builds the mixer."""
        if self.chosen is None or self.chosen.config is None:
            return None
        words = "".join(f", {name}={value!r}" for name, value in self.options.items())
        fold = ".fold()" if self.chosen.folded else ""
        return f'create_mixer("{self.chosen.config.name}", {self.shape.dim}{words}){fold}'

    def to_dict(self) -> dict[str, Any]:
        return {
            "names": list(self.names), "kind": self.kind, "shape": self.shape.to_dict(), "action": self.action,
            "mixer": self.mixer, "options": self.options, "gain": self.gain, "low": self.low, "high": self.high,
            "attention": milliseconds(self.attention), "candidates": [it.to_dict() for it in self.candidates],
            "lengths": {str(tokens): won for tokens, won in self.lengths.items()}, "wins_from": self.wins_from,
            "verdict": self.verdict.to_dict(),
        }  # fmt: skip

    def __str__(self) -> str:
        names = _wrap(f"{len(self.names)} × {self.kind}: {_listed(self.names)}") if self.names else []
        rows = [_row("attention", self.attention, "out of memory", "")]
        for it in self.candidates:
            ratio = gain(self.attention, it)
            rows.append(_row(it.mixer, it.timing, it.reason or "", _times(*ratio) if ratio else ""))
        return "\n".join([*_wrap(f"{self.shape}"), *names, *rows, *_wrap("→ " + self._verdict())])

    @property
    def verdict(self) -> Verdict:
        """What to do, why, and the sentence that says so."""
        return verdict(self.attention, self.candidates, self.shape.tokens)

    def _verdict(self) -> str:
        if self.chosen is None:
            return self.verdict.sentence
        verdict = f"replace: {self.code}"
        verdict += ", called with causal=True" if self.shape.causal and "causal" not in self.options else ""
        if len(self.lengths) > 1:
            verdict += f"; it wins {span(self.lengths)}"
        return verdict


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{names[0]} … {names[-1]}"


def _row(label: str, timing: Timing | None, reason: str, ratio: str) -> str:
    if timing is None:
        return "\n".join(_wrap(f"{label}: {reason}"))
    ms = timing.milliseconds()
    if _width() < _WIDE:
        spread = f" ({figure(ms.low)} – {figure(ms.high)})" if len(ms.runs) > 1 else " (1 run)"
        times = f"{figure(ms.median)} ms{spread}" + (f", {ratio} as fast" if ratio else "")
        return "\n".join([*_wrap(label), *(f"  {line}" for line in _wrap(times))])
    spread = f"{figure(ms.low)} – {figure(ms.high)}" if len(ms.runs) > 1 else "1 run"
    name = f"{label:{_LABEL}}" if len(label) <= _LABEL else "\n".join(_wrap(label)).strip() + "\n  " + " " * _LABEL
    return f"  {name} {figure(ms.median):>9} ms  {spread:>17}  {ratio:>26}".rstrip()


def _times(ratio: float, low: float, high: float) -> str:
    return f"{figure(ratio)} ×" + (f" ({figure(low)} – {figure(high)})" if low < high else "")


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, _width() - 2, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


@dataclass(frozen=True)
class Recommendation:
    """The answer of `polymix.recommend`: print it, or read its fields.

    Args:
        layers: one entry for each kind and shape of attention layer.
        model: the time of a whole forward (in training, and backward) of the model; None for shapes.
        dtype: the type of the measurement.
        training: whether forward and backward were timed.
        machine: hardware, versions, threads.
        notes: what was left out or assumed.
    """

    layers: tuple[LayerAdvice, ...]
    model: Timing | None
    dtype: str
    training: bool
    machine: dict[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def estimate(self) -> float | None:
        """Estimated seconds of the whole model with the advice followed: its time minus what the layers save."""
        if self.model is None:
            return None
        swaps = [(layer.attention, it.timing, len(layer.names)) for layer in self.replaced if (it := layer.chosen)]
        known = [(a.median, b.median, count) for a, b, count in swaps if a and b]
        left = self.model.median - sum(count * (a - b) for a, b, count in known)
        return max(left, sum(count * b for _, b, count in known))

    @property
    def replaced(self) -> tuple[LayerAdvice, ...]:
        """The layers whose attention should be replaced."""
        return tuple(layer for layer in self.layers if layer.chosen)

    def plan(self) -> dict[str, MixerConfig | str]:
        """A plan for `polymix.convert`: a mixer or "keep" for each layer that it knows.

        A layer that is called at several shapes is kept unless one mixer is best at all of them.
        """
        plan: dict[str, MixerConfig | str] = {}
        for layer in self.layers:
            advised = parse_mixer(layer.mixer)[1] if layer.mixer else KEEP
            plan |= {place: advised if plan.get(place, advised) == advised else KEEP for place in layer.places}
        if not plan:
            got = "a recommendation for shapes" if self.model is None else "layers that no adapter knows"
            allowed = "a recommendation for a model that polymix.convert knows"
            raise OptionError("plan", got, allowed, "Name a mixer, or layers by globs.")
        return plan

    @property
    def headline(self) -> str:
        """One sentence for the whole model or all shapes, or two."""
        replaced = self.replaced
        if not replaced:
            if any(layer.verdict.action == OPEN for layer in self.layers):
                return "The choice is open: no candidate is clearly faster, but the runs vary too much to be sure."
            return "Keep attention everywhere: at these shapes no candidate is clearly faster."
        mixers = ", ".join(dict.fromkeys(str(layer.mixer) for layer in replaced))
        calls = [max(1, len(layer.names)) for layer in self.layers]
        count = sum(max(1, len(layer.names)) for layer in replaced)
        ratios = dict.fromkeys(figure(layer.gain) for layer in replaced if layer.gain)
        gains = f": {' and '.join(ratios)} times as fast" if ratios else ""
        unit = "layers" if self.model else "shapes"
        headline = f"Replace attention with {mixers} in {count} of {sum(calls)} {unit}{gains}."
        if self.model and self.estimate:
            headline += f" The whole model would be about {speedup(self.model.median / self.estimate)} (an estimate)."
        return headline

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON holds it."""
        return {
            "headline": self.headline, "layers": [layer.to_dict() for layer in self.layers],
            "model": milliseconds(self.model), "estimate_ms": None if self.estimate is None else 1e3 * self.estimate,
            "dtype": self.dtype, "pass": "training" if self.training else "forward", "machine": self.machine,
            "notes": list(self.notes),
        }  # fmt: skip

    def __str__(self) -> str:
        where = self.machine["gpu"] or f"{self.machine['cpu']}, {plural(self.machine['threads'], 'thread')}"
        what = "forward and backward" if self.training else "forward without gradients"
        head = textwrap.wrap(self.headline, _width()) + textwrap.wrap(f"{what}, {self.dtype}; {where}", _width())
        parts = ["\n".join(head), *map(str, self.layers)]
        if self.model and self.estimate:
            before, after = figure(1e3 * self.model.median), figure(1e3 * self.estimate)
            parts.append(f"Whole model: {before} ms" + (f", then about {after} ms" if self.replaced else ""))
        notes = [textwrap.fill(note, _width()) for note in (*self.notes, SPEED_ALONE)]
        return "\n\n".join([*parts, "\n".join(notes)])
