"""What a forecast must beat: naive, seasonal naive, exponential smoothing, and a linear map fitted by least squares."""

from __future__ import annotations

import torch
from torch import Tensor

from polymix.train.data.series.baselines import naive, smoothing
from polymix.train.data.series.windows import Window, Windows, level_and_width
from polymix.train.data.splits import spread

FIT_WINDOWS = 4000  # of the training, to which the linear map is fitted
RIDGES = (1e-4, 1e-2, 1e-1, 1.0)  # of which the validation part chooses one


def linear(train: Windows, validation: Windows, window: Window) -> Tensor:
    """The best linear map (B, V, H) of the normed past, which DLinear's two layers are together, by ridge regression.

    Fitted in closed form to the training windows; the validation part chooses the ridge.
    """
    inputs, outputs = _normed(train)
    choose, right = _normed(validation if len(validation) else train)
    gram, cross = inputs.t() @ inputs, inputs.t() @ outputs
    eye = len(inputs) * torch.eye(inputs.shape[1], dtype=inputs.dtype)
    maps = [torch.linalg.solve(gram + ridge * eye, cross) for ridge in RIDGES]
    weight = min(maps, key=lambda one: float((choose @ one - right).abs().mean()))
    past, observed = (part[..., : train.context] for part in (window.values, window.observed))
    level, width = level_and_width(past, observed)
    return ((past - level) / width * observed) @ weight.to(past.dtype) * width + level


def _normed(windows: Windows) -> tuple[Tensor, Tensor]:
    """Past (n, C) and future (n, H) of a part's windows, normed as the models see them; what is missing is 0."""
    batch = windows.batch(spread(len(windows), FIT_WINDOWS))
    level, width = level_and_width(batch.values[..., : windows.context], batch.observed[..., : windows.context])
    normed = ((batch.values - level) / width * batch.observed).flatten(0, 1).double()
    whole = batch.observed[..., windows.context :].any(-1).flatten()
    return normed[whole, : windows.context], normed[whole, windows.context :]


def forecasts(train: Windows, validation: Windows, windows: Windows, window: Window) -> dict[str, Tensor]:
    """Each control's forecast (n, V, H) of all windows. window: all of them as a batch."""
    horizon = windows.horizon
    past, observed = (part[..., : windows.context] for part in (window.values, window.observed))
    seasons = [windows.season(place) for place in range(len(windows))]
    result = {"naive": naive(past, observed, horizon), "linear": linear(train, validation, window)}
    for name, method in (("seasonal", naive), ("smoothing", smoothing)):
        result[name] = torch.zeros_like(result["naive"])
        for season in sorted(set(seasons)):
            mine = torch.tensor([own == season for own in seasons])
            result[name][mine] = method(past[mine], observed[mine], horizon, season)
    return result
