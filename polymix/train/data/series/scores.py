"""How good forecasts are: the loss of quantiles, errors in units of the seasonal naive forecast's, coverage."""

from __future__ import annotations

import torch
from torch import Tensor

from polymix.train.data.series.drawing import middle
from polymix.train.data.series.windows import Window

LEVELS = tuple(level / 10 for level in range(1, 10))  # the quantiles
BAND = 0.8  # what the quantiles 0.1 and 0.9 have between them


def pinball(forecast: Tensor, truth: Tensor) -> Tensor:
    """The loss of each quantile q, max(q (y − f), (q − 1) (y − f)), of forecasts (…, Q) and truth (…)."""
    levels = torch.tensor(LEVELS if forecast.shape[-1] > 1 else (0.5,), device=forecast.device)
    error = truth[..., None] - forecast
    return torch.maximum(levels * error, (levels - 1) * error)


def scores(forecast: Tensor, window: Window) -> dict[str, float]:
    """What is measured of forecasts (B, V, H, Q), over the futures that were observed.

    mase: mean |error| over that of the seasonal naive forecast in the training part. crps: twice the mean pinball loss
    over the quantiles, scaled alike; of one forecast it is its mase. mse, mae: of values that are standardised by the
    training part. coverage_error: how far from 80 % the share is that lies in the band.
    """
    horizon = forecast.shape[2]
    truth, seen = window.values[..., -horizon:], window.observed[..., -horizon:]
    error = (middle(forecast) - truth).abs()
    scale = window.scale[..., None].expand_as(error)
    scaled = seen & scale.isfinite()
    result = {
        "mase": _mean(error / scale, scaled), "crps": _mean(2 * pinball(forecast, truth).mean(-1) / scale, scaled),
        "mae": _mean(error, seen), "mse": _mean(error**2, seen),
    }  # fmt: skip
    if forecast.shape[-1] > 1:
        inside = (truth >= forecast[..., 0]) & (truth <= forecast[..., -1])
        result["coverage_error"] = abs(_mean(inside.float(), seen) - BAND)
    return result


def _mean(values: Tensor, chosen: Tensor) -> float:
    """The mean of those that are chosen; 0 of none, as where every series is constant."""
    return values[chosen].double().mean().item() if chosen.any() else 0.0
