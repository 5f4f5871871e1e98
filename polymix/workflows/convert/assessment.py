"""What `polymix.assess` found: as text, as JSON, as a page and as a model card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from polymix.convert import ConversionReport
from polymix.measure.timing import Timing
from polymix.workflows.recommend.decide import milliseconds, wins_from


class Pair(NamedTuple):
    """Before and after: seconds of a call, bytes that it holds at most, FLOPs; None where it ran out of memory."""

    times: tuple[Timing | None, Timing | None]
    memory: tuple[int | None, int | None]
    flops: tuple[int | None, int | None]

    @property
    def gain(self) -> float | None:
        """Time before over time after."""
        before, after = self.times
        return None if before is None or after is None else before.median / after.median

    def to_dict(self) -> dict[str, Any]:
        return {
            "before": milliseconds(self.times[0]), "after": milliseconds(self.times[1]), "gain": self.gain,
            "memory_bytes": list(self.memory), "flops": list(self.flops),
        }  # fmt: skip


class LayerCost(NamedTuple):
    """One layer on the call that the model makes."""

    shape: tuple[int, ...]
    pair: Pair


class Length(NamedTuple):
    """All converted layers at `factor` times their own tokens: seconds of attention, and of the mixers."""

    factor: float
    tokens: tuple[int, ...]
    attention: float
    mixers: float


@dataclass(frozen=True)
class Assessment:
    """Prints as a table. `report` is the conversion's own; `whole` the model's costs; `layers` each layer's; `curve` at
    other lengths; `training` whether a call was forward and backward."""

    report: ConversionReport
    whole: Pair
    layers: Mapping[str, LayerCost]
    curve: tuple[Length, ...]
    training: bool
    machine: Mapping[str, Any]

    @property
    def wins_from(self) -> float | None:
        """The least measured length, in multiples of the layers' own, from which on the mixers are faster."""
        found: dict[int, bool] = {place: length.mixers < length.attention for place, length in enumerate(self.curve)}
        start = wins_from(found)
        return None if start is None else self.curve[start].factor

    @property
    def headline(self) -> str:
        """One sentence: what the conversion did to the model's time, and from which length on it pays."""
        gain, what = self.whole.gain, "A training step" if self.training else "The model"
        if gain is None:
            return f"{what} ran out of memory before or after."
        told = f"{what} is {gain:.2f} × as fast" if gain >= 1 else f"{what} takes {1 / gain:.2f} × as long"
        start = self.wins_from
        if not self.curve:
            return f"{told} on this input."
        if start is None:
            return f"{told} on this input; at no measured length are the mixers faster than attention."
        tokens = " / ".join(f"{n:,}" for n in dict.fromkeys(self._tokens(start)))
        return f"{told} on this input; the mixers win from {tokens} tokens on."

    def _tokens(self, factor: float) -> tuple[int, ...]:
        return next(length.tokens for length in self.curve if length.factor == factor)

    def __str__(self) -> str:
        lines = [self.headline, "", str(self.report), ""]
        for name, cost in {"the model": self.whole, **{k: c.pair for k, c in self.layers.items()}}.items():
            lines.append(f"{name}: {_change(cost)}")
        for length in self.curve:
            tokens = " / ".join(f"{n:,}" for n in dict.fromkeys(length.tokens))
            lines.append(
                f"{tokens} tokens: attention {1e3 * length.attention:.3g} ms, mixers {1e3 * length.mixers:.3g} ms"
            )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return {
            "headline": self.headline, "training": self.training, "machine": dict(self.machine),
            "conversion": self.report.to_dict(), "model": self.whole.to_dict(),
            "layers": {k: {"shape": list(c.shape), **c.pair.to_dict()} for k, c in self.layers.items()},
            "lengths": [length._asdict() for length in self.curve], "wins_from": self.wins_from,
        }  # fmt: skip

    def write(
        self, folder: str | Path, *, title: str = "A converted model", card: Mapping[str, Any] | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> Path:  # fmt: skip
        """results.json, report.html with its pictures, and README.md, a model card; returns the page's path.

        card: metadata for its head. about: what else goes into results.json; `notes` in it, sentences, on page and card
        too, and `code`, what builds the host if that must be trusted, on the card.
        """
        from polymix.workflows.convert.page import write

        return write({**(about or {}), **self.to_dict()}, Path(folder), title, card or {})


def _change(pair: Pair) -> str:
    """Times, memory and FLOPs before → after."""
    before, after = (milliseconds(timing)["ms"] for timing in pair.times)
    parts = [f"{_number(before)} → {_number(after)} ms"]
    memory = [None if size is None else size / 2**20 for size in pair.memory]
    parts.append(f"{_number(memory[0])} → {_number(memory[1])} MiB at most")
    flops = [None if count is None else count / 1e6 for count in pair.flops]
    parts.append(f"{_number(flops[0])} → {_number(flops[1])} MFLOPs")
    return ", ".join(parts)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
