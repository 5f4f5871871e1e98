"""Synthetic fields: parcels of crops that only their course over a year tells apart, written as PASTIS."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polymix.domains.satellite.pastis import BANDS, write_metadata, write_patch
from polymix.train.data.sampling import number

LAND_COVERS = ("background", "winter cereal", "maize", "sunflower", "two crops", "meadow")
DATES, SIDE, PARCELS = 24, 24, 10
_SOIL = (900, 1100, 1300, 1500, 1700, 1900, 2000, 2200, 2600, 2300)  # reflectance × 10,000 of the ten bands
_GREEN = (400, 700, 500, 1100, 2900, 3600, 3800, 4000, 2000, 1100)
# For each cover: pairs of the days at which it greens up and fades, and how green it gets.
_COURSES: dict[int, tuple[tuple[float, float, float], ...]] = {
    0: (), 1: ((80, 185, 0.95),), 2: ((165, 275, 0.95),), 3: ((135, 235, 0.95),), 4: ((70, 145, 0.9), (205, 290, 0.9)),
    5: ((60, 320, 0.6),),
}  # fmt: skip


def greenness(cover: int, days: Tensor, shift: float) -> Tensor:
    """How green a cover is on each day, from 0 to 1: a sum of double logistic curves, shifted by some days."""
    green = torch.full(days.shape, 0.12)
    for up, down, top in _COURSES[cover]:
        green = green + (top - 0.12) * (
            torch.sigmoid((days - up - shift) / 9) - torch.sigmoid((days - down - shift) / 9)
        )
    return green


def make_patch(seed: int, side: int = SIDE) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Series (T, bands, side, side), labels and parcels (side, side), and days (T) of one patch.

    Each parcel has a cover and a shift of its own (σ 12 days). Three dates in ten are clouded all over, others have
    clouds in discs; each date has its own illumination, each pixel its own noise. No single date tells the cover.
    """
    draw = torch.Generator().manual_seed(number("fields", seed))
    count = max(1, round(PARCELS * (side / SIDE) ** 2))
    centres = torch.rand(count, 2, generator=draw) * side
    places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).float()
    parcels = torch.cdist(places, centres).argmin(1)  # a Voronoi diagram
    covers = torch.randint(len(LAND_COVERS), (count,), generator=draw)
    shifts = 12 * torch.randn(count, generator=draw)
    days = torch.sort(torch.randperm(365, generator=draw)[:DATES]).values
    green = torch.stack(
        [greenness(int(cover), days.float(), float(shift)) for cover, shift in zip(covers, shifts, strict=True)]
    )
    green = (green + 0.03 * torch.randn(green.shape, generator=draw)).clamp(0, 1)
    soil = torch.tensor(_SOIL) * (1 + 0.1 * torch.randn(count, 1, generator=draw))
    spectra = soil[:, None] + green[..., None] * (torch.tensor(_GREEN) - soil[:, None])  # (parcels, T, bands)
    series = spectra[parcels].permute(1, 2, 0).unflatten(2, (side, side))
    series = series * (1 + 0.08 * torch.randn(DATES, 1, 1, 1, generator=draw))
    series = series + 120 * torch.randn(series.shape, generator=draw)
    cloud = (torch.rand(DATES, generator=draw) < 0.3)[:, None, None].expand(DATES, side, side).clone()
    for date in torch.nonzero(torch.rand(DATES, generator=draw) < 0.5).flatten().tolist():
        middle, radius = (
            torch.rand(2, generator=draw) * side,
            side * (0.15 + 0.25 * float(torch.rand(1, generator=draw))),
        )
        cloud[date] |= ((places - middle).norm(dim=1) < radius).unflatten(0, (side, side))
    white = 6500 + 900 * torch.randn(DATES, 1, side, side, generator=draw)
    series = torch.where(cloud[:, None], white.expand(DATES, BANDS, side, side), series)
    return series, covers[parcels].unflatten(0, (side, side)), parcels.unflatten(0, (side, side)), days


def synthetic(folder: str | Path, seed: int = 0, train: int = 600, test: int = 80, side: int = SIDE) -> Path:
    """Write synthetic fields into a folder as PASTIS has them, and return it.

    Args:
        train: patches in folds 1 to 3. test: in fold 5; fold 4 has as many. side: of a patch, in pixels.
    """
    folder = Path(folder)
    for name in ("DATA_S2", "ANNOTATIONS"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    sums: dict[int, list[Any]] = {fold: [0, torch.zeros(BANDS), torch.zeros(BANDS)] for fold in range(1, 6)}
    start = datetime.date(2019, 1, 1)
    for place in range(train + 2 * test):
        fold = 1 + place % 3 if place < train else 4 if place < train + test else 5
        series, labels, parcels, days = make_patch(number(seed, place), side)
        patch = 10000 + place
        write_patch(folder, str(patch), series, labels, parcels)
        dates = {str(i): int((start + datetime.timedelta(int(day))).strftime("%Y%m%d")) for i, day in enumerate(days)}
        rows.append({"ID_PATCH": patch, "Fold": fold, "N_Parcel": int(parcels.max()) + 1, "dates-S2": dates})
        sums[fold][0] += series.numel() // BANDS
        sums[fold][1] += series.sum((0, 2, 3))
        sums[fold][2] += (series**2).sum((0, 2, 3))
    norms = {}
    for fold, (count, total, squares) in sums.items():
        mean = total / max(count, 1)
        spread = (squares / max(count, 1) - mean**2).clamp_min(1).sqrt()
        norms[f"Fold_{fold}"] = {"mean": mean.tolist(), "std": spread.tolist()}
    write_metadata(folder, rows, norms)
    return folder
