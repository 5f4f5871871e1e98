"""Windows of series: the past that a model sees and the future that it forecasts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset

from polymix.train.data.series.times import Array, Series, calendar

SMALLEST_SPREAD = 1e-6  # of a series; less is the rounding of a constant
SMALLEST = 1e-2  # standard deviation of a context, where its series has 1: a flat context is not blown up


class Window(NamedTuple):
    """A batch (B, …) of windows, or one: values (V, C + H), observed, a bool for each, and the calendar (C + H, 6).

    Values are standardised by their series' training part; what is not observed is 0. scale (V): the mean absolute
    error of the seasonal naive forecast on the training part, by which MASE divides; NaN where it is 0.
    """

    values: Tensor
    observed: Tensor
    calendar: Tensor
    scale: Tensor


@dataclass(frozen=True)
class Prepared:
    """A series as windows are cut from it: values and observed (V, T), and what they were before."""

    series: Series
    values: Tensor
    observed: Tensor
    calendar: Tensor
    centre: Array
    spread: Array
    scale: Tensor
    ends: tuple[int, int]
    season: int


class Windows(Dataset[Window]):
    """Windows by place: (series, first step of the future).

    targets: of the variables, which are forecast; the future of the others counts as not observed.
    """

    def __init__(
        self, series: Sequence[Prepared], places: Sequence[tuple[int, int]], context: int, horizon: int, targets: Tensor
    ) -> None:
        self.series, self.places, self.context, self.horizon = series, places, context, horizon
        self.targets = targets
        self.references: dict[str, float] | None = None  # the controls' errors, once they are computed

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Window:
        which, start = self.places[index]
        one = self.series[which]
        first, last = start - self.context, start + self.horizon
        here = slice(max(0, first), min(last, one.values.shape[1]))
        around = (max(0, -first), max(0, last - one.values.shape[1]))  # before the series, and after it
        values, observed = (torch.nn.functional.pad(part[:, here], around) for part in (one.values, one.observed))
        observed[~self.targets, self.context :] = False
        dates = one.calendar[here]
        if any(around):
            dates = torch.from_numpy(calendar(one.series, first, last))
        return Window(values, observed, dates, one.scale)

    def batch(self, places: Sequence[int]) -> Window:
        """Some windows as a batch."""
        return Window(*(torch.stack(part) for part in zip(*(self[place] for place in places), strict=True)))

    def season(self, index: int) -> int:
        """Steps of a season of a window's series."""
        return self.series[self.places[index][0]].season


def prepare(
    series: Series, horizon: int, shares: tuple[float, float], season: int | None = None, future: bool = False
) -> Prepared:
    """A series, standardised by its training part, or with `future` by all of it, where nothing of it is tested.

    shares: of the validation part and of the test, each of at least a horizon, where the series does not say it.
    season: steps of it; None: the series' own.
    """
    length = len(series)
    last = length - max(horizon, int(shares[1] * length))
    ends = series.ends or (last - max(horizon, int(shares[0] * length)), last)
    past = series.values[: length if future else max(ends[0], 1)]
    seen = numpy.isfinite(past)
    count = numpy.maximum(seen.sum(0), 1)
    centre = numpy.where(seen, past, 0).sum(0) / count
    wide = (numpy.where(seen, past - centre, 0) ** 2).sum(0) / count
    width = numpy.sqrt(wide)
    width = numpy.where(width > SMALLEST_SPREAD * (1 + numpy.abs(centre)), width, 1.0)
    season = season or series.own_season()
    values = (series.values - centre) / width
    observed = numpy.isfinite(values)
    ago = min(season, max(1, len(past) - 1))
    errors = numpy.abs(values[ago : len(past)] - values[: len(past) - ago])
    known = numpy.isfinite(errors)
    scale = numpy.where(known, errors, 0).sum(0) / numpy.maximum(known.sum(0), 1)
    scale = numpy.where(scale > SMALLEST_SPREAD, scale, numpy.nan)
    tensors = (torch.from_numpy(numpy.ascontiguousarray(part.T)) for part in (numpy.nan_to_num(values), observed))
    dates = torch.from_numpy(calendar(series, 0, length))
    return Prepared(series, next(tensors).float(), next(tensors), dates, centre, width,
                    torch.from_numpy(scale).float(), ends, season)  # fmt: skip


def level_and_width(past: Tensor, observed: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (B, V, 1) of what was observed of past (B, V, C): the reversible instance norm's."""
    count = observed.sum(-1, keepdim=True).clamp_min(1)
    mean = (past * observed).sum(-1, keepdim=True) / count
    variance = ((past - mean) ** 2 * observed).sum(-1, keepdim=True) / count
    return mean, variance.sqrt().clamp_min(SMALLEST)
