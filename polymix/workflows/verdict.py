"""The verdict on replacing attention: one rule for `polymix compare`, `recommend` and `convert`.

A mixer is worth using at a number of tokens if it is as accurate as attention, as far as accuracy was measured, if it
is at least `WORTH` times as fast, and if nine in ten of its runs are faster than nine in ten of attention's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from polymix.measure.timing import Timing
from polymix.numbers import figure, fixed, listed, speedup

MIN_GAIN = 1.1  # smaller gains vary from run to run
MIN_GAIN_OF_ONE_RUN = 2.0  # where there was time for a single run, which has no spread
FASTER, SLOWER, SIMILAR, UNCLEAR = "faster", "slower", "similar", "unclear"
OUTCOMES = (FASTER, SIMILAR, UNCLEAR, SLOWER)
REPLACE, KEEP, OPEN = "replace", "keep", "open"


@dataclass(frozen=True)
class Speed:
    """A speedup over attention: of the medians, and the least and the most that the quantiles of both allow.

    gain: infinite where attention alone exceeded the budget or the memory. one_run: whether either was timed once.
    """

    gain: float
    low: float
    high: float
    one_run: bool = False

    @classmethod
    def of(cls, attention: Timing | None, ours: Timing | None) -> Speed | None:
        """From the times of both; None where the mixer has none."""
        if ours is None:
            return None
        if attention is None:
            return cls(math.inf, math.inf, math.inf)
        one_run = min(len(attention.runs), len(ours.runs)) == 1
        return cls(attention.median / ours.median, attention.low / ours.high, attention.high / ours.low, one_run)

    @property
    def outcome(self) -> str:
        """FASTER or SLOWER beyond doubt, SIMILAR, or UNCLEAR where the runs spread too far to say."""
        least = MIN_GAIN_OF_ONE_RUN if self.one_run else MIN_GAIN
        if self.gain >= least and (self.low > 1 or self.one_run):
            return FASTER
        if self.gain <= 1 / least and (self.high < 1 or self.one_run):
            return SLOWER
        near = 1 / MIN_GAIN < self.gain < MIN_GAIN and not self.one_run and self.low > 0.5 and self.high < 2
        return SIMILAR if near else UNCLEAR

    def __str__(self) -> str:
        """The predicate of a sentence: "is 2 times as fast"."""
        if math.isinf(self.gain):
            return "stays within the budget, which attention exceeds"
        if self.outcome == SIMILAR:
            return f"is about as fast ({fixed(self.gain, 2)} times)"
        return f"is {speedup(self.gain)}" if self.gain >= 1 else f"takes {figure(1 / self.gain)} times as long"

    @property
    def doubt(self) -> str:
        """Why an UNCLEAR speed decides nothing."""
        if self.one_run:
            return f"in a single run, which counts only from {figure(MIN_GAIN_OF_ONE_RUN)} times on"
        return f"its runs vary from {figure(self.low)} to {figure(self.high)} times"


@dataclass(frozen=True)
class Contender:
    """A mixer in attention's place: its speed by number of tokens, and the range of its accuracy minus attention's.

    accuracy: (low, high), where 0.01 is one percentage point; None where it was not measured.
    """

    name: str
    speeds: Mapping[int, Speed]
    accuracy: tuple[float, float] | None = None

    @property
    def accurate(self) -> bool:
        """Whether it may be as accurate as attention."""
        return self.accuracy is None or self.accuracy[1] >= 0


@dataclass(frozen=True)
class Verdict:
    """What to do at one number of tokens.

    Args:
        action: REPLACE attention, KEEP it, or OPEN where the measurements do not decide.
        why: "faster", "slower", "similar", "unclear", "less accurate", "not measured" or "no reference".
        mixer: the mixer to use, or that comes nearest to it; None where none was measured.
        tokens: where this holds.
        speed: the mixer's there.
        sentence: all this in words.
    """

    action: str
    why: str
    mixer: str | None
    tokens: int
    speed: Speed | None
    sentence: str

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it, where an infinite speedup is null."""
        speed = self.speed or Speed(math.nan, math.nan, math.nan)
        content = {key: value for key, value in asdict(self).items() if key != "speed"}
        numbers = {key: getattr(speed, key) for key in ("gain", "low", "high")}
        return {**content, **{key: value if math.isfinite(value) else None for key, value in numbers.items()}}


def judge(contenders: Sequence[Contender], tokens: int, place: str = "", *, reference: bool = True) -> Verdict:
    """The verdict at one number of tokens.

    Args:
        contenders: the mixers that were measured.
        tokens: the number of tokens.
        place: how the sentence begins; "At 196 tokens" by default.
        reference: False if attention itself diverged in training, so that no accuracy can be compared.
    """
    place = place or f"At {tokens:,} tokens"

    def verdict(action: str, why: str, text: str, contender: Contender | None = None) -> Verdict:
        speed = None if contender is None else contender.speeds[tokens]
        return Verdict(action, why, None if contender is None else contender.name, tokens, speed, f"{place} {text}")

    if not reference:
        text = "the choice is open: attention itself diverged in training, so there is no accuracy to compare with."
        return verdict(OPEN, "no reference", text)
    timed = [it for it in contenders if tokens in it.speeds]
    accurate = sorted((it for it in timed if it.accurate), key=lambda it: -it.speeds[tokens].gain)
    by_outcome = {outcome: [it for it in accurate if it.speeds[tokens].outcome == outcome] for outcome in OUTCOMES}
    if not timed:
        return verdict(KEEP, "not measured", "keep attention: no mixer could be measured.")
    if not accurate:
        return verdict(KEEP, "less accurate", "keep attention: no mixer that was measured is as accurate.")
    if by_outcome[FASTER]:
        best = by_outcome[FASTER][0]
        speed = best.speeds[tokens]
        if best.accuracy is None:
            return verdict(REPLACE, FASTER, f"use {best.name}: it {speed}.", best)
        than = "more accurate than with attention" if best.accuracy[0] > 0 else "as accurate as with attention"
        return verdict(REPLACE, FASTER, f"use {best.name}: the model is {than}, and {speed}.", best)
    best = accurate[0]
    known = best.accuracy is not None
    promising = [it for it in by_outcome[UNCLEAR] if it.speeds[tokens].gain >= 1]
    if promising:
        best = promising[0]
        its = best.speeds[tokens]
        cure = "Measure for longer." if its.one_run else "Measure again on an idle machine."
        also = "is as accurate and " if known else ""
        text = f"the choice is open: {best.name} {also}measured {speedup(its.gain)}, but {its.doubt}. {cure}"
        return verdict(OPEN, UNCLEAR, text, best)
    fastest = f"the fastest mixer that is as accurate, {best.name}," if known else f"the fastest mixer, {best.name},"
    its = best.speeds[tokens]
    doubt = f", but {its.doubt}" if its.outcome == UNCLEAR else ""
    return verdict(KEEP, its.outcome, f"keep attention: {fastest} {its}{doubt}.", best)


def wins_from(wins: Mapping[int, bool]) -> int | None:
    """The smallest measured number of tokens from which a mixer wins at all longer measured ones too."""
    start = None
    for tokens in sorted(wins, reverse=True):
        if not wins[tokens]:
            break
        start = tokens
    return start


def span(wins: Mapping[int, bool], name: Callable[[int], str] = "{:,}".format) -> str:
    """Where a mixer wins, in words, and what was measured: no length is named that was not measured.

    For example "from 256 tokens on (measured: 64, 256 and 1,024)". Where it wins nowhere, the words fit a sentence with
    "not".

    Args:
        wins: by number of tokens, whether the mixer wins.
        name: how a key of `wins` is written.
    """
    counts = sorted(wins)
    won = [n for n in counts if wins[n]]
    every = listed(map(name, counts))
    if len(counts) == 1:
        return f"at {every} tokens, the only length measured"
    if len(won) == len(counts):
        return f"at every measured length ({every} tokens)"
    if not won:
        return f"at any measured length ({every} tokens)"
    start = wins_from(wins)
    if start is not None and len(won) == sum(n >= start for n in counts):
        return f"from {name(start)} tokens on (measured: {every})"
    return f"only at {listed(map(name, won))} tokens (measured: {every})"
