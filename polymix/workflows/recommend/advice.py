"""The advice: replace or keep, layer by layer, and the whole in words."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polymix.convert.plan import KEEP
from polymix.errors import OptionError
from polymix.measure.timing import Timing
from polymix.mixers import MixerConfig
from polymix.mixers.spec import parse_mixer
from polymix.workflows.recommend.decide import Candidate, choose, fastest, gain, milliseconds, wins_from
from polymix.workflows.recommend.shapes import Shape

SPEED_ALONE = (
    "Speed says nothing about accuracy: a replaced layer is untrained. `polymix compare` trains and measures that."
)
_WIDTH, _LABEL = 94, 34


@dataclass(frozen=True)
class LayerAdvice:
    """What to do with the attention layers of one kind and shape.

    Args:
        names: of the layers, one a call in a forward of the model; () where shapes were given.
        kind: the class of the layers.
        attention: its time, None where it ran out of memory.
        lengths: by number of tokens, whether the chosen, else the fastest, candidate beat attention beyond the noise.
        places: the layers as `polymix.convert` names them; () where it knows none.
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
        """What to replace attention with, None: keep it."""
        return self.chosen.mixer if self.chosen else None

    @property
    def options(self) -> dict[str, Any]:
        """The mixer's options at this shape."""
        return self.chosen.options if self.chosen else {}

    @property
    def gains(self) -> tuple[float, float, float] | None:
        """Attention's time over that of the mixer, or of the fastest candidate where attention is kept: (median, low,
        high); None without a candidate, or where attention could not run."""
        best = self.chosen or fastest(self.candidates)
        return gain(self.attention, best) if best else None

    @property
    def gain(self) -> float | None:
        return self.gains[0] if self.gains else None

    @property
    def low(self) -> float | None:
        return self.gains[1] if self.gains else None

    @property
    def high(self) -> float | None:
        return self.gains[2] if self.gains else None

    @property
    def attention_ms(self) -> float | None:
        return 1e3 * self.attention.median if self.attention else None

    @property
    def wins_from(self) -> int | None:
        return wins_from(self.lengths)

    @property
    def code(self) -> str | None:
        """The call that builds the mixer."""
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
        }  # fmt: skip

    def __str__(self) -> str:
        names = _wrap(f"{len(self.names)} × {self.kind}: {_listed(self.names)}") if self.names else []
        rows = [_row("attention", self.attention, "out of memory", "")]
        for it in self.candidates:
            ratio = gain(self.attention, it)
            rows.append(_row(it.mixer, it.timing, it.reason or "", _times(*ratio) if ratio else ""))
        return "\n".join([*_wrap(f"{self.shape}"), *names, *rows, *_wrap("→ " + self._verdict())])

    def _verdict(self) -> str:
        if self.chosen is None:
            return "keep attention" + ("" if self.gains else ": no candidate fits")
        said = f"replace: {self.code}"
        said += ", called with causal=True" if self.shape.causal and "causal" not in self.options else ""
        if len(self.lengths) > 1:
            counts = ", ".join(f"{tokens:,}" for tokens in sorted(self.lengths))
            said += f"; it wins from {self.wins_from:,} tokens on (measured at {counts})" if self.wins_from else ""
        return said


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{names[0]} … {names[-1]}"


def _row(label: str, timing: Timing | None, reason: str, ratio: str) -> str:
    if timing is None:
        return "\n".join(_wrap(f"{label}: {reason}"))
    ms = timing.milliseconds()
    spread = f"{_figure(ms.low)} – {_figure(ms.high)}" if len(ms.runs) > 1 else "1 run"
    name = f"{label:{_LABEL}}" if len(label) <= _LABEL else "\n".join(_wrap(label)).strip() + "\n  " + " " * _LABEL
    return f"  {name} {_figure(ms.median):>9} ms  {spread:>17}  {ratio:>26}".rstrip()


def _times(ratio: float, low: float, high: float) -> str:
    return f"{_figure(ratio)} ×" + (f" ({_figure(low)} – {_figure(high)})" if low < high else "")


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


@dataclass(frozen=True)
class Recommendation:
    """The answer of `polymix.recommend`: print it, or read it field by field.

    Args:
        layers: one entry a kind and shape of attention layer.
        model: the time of a whole forward (and backward, in training) of the model, None where shapes were given.
        machine: hardware, versions, threads.
        notes: what was left out, or assumed.
    """

    layers: tuple[LayerAdvice, ...]
    model: Timing | None
    dtype: str
    training: bool
    machine: dict[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def estimate(self) -> float | None:
        """Seconds of the whole model with the advice followed: an estimate, its time less what the layers save."""
        if self.model is None:
            return None
        swaps = [(layer.attention, it.timing, len(layer.names)) for layer in self.replaced if (it := layer.chosen)]
        known = [(a.median, b.median, count) for a, b, count in swaps if a and b]
        left = self.model.median - sum(count * (a - b) for a, b, count in known)
        return max(left, sum(count * b for _, b, count in known))

    @property
    def replaced(self) -> tuple[LayerAdvice, ...]:
        """The layers in which a mixer should stand in attention's place."""
        return tuple(layer for layer in self.layers if layer.chosen)

    def plan(self) -> dict[str, MixerConfig | str]:
        """What `polymix.convert` takes: a mixer or "keep" by layer, of those that it knows. A layer that is called at
        several shapes is kept unless one mixer is best at all of them."""
        found: dict[str, MixerConfig | str] = {}
        for layer in self.layers:
            advised = parse_mixer(layer.mixer)[1] if layer.mixer else KEEP
            found |= {place: advised if found.get(place, advised) == advised else KEEP for place in layer.places}
        if not found:
            got = "a recommendation for shapes" if self.model is None else "layers that no adapter serves"
            raise OptionError("plan", got, "one for a model that polymix.convert knows", "Name a mixer, or globs.")
        return found

    @property
    def headline(self) -> str:
        replaced = self.replaced
        if not replaced:
            return "Keep attention everywhere: at these shapes no candidate is faster beyond the noise."
        what = ", ".join(dict.fromkeys(str(layer.mixer) for layer in replaced))
        calls = [max(1, len(layer.names)) for layer in self.layers]
        of = sum(max(1, len(layer.names)) for layer in replaced)
        ratios = [_figure(layer.gain) for layer in replaced if layer.gain]
        much = f", {' and '.join(dict.fromkeys(ratios))} times as fast" if ratios else ""
        unit = "layers" if self.model else "shapes"
        said = f"Replace attention with {what} in {of} of {sum(calls)} {unit}{much}."
        if self.model and self.estimate:
            said += f" The whole model would be {self.model.median / self.estimate:.3g} times as fast (an estimate)."
        return said

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        return {
            "headline": self.headline, "layers": [layer.to_dict() for layer in self.layers],
            "model": milliseconds(self.model), "estimate_ms": None if self.estimate is None else 1e3 * self.estimate,
            "dtype": self.dtype, "pass": "training" if self.training else "forward", "machine": self.machine,
            "notes": list(self.notes),
        }  # fmt: skip

    def __str__(self) -> str:
        where = self.machine["gpu"] or f"{self.machine['cpu']}, {self.machine['threads']} thread(s)"
        what = "forward and backward" if self.training else "forward without gradients"
        head = textwrap.wrap(self.headline, _WIDTH) + textwrap.wrap(f"{what}, {self.dtype}; {where}", _WIDTH)
        parts = ["\n".join(head), *map(str, self.layers)]
        if self.model and self.estimate:
            before, after = _figure(1e3 * self.model.median), _figure(1e3 * self.estimate)
            parts.append(f"Whole model: {before} ms" + (f", then about {after} ms" if self.replaced else ""))
        notes = [textwrap.fill(note, _WIDTH) for note in (*self.notes, SPEED_ALONE)]
        return "\n\n".join([*parts, "\n".join(notes)])
