"""Forecasts that nothing is trained for: naive, seasonal naive and exponential smoothing, of many series at once."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

LEVEL_RATES, SEASON_RATES = (0.05, 0.2, 0.5, 0.9), (0.0, 0.1, 0.4)  # of smoothing; each series takes the best pair


def naive(past: Tensor, observed: Tensor, horizon: int, season: int = 1) -> Tensor:
    """The last value observed at the same point of the season (…, H) of past (…, C); without one, 0.

    A season that is longer than the past counts as one step.
    """
    season = season if season <= past.shape[-1] else 1
    last = torch.zeros(*past.shape[:-1], season, dtype=past.dtype)
    for first in range(past.shape[-1] % season, past.shape[-1], season):
        here = slice(first, first + season)
        last = torch.where(observed[..., here], past[..., here], last)
    return last[..., torch.arange(horizon) % season]


def smoothing(past: Tensor, observed: Tensor, horizon: int, season: int) -> Tensor:
    """Simple exponential smoothing (…, H) with an additive season where the past (…, C) has two of them.

        e_t = y_t − l_{t−1} − s_{t−m},   l_t = l_{t−1} + α e_t,   s_t = s_{t−m} + γ e_t

    Of a grid of α and γ each series takes the pair with the least squares of e; what is not observed has e = 0.
    """
    rates = list(product(LEVEL_RATES, SEASON_RATES if 1 < season <= past.shape[-1] // 2 else (0.0,)))
    season = season if len(rates) > len(LEVEL_RATES) else 1
    alpha, gamma = (torch.tensor(part).view(-1, *[1] * (past.dim() - 1)) for part in zip(*rates, strict=True))
    start, seen = past[..., : 2 * season], observed[..., : 2 * season]
    count = seen.sum(-1, keepdim=True).clamp_min(1)
    first = (start * seen).sum(-1, keepdim=True) / count
    level = first[..., 0].expand(len(rates), *past.shape[:-1])
    around = ((start - first) * seen).unflatten(-1, (2, season)).sum(-2) if past.shape[-1] > 1 else 0 * past
    cycle = around / seen.unflatten(-1, (2, season)).sum(-2).clamp_min(1) if past.shape[-1] > 1 else around
    cycle = (cycle * (season > 1)).expand(len(rates), *cycle.shape).clone()
    squares = torch.zeros_like(level)
    for step in range(past.shape[-1]):
        error = (past[..., step] - level - cycle[..., step % season]) * observed[..., step]
        level, squares = level + alpha * error, squares + error**2
        cycle[..., step % season] += gamma * error
    ahead = (past.shape[-1] + torch.arange(horizon)) % season
    best = squares.argmin(0)[None, ..., None].expand(1, *past.shape[:-1], horizon)
    return (level[..., None] + cycle[..., ahead]).gather(0, best)[0]
