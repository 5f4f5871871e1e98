"""When a candidate is worth attention's place: by times alone, whoever took them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from polymix.measure.timing import Timing
from polymix.mixers import MixerConfig

WORTH = 1.05  # a smaller gain comes and goes from one run to the next
WORTH_BLIND = 2.0  # where a call had time for a single run, which has no spread


@dataclass(frozen=True)
class Candidate:
    """One mixer at one shape: its time, or why there is none."""

    mixer: str
    config: MixerConfig | None = None  # fitted to the shape
    timing: Timing | None = None
    reason: str | None = None
    folded: bool = False  # timed after mixer.fold()

    @property
    def options(self) -> dict[str, Any]:
        """What `create_mixer` must be told beside the name and the width."""
        if self.config is None:
            return {}
        given = {field.name: getattr(self.config, field.name) for field in fields(self.config)}
        return {f.name: given[f.name] for f in fields(self.config) if given[f.name] != f.default}

    def to_dict(self) -> dict[str, Any]:
        return {
            "mixer": self.mixer, "options": self.options, "folded": self.folded, "reason": self.reason,
            **milliseconds(self.timing),
        }  # fmt: skip


def milliseconds(timing: Timing | None) -> dict[str, Any]:
    if timing is None:
        return {"ms": None, "low_ms": None, "high_ms": None, "runs": 0}
    ms = timing.milliseconds()
    return {"ms": ms.median, "low_ms": ms.low, "high_ms": ms.high, "runs": len(ms.runs)}


def gain(attention: Timing | None, candidate: Candidate) -> tuple[float, float, float] | None:
    """Attention's time over the candidate's: of the medians, and the least and most that the 10 % and 90 % allow."""
    ours = candidate.timing
    if attention is None or ours is None:
        return None
    return attention.median / ours.median, attention.low / ours.high, attention.high / ours.low


def worth_it(attention: Timing | None, candidate: Candidate) -> bool:
    """Whether the candidate is faster beyond the noise, and by enough; anything is than attention that cannot run."""
    if candidate.timing is None or attention is None:
        return candidate.timing is not None
    least = WORTH_BLIND if min(len(attention.runs), len(candidate.timing.runs)) == 1 else WORTH
    return candidate.timing.high < attention.low and attention.median >= least * candidate.timing.median


def fastest(candidates: Sequence[Candidate]) -> Candidate | None:
    timed = [(it.timing.median, place) for place, it in enumerate(candidates) if it.timing is not None]
    return candidates[min(timed)[1]] if timed else None


def choose(attention: Timing | None, candidates: Sequence[Candidate]) -> Candidate | None:
    """The fastest candidate that is worth it; None: keep attention."""
    return fastest([it for it in candidates if worth_it(attention, it)])


def wins_from(wins: Mapping[int, bool]) -> int | None:
    """The least measured number of tokens from which on the candidate wins at every measured one."""
    start = None
    for tokens in sorted(wins, reverse=True):
        if not wins[tokens]:
            break
        start = tokens
    return start
