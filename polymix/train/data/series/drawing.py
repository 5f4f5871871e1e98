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


def draw_anomalies(
    path: Path,
    panels: Sequence[tuple[str, Tensor, Tensor, list[tuple[int, int]], list[tuple[int, int]], int]],
) -> None:
    """Panels: a title, what was observed (T), its forecast (T), the runs found, those labelled, and the first step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.7 * len(panels)), layout="constrained")
    for axes, (title, seen, output, found, labelled, first) in zip(
        figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True
    ):
        steps = range(first, first + len(seen))
        axes.plot(steps, output.tolist(), color="#00a0b0", linewidth=1, alpha=0.7, label="forecast")
        axes.plot(steps, seen.tolist(), color="#757575", linewidth=1, label="observed")
        for runs, low, high, colour, name in (
            (found, 0.0, 1.0, "#d1495b", "found"), (labelled, 0.0, 0.05, "#202020", "labelled"),
        ):  # fmt: skip
            for place, (begin, end) in enumerate(runs):
                axes.axvspan(first + begin, first + end, low, high, color=colour, linewidth=0,
                             alpha=0.25 if high == 1 else 1, label=name if not place else None)  # fmt: skip
        axes.set_title(title, fontsize=8, loc="left")
        axes.tick_params(labelsize=7)
    handles = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), fontsize=7, frameon=False, loc="outside upper right", ncols=4,
                  labelcolor="#757575")  # fmt: skip
    save_figure(path, figure)


def draw_classes(path: Path, panels: Sequence[tuple[str, bool, Any]]) -> None:
    """Panels of a title, whether it is right, and a series (V, T)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.3 * ((len(panels) + 1) // 2)), layout="constrained")
    grid = figure.subplots((len(panels) + 1) // 2, 2, squeeze=False).flat
    for axes in grid:
        axes.set_axis_off()
    for axes, (title, right, values) in zip(figure.axes, panels, strict=False):
        axes.set_axis_on()
        for line in values.tolist():
            axes.plot(line, linewidth=1, alpha=0.8)
        axes.set_title(title, fontsize=8, loc="left", color="#202020" if right else "#d1495b")
        axes.tick_params(labelsize=7)
    save_figure(path, figure)


def _drawable(times: Any) -> bool:
    years = times.astype("datetime64[Y]").astype(int) + 1970
    return bool(YEARS[0] <= years.min() and years.max() <= YEARS[1])
