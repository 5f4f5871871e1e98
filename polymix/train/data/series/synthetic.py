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
MIRRORED = (24, 72)
SHAPE, SLOT = 16, 64  # steps of a shape, and of the part of a series that has one


def write_period(folder: Path, seed: int, count: int, shortest: int) -> None:
    """series.tsf: series of `shortest` to twice as many steps, each y(t) = Σ_k a_k / k sin(2πk t / P + φ_k) + noise.

    The period P is uniform in 12 … 72, and each series has its own P, a_k ~ N(0, 1) and φ_k.
    """
    draw = numpy.random.default_rng(number("period", seed))
    lines = ["@relation period", "@attribute series_name string", "@data"]
    for place in range(count):
        values = _periodic(draw, int(draw.integers(shortest, 2 * shortest, endpoint=True)))
        lines.append(f"T{place}:{','.join(f'{value:.3f}' for value in values)}")
    write_whole(folder / "series.tsf", "\n".join(lines) + "\n")


def _periodic(draw: numpy.random.Generator, length: int) -> Array:
    time = numpy.arange(length) / draw.uniform(*PERIODS)
    values = draw.normal(0, NOISE, length)
    for k in range(1, HARMONICS + 1):
        values += draw.normal() / k * numpy.sin(2 * numpy.pi * (k * time + draw.uniform()))
    return values


def write_mirrored(folder: Path, seed: int, count: int, shortest: int) -> None:
    """A file of the UCR Anomaly Archive's layout for each series of `period`, whose test has an anomaly.

    For 24 to 72 steps y(t) is −y(t): level, range and shape stay, and only the phase is not the series' own.
    """
    draw = numpy.random.default_rng(number("mirrored", seed))
    for place in range(count):
        values = _periodic(draw, int(draw.integers(shortest, 2 * shortest, endpoint=True)))
        train = int(0.75 * len(values))
        length = min(int(draw.integers(*MIRRORED, endpoint=True)), (len(values) - train) // 2)
        first = int(draw.integers(train + 1, len(values) - length, endpoint=True))
        values[first : first + length] *= -1
        name = f"{place:04}_UCR_Anomaly_mirrored_{train}_{first + 1}_{first + length}.txt"
        write_whole(folder / name, "\n".join(f"{value:.3f}" for value in values) + "\n")


def write_marked(folder: Path, seed: int, train: int, test: int) -> None:
    """marked_TRAIN.ts and marked_TEST.ts: which of four shapes follows the marker?

    Each series has all four shapes, in any order, and a marker at some distance before one of them, which is its class.
    No patch of up to 25 steps has a part of both, and a count of shapes says nothing.
    """
    draw = numpy.random.default_rng(number("marked", seed))
    grid = numpy.linspace(0, 1, SHAPE)
    shapes = (numpy.sin(numpy.pi * grid), -numpy.sin(numpy.pi * grid), numpy.sin(2 * numpy.pi * grid),
              -numpy.sin(2 * numpy.pi * grid))  # fmt: skip
    for part, count in (("TRAIN", train), ("TEST", test)):
        lines = ["@problemName marked", "@univariate true", "@classLabel true 1 2 3 4", "@data"]
        for _ in range(count):
            values = draw.normal(0, NOISE, len(shapes) * SLOT)
            order, marked = draw.permutation(len(shapes)), int(draw.integers(len(shapes)))
            for slot, shape in enumerate(order):
                begin = slot * SLOT + int(draw.integers(SLOT - 3 * SHAPE, endpoint=True))
                if slot == marked:
                    values[begin : begin + SHAPE // 2] += numpy.resize((2.0, -2.0), SHAPE // 2)
                values[begin + 2 * SHAPE : begin + 3 * SHAPE] += 2 * shapes[shape]
            lines.append(f"{','.join(f'{value:.3f}' for value in values)}:{order[marked] + 1}")
        write_whole(folder / f"marked_{part}.ts", "\n".join(lines) + "\n")


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
