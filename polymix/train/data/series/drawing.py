"""Pictures of forecasts beside what was observed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from polymix.train.data.drawing import save_figure

YEARS = (1000, 9000)  # drawn as dates: matplotlib knows 1 to 9999, and adds margins
PASTS = 3  # horizons of the past that a panel shows


def middle(forecast: Tensor) -> Tensor:
    """The median (…) of forecasts (…, Q), or the one forecast there is."""
    return forecast[..., forecast.shape[-1] // 2]


def draw_forecasts(path: Path, panels: Sequence[tuple[str, Tensor, Tensor, Any]], context: int, horizon: int) -> None:
    """Panels of a title, what was observed (C or C + H), a forecast (H, Q), and the times of both or None."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.7 * len(panels)), layout="constrained")
    first = max(0, context - PASTS * horizon)
    for axes, (title, seen, output, times) in zip(
        figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True
    ):
        steps = list(range(-context, horizon)) if times is None or not _drawable(times) else times.tolist()
        past, future = steps[first : len(seen)], steps[context : context + horizon]
        if output.shape[-1] > 1:
            axes.fill_between(future, output[:, 0].tolist(), output[:, -1].tolist(), alpha=0.3, color="#00a0b0",
                              linewidth=0, label="80 % band")  # fmt: skip
        axes.plot(past, seen[first:].tolist(), color="#757575", linewidth=1, label="observed")
        axes.plot(future, middle(output).tolist(), color="#00a0b0", linewidth=1.5, label="forecast")
        axes.set_title(title, fontsize=8, loc="left")
        axes.tick_params(labelsize=7)
    figure.axes[0].legend(fontsize=7, frameon=False, loc="upper left", labelcolor="#757575")
    save_figure(path, figure)


def _drawable(times: Any) -> bool:
    years = times.astype("datetime64[Y]").astype(int) + 1970
    return bool(YEARS[0] <= years.min() and years.max() <= YEARS[1])
