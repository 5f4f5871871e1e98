"""Series on a regular clock: what a reader returns, and how rows with times of any kind are put onto one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from polymix.train.data.problems import Problems

Array = NDArray[Any]
MAX_FILLED = 10  # rows of a regular clock for each row of a file: beyond, the times are no clock
DAY = 86400
EXAMPLE = "2026-11-30 13:00"
COVARIATES = 6  # of `calendar`
# Steps of a season by the step of the clock in seconds, the first that fits; others: 1.
_SEASONS = ((3600, DAY), (DAY - 1, DAY), (DAY, 7 * DAY), (7 * DAY, 364 * DAY))
_MONTHS = {1: 12, 3: 4}


@dataclass(frozen=True)
class Series:
    """Numbers in time, one row a step.

    Attributes:
        values: (T, V), NaN where nothing was observed. variables: V names.
        start, step: of the clock, as numpy's datetime64 and timedelta64, of months where those are regular; None: the
            times are unknown.
        ends: the rows at which the training and the validation part end, where the layout says so.
        season: steps of a season, where the file says so; None: by the clock.
        labels: (T,), 1 where the file says that a step is an anomaly; None: it says nothing.
    """

    name: str
    values: Array
    variables: tuple[str, ...]
    start: Any = None
    step: Any = None
    ends: tuple[int, int] | None = None
    season: int | None = None
    labels: Array | None = None

    def __len__(self) -> int:
        return len(self.values)

    def times(self, first: int, last: int) -> Array | None:
        """The times of rows first … last - 1, which may lie outside the series; None: they are unknown."""
        return None if self.start is None else self.start + self.step * numpy.arange(first, last)

    def own_season(self) -> int:
        """Steps of a season: a day where the clock has hours or less, a week of days, a year of weeks or months."""
        if self.season is not None:
            return self.season
        if self.step is None:
            return 1
        if numpy.datetime_data(self.step.dtype)[0] == "M":
            return _MONTHS.get(int(self.step.astype(int)), 1)
        seconds = int(self.step / numpy.timedelta64(1, "s"))
        return next((length // seconds for longest, length in _SEASONS if seconds <= longest), 1)


def calendar(series: Series, first: int, last: int) -> Array:
    """Sine and cosine of the time of day, of the week and of the year of some rows, (last - first, 6); 0: unknown."""
    times = series.times(first, last)
    if times is None:
        return numpy.zeros((last - first, COVARIATES), numpy.float32)
    days = times.astype("datetime64[s]").astype(numpy.int64) / DAY
    turns = numpy.stack((days, (days + 3) / 7, days / 365.25), 1) * (2 * numpy.pi)  # 1970 began on a Thursday
    return numpy.concatenate((numpy.sin(turns), numpy.cos(turns)), 1).astype(numpy.float32)


def parse_time(text: str) -> datetime | None:
    """A time in ISO 8601, in UTC where it says its offset; None: it is none.

    Days before months or after them cannot be told apart, so no other order is guessed.
    """
    text = text.strip()
    text = f"{text[:-1]}+00:00" if text.endswith(("Z", "z")) else text
    text = text.replace("/", "-") if text[4:5] == "/" else text
    try:
        time = datetime.fromisoformat(text)
        return time if time.tzinfo is None else time.astimezone(timezone.utc).replace(tzinfo=None)
    except (ValueError, OverflowError):  # the latter where UTC is before the year 1, or after 9999
        return None


def on_clock(
    file: Path, name: str, times: Sequence[datetime], values: Array, variables: tuple[str, ...], problems: Problems,
    first_line: int = 2,
) -> Series | None:  # fmt: skip
    """The series of rows with times, with a row of NaN for each step that is missing, which is noted.

    Its step is the commonest; months are one where all days of the month are the same.

    Returns None, with a problem: times are out of order, come twice (as when the clock is set back), or are no clock.
    """
    seconds = numpy.array(times, "datetime64[s]")
    steps = numpy.diff(seconds).astype(numpy.int64)
    if (steps <= 0).any():
        place = int(numpy.argmax(steps <= 0))
        line, time = f"line {place + first_line + 1}", times[place + 1]
        if times[place + 1] > times[place]:
            text = f"{time} is less than a second after {times[place]}: leave out the column of times, or resample"
        elif 0 <= -int(steps[place]) <= 3600:
            text = (
                f"{time} comes a second time. Where the clock was set back (daylight saving), write times in UTC or "
                f"with their offset, such as {EXAMPLE}+01:00; else remove one of the rows"
            )
        else:
            text = f"{time} after {times[place]}: times out of order. Sort the rows by time"
        problems.add(file, line, text)
        return None
    if len(times) < 2:
        return Series(name, values, variables)
    places, unit = _places(seconds, steps)
    if places is None or places[-1] >= MAX_FILLED * len(times) + MAX_FILLED:
        problems.add(file, "", f"no regular clock: steps from {steps.min():,} to {steps.max():,} seconds. Resample it")
        return None
    start = seconds[0].astype("datetime64[M]") if numpy.datetime_data(unit.dtype)[0] == "M" else seconds[0]
    whole = numpy.full((int(places[-1]) + 1, values.shape[1]), numpy.nan)
    whole[places] = values
    if len(whole) > len(values):
        problems.note(file, f"{len(whole) - len(values):,} steps are missing and count as not observed")
    return Series(name, whole, variables, start, unit)


def _places(seconds: Array, steps: Array) -> tuple[Array | None, Any]:
    """The row of each time on the clock of the commonest step, and that step; None: a time lies between two rows."""
    months = seconds.astype("datetime64[M]")
    apart = numpy.diff(months).astype(numpy.int64)
    if (
        steps.min() >= 28 * DAY
        and (apart > 0).all()
        and len({int(value) for value in (seconds - months).astype(int)}) == 1
    ):
        unit: Any = numpy.timedelta64(_commonest(apart), "M")
        since = (months - months[0]).astype(numpy.int64)
    else:
        unit, since = numpy.timedelta64(_commonest(steps), "s"), (seconds - seconds[0]).astype(numpy.int64)
    length = int(unit.astype(numpy.int64))
    return (None if (since % length).any() else since // length), unit


def _commonest(steps: Array) -> int:
    values, counts = numpy.unique(steps, return_counts=True)
    return int(values[counts.argmax()])
