"""When a candidate is worth replacing attention with, judged by times alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polymix.measure.candidates import Candidate
from polymix.measure.timing import Timing

WORTH = 1.05  # smaller gains vary from run to run
WORTH_OF_ONE_RUN = 2.0  # where there was time for a single run, which has no spread


def gain(attention: Timing | None, candidate: Candidate) -> tuple[float, float, float] | None:
    """The speedup over attention: of the medians, and the least and the most that the quantiles allow."""
    ours = candidate.timing
    if attention is None or ours is None:
        return None
    return attention.median / ours.median, attention.low / ours.high, attention.high / ours.low


def worth_it(attention: Timing | None, candidate: Candidate) -> bool:
    """Whether the candidate is faster beyond the noise and by enough, or attention cannot run at all."""
    if candidate.timing is None or attention is None:
        return candidate.timing is not None
    least = WORTH_OF_ONE_RUN if min(len(attention.runs), len(candidate.timing.runs)) == 1 else WORTH
    return candidate.timing.high < attention.low and attention.median >= least * candidate.timing.median


def fastest(candidates: Sequence[Candidate]) -> Candidate | None:
    """The candidate with the smallest median; None if none was timed."""
    timed = [(it.timing.median, place) for place, it in enumerate(candidates) if it.timing is not None]
    return candidates[min(timed)[1]] if timed else None


def choose(attention: Timing | None, candidates: Sequence[Candidate]) -> Candidate | None:
    """The fastest candidate that is worth it; None means keep attention."""
    return fastest([it for it in candidates if worth_it(attention, it)])


def wins_from(wins: Mapping[int, bool]) -> int | None:
    """The smallest measured number of tokens from which the candidate wins at all longer measured ones too."""
    start = None
    for tokens in sorted(wins, reverse=True):
        if not wins[tokens]:
            break
        start = tokens
    return start
