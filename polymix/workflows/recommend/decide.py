"""When a candidate is worth replacing attention with, by the rule of `polymix.workflows.verdict`, on times alone."""

from __future__ import annotations

from collections.abc import Sequence

from polymix.measure.candidates import Candidate
from polymix.measure.timing import Timing
from polymix.workflows.verdict import FASTER, Contender, Speed, Verdict, judge


def gain(attention: Timing | None, candidate: Candidate) -> tuple[float, float, float] | None:
    """The speedup over attention: of the medians, and the least and the most that the quantiles allow."""
    speed = Speed.of(attention, candidate.timing)
    return None if speed is None or attention is None else (speed.gain, speed.low, speed.high)


def worth_it(attention: Timing | None, candidate: Candidate) -> bool:
    """Whether the candidate is faster beyond the noise and by enough, or attention cannot run at all."""
    speed = Speed.of(attention, candidate.timing)
    return speed is not None and speed.outcome == FASTER


def verdict(attention: Timing | None, candidates: Sequence[Candidate], tokens: int) -> Verdict:
    """What to do at one shape. Of candidates without an attention to compare them with, the fastest is first."""
    timed = sorted((it for it in candidates if it.timing), key=lambda it: it.timing.median if it.timing else 0.0)
    speeds = [(it.mixer, Speed.of(attention, it.timing)) for it in timed]
    return judge([Contender(mixer, {tokens: speed}) for mixer, speed in speeds if speed], tokens)


def fastest(candidates: Sequence[Candidate]) -> Candidate | None:
    """The candidate with the smallest median; None if none was timed."""
    timed = [(it.timing.median, place) for place, it in enumerate(candidates) if it.timing is not None]
    return candidates[min(timed)[1]] if timed else None


def choose(attention: Timing | None, candidates: Sequence[Candidate]) -> Candidate | None:
    """The fastest candidate that is worth it; None means keep attention."""
    return fastest([it for it in candidates if worth_it(attention, it)])
