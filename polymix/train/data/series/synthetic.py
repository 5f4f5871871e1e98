"""Synthetic series of which no fixed linear map knows the future: what decides must be read from all of the past."""

from __future__ import annotations

from pathlib import Path

import numpy

from polymix.files import write_whole
from polymix.train.data.sampling import number
from polymix.train.data.series.times import Array

NOISE = 0.1
PERIODS = (12.0, 72.0)
HARMONICS = 3
LEADERS, LEAD_STEPS, LAG = 8, 12_000, 24


def write_period(folder: Path, seed: int, count: int, shortest: int) -> None:
    """series.tsf: series of `shortest` to twice as many steps, each y(t) = Σ_k a_k / k sin(2πk t / P + φ_k) + noise.

    The period P is uniform in 12 … 72, and each series has its own P, a_k ~ N(0, 1) and φ_k.
    """
    draw = numpy.random.default_rng(number("period", seed))
    lines = ["@relation period", "@attribute series_name string", "@data"]
    for place in range(count):
        time = numpy.arange(int(draw.integers(shortest, 2 * shortest, endpoint=True))) / draw.uniform(*PERIODS)
        values = draw.normal(0, NOISE, len(time))
        for k in range(1, HARMONICS + 1):
            values += draw.normal() / k * numpy.sin(2 * numpy.pi * (k * time + draw.uniform()))
        lines.append(f"T{place}:{','.join(f'{value:.3f}' for value in values)}")
    write_whole(folder / "series.tsf", "\n".join(lines) + "\n")


def write_lead(folder: Path, seed: int) -> None:
    """series.csv: 8 leaders, which are smoothed noise, and 8 followers, each the sum of two leaders 24 to 32 steps ago.

    follower_i(t) = 0.7 (leader_i(t − 24 − i) + leader_{i+3}(t − 25 − i)) + noise. Up to 24 steps ahead the leaders'
    past decides them; a follower's own past says nothing beyond its smoothness.
    """
    draw = numpy.random.default_rng(number("lead", seed))
    before = LAG + LEADERS + 1
    smooth = numpy.ones(6) / 6
    leaders = [
        numpy.convolve(draw.normal(size=before + LEAD_STEPS + 5), smooth, "valid") * 6**0.5 for _ in range(LEADERS)
    ]

    def ago(leader: int, steps: int) -> Array:
        return leaders[leader % LEADERS][before - steps : before - steps + LEAD_STEPS]

    followers = [0.7 * (ago(i, LAG + i) + ago(i + 3, LAG + 1 + i)) + draw.normal(0, NOISE, LEAD_STEPS)
                 for i in range(LEADERS)]  # fmt: skip
    columns = [*(leader[before:] for leader in leaders), *followers]
    hours = numpy.datetime64("2026-01-01T00", "h") + numpy.arange(LEAD_STEPS)
    names = [f"{kind}_{place}" for kind in ("leader", "follower") for place in range(LEADERS)]
    rows = [",".join(("date", *names))]
    rows += [f"{hour}:00,{','.join(f'{value:.3f}' for value in row)}"
             for hour, row in zip(hours, zip(*columns, strict=True), strict=True)]  # fmt: skip
    write_whole(folder / "series.csv", "\n".join(rows) + "\n")
