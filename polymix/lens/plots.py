"""Plots of what the lens found, from plain numbers. Matplotlib is imported when the first plot is drawn."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polymix.extras import needs
from polymix.files import write_whole

STYLE: dict[str, Any] = {
    "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 150, "savefig.bbox": "tight",
    "legend.frameon": False, "image.interpolation": "nearest",
}  # fmt: skip
BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#9a9a9a"
_LABELLED = 48  # label every column up to this many


def _figure(width: float, height: float) -> Any:
    with needs("train"):
        from matplotlib.figure import Figure
    return Figure(figsize=(width, height), layout="constrained")


def _style() -> AbstractContextManager[Any]:
    with needs("train"):
        import matplotlib as mpl
    return mpl.rc_context(STYLE)


def _save(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda part: figure.savefig(part, format=path.suffix[1:] or "png"))
    return path


def _log(values: Tensor, reach: Tensor) -> Any:
    """log10 of the reached values; NaN, drawn blank, elsewhere."""
    return values.clamp_min(1e-300).log10().masked_fill(~reach | (values <= 0), torch.nan).numpy()


def _bounds(shown: Any) -> dict[str, float]:
    """The colour scale for log10 values: at least one decade, so that rounding errors do not fill it."""
    finite = torch.from_numpy(shown)
    finite = finite[finite.isfinite()]
    if not len(finite):
        return {"vmin": -1.0, "vmax": 0.0}
    top = float(finite.max())
    return {"vmin": min(float(finite.min()), top - 1), "vmax": top}


def draw_degree(
    path: Path, title: str, residual: Mapping[int, float], excess: Mapping[int, float], tolerance: float
) -> Path:
    """The error of the best fit by degree, with the rounding tolerance."""
    with _style():
        figure = _figure(5.6, 3.4)
        axes = figure.subplots()
        if residual:
            degrees = list(residual)
            errors = [max(residual[d], 1e-17) for d in degrees]
            axes.semilogy(degrees, errors, color=GREY, zorder=1)
            axes.scatter(degrees, errors, c=[BLUE if excess[d] <= 1 else ORANGE for d in degrees], zorder=2)
            axes.axhline(tolerance, color=GREY, linestyle="--", label="tolerance (measured rounding)")
            axes.legend()
        axes.set_xlabel("degree")
        axes.set_ylabel("error of the best fit,\nrelative to the output")
        axes.set_title(title, fontsize=10)
        return _save(figure, path)


def draw_interactions(path: Path, title: str, entries: Tensor, strength: Tensor, channels: int) -> Path:
    """Output tokens against the token tuples that reach them, and output channels against channel tuples.

    entries: (tuples, order), each token · channels + channel. strength: (tuples, output tokens, output channels),
        zero where a tuple does not reach the output.
    """
    token, channel = entries.div(channels, rounding_mode="floor"), entries % channels
    panels = (
        ("token", token, strength.amax(2)), ("channel", channel.sort(1).values, strength.amax(1)),
    )  # fmt: skip
    with _style():
        shapes, tables = [], []
        for _, index, size in panels:
            columns, place = index.unique(dim=0, return_inverse=True)
            table = torch.zeros(len(columns), size.shape[1], dtype=size.dtype)
            table.scatter_reduce_(0, place[:, None].expand_as(size), size, "amax")
            shapes.append(columns.tolist())
            tables.append(table.T)
        width = min(14.0, max(4.5, 1.8 + 0.26 * max(map(len, shapes))))
        heights = [1.2 + 0.24 * min(table.shape[0], 16) for table in tables]
        figure = _figure(width, sum(heights) + 0.6)
        for axes, (name, _, _), columns, table in zip(
            figure.subplots(2, 1, height_ratios=heights), panels, shapes, tables, strict=True
        ):
            shown = _log(table, table > 0)
            picture = axes.imshow(shown, aspect="auto", cmap="viridis", **_bounds(shown))
            figure.colorbar(picture, ax=axes, label="log₁₀ size")
            if len(columns) <= _LABELLED:
                axes.set_xticks(range(len(columns)), ["·".join(map(str, column)) for column in columns], rotation=90)
                axes.tick_params(axis="x", labelsize=8)
            else:
                axes.set_xticks([])
            axes.yaxis.get_major_locator().set_params(integer=True)
            axes.set_xlabel(f"{name} tuples of order {entries.shape[1]} ({len(columns):,})")
            axes.set_ylabel(f"output {name}")
        figure.suptitle(title, fontsize=10)
        return _save(figure, path)


def draw_receptive_field(
    path: Path, title: str, magnitude: Tensor, reach: Tensor, grid: tuple[int, ...], prefix: int
) -> Path:
    """Output tokens against input tokens; on a 2-D grid also a map of the tokens that reach the middle one."""
    flat = len(grid) == 2 and min(grid) > 1
    shown = _log(magnitude, reach)
    with _style():
        figure = _figure(9 if flat else 5, 4)
        panels = figure.subplots(1, 2 if flat else 1, squeeze=False)[0]
        picture = panels[0].imshow(shown, cmap="viridis", **_bounds(shown))
        panels[0].set(xlabel="input token", ylabel="output token", title=textwrap.fill(title, 48))
        panels[0].title.set_fontsize(9)
        if flat:
            row, column = (size // 2 for size in grid)
            middle = prefix + row * grid[1] + column
            panels[1].imshow(shown[middle, prefix:].reshape(grid), cmap="viridis", **_bounds(shown))
            panels[1].plot(column, row, marker="s", markersize=9, fillstyle="none", color=ORANGE)
            panels[1].set_title(f"what reaches row {row}, column {column}", fontsize=9)
        for axes in panels:
            for axis in (axes.xaxis, axes.yaxis):
                axis.get_major_locator().set_params(integer=True)
        figure.colorbar(picture, ax=list(panels), label="log₁₀ ‖∂y/∂x‖")
        return _save(figure, path)


def draw_equivariance(path: Path, errors: Mapping[str, float | None], tolerance: float) -> Path:
    """The error of each symmetry, None where nothing could be compared, with the tolerance."""
    with _style():
        figure = _figure(6, 2.2)
        axes = figure.subplots()
        for place, error in enumerate(errors.values()):
            if error is None:
                axes.text(2e-17, place, "nothing to compare", va="center", color=GREY)
            else:
                axes.barh(place, max(error, 1e-16), left=1e-17, color=BLUE if error <= tolerance else ORANGE)
        axes.axvline(tolerance, color=GREY, linestyle="--", label="tolerance")
        axes.set(xscale="log", xlim=(1e-17, 10), xlabel="error relative to the output (blue: equivariant)")
        axes.set_yticks(range(len(errors)), list(errors))
        axes.set_ylim(len(errors) - 0.4, -0.6)
        axes.legend(loc="lower right")
        return _save(figure, path)


def draw_contextual_mapping(path: Path, title: str, nearest: Tensor, tolerance: float) -> Path:
    """A histogram of each output row's distance to its nearest neighbour."""
    with _style():
        figure = _figure(5.6, 3.2)
        axes = figure.subplots()
        logs = nearest.clamp_min(tolerance / 100).log10()
        axes.hist(logs.numpy(), bins=40, color=BLUE)
        axes.axvline(math.log10(tolerance), color=ORANGE, linestyle="--", label="rows left of this line coincide")
        axes.set(xlabel="log₁₀ distance from an output row to the nearest other row", ylabel="rows")
        axes.set_title(title, fontsize=10)
        axes.legend()
        return _save(figure, path)


class InfluenceRow(NamedTuple):
    """One model's row of `draw_influence`.

    title: the mixer and its name in the model. image: the input. maps: by kind ("jacobian", "gradient", "attention"),
    each of the grid's shape. titles: of the maps. place: the chosen token's index on the grid, negative for a prefix
    token.
    """

    title: str
    image: Tensor
    maps: Mapping[str, Tensor]
    titles: Mapping[str, str]
    place: int


def draw_influence(path: Path, rows: Sequence[InfluenceRow]) -> Path:
    """A row for each model: the input, then its maps with the chosen token marked."""
    kinds = list(dict.fromkeys(kind for row in rows for kind in row.maps))
    with _style():
        figure = _figure(2.6 * (len(kinds) + 1), 2.7 * len(rows))
        for line, row in zip(figure.subplots(len(rows), len(kinds) + 1, squeeze=False), rows, strict=True):
            _draw_input(line[0], row)
            for axes, kind in zip(line[1:], kinds, strict=True):
                if kind not in row.maps:
                    axes.axis("off")
                    continue
                values = row.maps[kind]
                size = float(values.abs().max()) or 1.0
                signed = {"cmap": "RdBu_r", "vmin": -size, "vmax": size}
                colours = signed if kind == "gradient" else {"cmap": "viridis", "vmin": 0, "vmax": size}
                picture = axes.imshow(_image(values), **colours)
                figure.colorbar(picture, ax=axes, shrink=0.8)
                if kind != "gradient" and row.place >= 0:
                    width = _image(values).shape[1]
                    place = divmod(row.place, width)[::-1]
                    axes.plot(*place, "s", markersize=10, fillstyle="none", color=ORANGE)
                axes.set_title(row.titles[kind], fontsize=9)
                axes.set(xticks=[], yticks=[])
        return _save(figure, path)


def _image(values: Tensor) -> Any:
    """A map with one, two or three axes as a 2-D array."""
    return values.reshape(values.shape[0], -1).numpy() if values.ndim > 1 else values.unsqueeze(0).numpy()


def _draw_input(axes: Any, row: InfluenceRow) -> None:
    axes.set(xticks=[], yticks=[])
    axes.set_title(row.title, fontsize=9)
    x = row.image
    if x.ndim != 3:
        axes.axis("off")
        return
    x = (x - x.min()) / (x.max() - x.min()).clamp_min(1e-12)
    axes.imshow((x[:3].movedim(0, -1) if x.shape[0] >= 3 else x[0]).numpy(), cmap="gray")
