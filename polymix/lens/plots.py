"""The pictures of the lens. Matplotlib is loaded when the first one is drawn; nothing else here needs it."""

from __future__ import annotations

import textwrap
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polymix.errors import MissingExtraError

if TYPE_CHECKING:
    from polymix.lens.contextual import ContextualMapping
    from polymix.lens.degree import DegreeResult
    from polymix.lens.equivariance import Equivariance
    from polymix.lens.field import ReceptiveField
    from polymix.lens.influence import Influence
    from polymix.lens.interactions import Interactions

STYLE: dict[str, Any] = {
    "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 150, "savefig.bbox": "tight",
    "legend.frameon": False, "image.interpolation": "nearest",
}  # fmt: skip
BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#9a9a9a"
_LABELLED = 48  # columns up to which each is named


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("matplotlib", "no such package", "pip install 'polymix[train]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def _style() -> AbstractContextManager[Any]:
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise MissingExtraError("matplotlib", "no such package", "pip install 'polymix[train]'") from error
    return mpl.rc_context(STYLE)


def _save(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}")  # a name that ends alike still: the format is read off it
    figure.savefig(part)
    part.replace(path)
    return path


def _log(values: Tensor, reach: Tensor) -> Any:
    """log10 of what is there, NaN, which shows blank, elsewhere."""
    return values.clamp_min(1e-300).log10().masked_fill(~reach | (values <= 0), torch.nan).numpy()


def _bounds(shown: Any) -> dict[str, float]:
    """The colour scale of log10 values: at least a decade wide, so that rounding does not fill it."""
    found = torch.from_numpy(shown)
    found = found[found.isfinite()]
    if not len(found):
        return {"vmin": -1.0, "vmax": 0.0}
    top = float(found.max())
    return {"vmin": min(float(found.min()), top - 1), "vmax": top}


def draw_degree(result: DegreeResult, path: Path) -> Path:
    """The error of the best fit of each degree, beside what rounding allows."""
    with _style():
        figure = _figure(5.6, 3.4)
        axes = figure.subplots()
        evidence = result.evidence
        if evidence.residual:
            degrees = list(evidence.residual)
            fits = [evidence.excess[d] <= 1 for d in degrees]
            errors = [max(evidence.residual[d], 1e-17) for d in degrees]
            axes.semilogy(degrees, errors, color=GREY, zorder=1)
            axes.scatter(degrees, errors, c=[BLUE if ok else ORANGE for ok in fits], zorder=2)
            axes.axhline(evidence.tolerance, color=GREY, linestyle="--", label="tolerance, from the measured rounding")
            axes.legend()
        axes.set_xlabel("degree")
        axes.set_ylabel("error of the best fit,\nrelative to the output")
        axes.set_title(str(result), fontsize=10)
        return _save(figure, path)


def draw_interactions(found: Interactions, path: Path) -> Path:
    """Output tokens (rows) against the token tuples (columns) that reach them; likewise output and input channels."""
    c = found.inputs[1]
    token, channel = found.entries.div(c, rounding_mode="floor"), found.entries % c
    strength = found.strength * found.reach
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
            axes.set_xlabel(f"{name} tuples of order {found.order} ({len(columns):,})")
            axes.set_ylabel(f"output {name}")
        where = f"token {found.output[0]}" + ("" if found.output[1] is None else f", channel {found.output[1]}")
        figure.suptitle(f"what reaches the outputs; {where}: {found.counts['tuples']} tuples", fontsize=10)
        return _save(figure, path)


def draw_field(field: ReceptiveField, path: Path) -> Path:
    """All tokens against all; on a grid of two axes the middle token's inputs as a map too."""
    flat = len(field.grid) == 2 and min(field.grid) > 1
    shown = _log(field.magnitude, field.reach)
    with _style():
        figure = _figure(9 if flat else 5, 4)
        panels = figure.subplots(1, 2 if flat else 1, squeeze=False)[0]
        picture = panels[0].imshow(shown, cmap="viridis", **_bounds(shown))
        panels[0].set(xlabel="input token", ylabel="output token", title=textwrap.fill(str(field), 48))
        panels[0].title.set_fontsize(9)
        if flat:
            row, column = (size // 2 for size in field.grid)
            middle = field.prefix + row * field.grid[1] + column
            panels[1].imshow(shown[middle, field.prefix :].reshape(field.grid), cmap="viridis", **_bounds(shown))
            panels[1].plot(column, row, marker="s", markersize=9, fillstyle="none", color=ORANGE)
            panels[1].set_title(f"what reaches row {row}, column {column}", fontsize=9)
        for axes in panels:
            for axis in (axes.xaxis, axes.yaxis):
                axis.get_major_locator().set_params(integer=True)
        figure.colorbar(picture, ax=list(panels), label="log₁₀ ‖∂y/∂x‖")
        return _save(figure, path)


def draw_equivariance(found: Equivariance, path: Path) -> Path:
    rows = {"permutation": found.permutation, "shift, circular": found.circular, "shift, interior": found.interior}
    with _style():
        figure = _figure(6, 2.2)
        axes = figure.subplots()
        for place, (_, verdict) in enumerate(rows.items()):
            if verdict.error is None:
                axes.text(2e-17, place, "nothing to compare", va="center", color=GREY)
            else:
                axes.barh(place, max(verdict.error, 1e-16), left=1e-17, color=BLUE if verdict.holds else ORANGE)
        axes.axvline(found.permutation.tolerance, color=GREY, linestyle="--", label="tolerance")
        axes.set(xscale="log", xlim=(1e-17, 10), xlabel="error relative to the output (blue: commutes)")
        axes.set_yticks(range(len(rows)), list(rows))
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.legend(loc="lower right")
        return _save(figure, path)


def draw_contextual(found: ContextualMapping, path: Path) -> Path:
    with _style():
        figure = _figure(5.6, 3.2)
        axes = figure.subplots()
        low = found.tolerance / 100
        logs = found.nearest.clamp_min(low).log10()
        axes.hist(logs.numpy(), bins=40, color=BLUE)
        limit = torch.tensor(found.tolerance).log10().item()
        axes.axvline(limit, color=ORANGE, linestyle="--", label="equal, left of this")
        axes.set(xlabel="log₁₀ distance of an output row to the nearest other", ylabel="rows")
        axes.set_title("no two rows coincide" if found.holds else "some rows coincide", fontsize=10)
        axes.legend()
        return _save(figure, path)


def draw_influence(found: Influence, path: Path) -> Path:
    """A row a model: the input, then its maps, the token that they are about marked."""
    rows = [found] + ([] if found.beside is None else [found.beside])
    kinds = list(dict.fromkeys(kind for row in rows for kind in row.maps))
    with _style():
        figure = _figure(2.6 * (len(kinds) + 1), 2.7 * len(rows))
        for line, row in zip(figure.subplots(len(rows), len(kinds) + 1, squeeze=False), rows, strict=True):
            _input(line[0], row)
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
                place = row.token - sum(part.numel() for part in list(row.prefix.values())[:1])
                if kind != "gradient" and place >= 0:
                    width = _image(values).shape[1]
                    axes.plot(place % width, place // width, "s", markersize=10, fillstyle="none", color=ORANGE)
                names = {
                    "jacobian": f"‖∂y/∂x‖ of token {row.token}",
                    "gradient": f"gradient × input, output {row.target}",
                    "attention": f"attention of token {row.token}",
                }
                axes.set_title(names[kind], fontsize=9)
                axes.set(xticks=[], yticks=[])
        return _save(figure, path)


def _image(values: Tensor) -> Any:
    """A map of one, two or three axes as a picture."""
    return values.reshape(values.shape[0], -1).numpy() if values.ndim > 1 else values.unsqueeze(0).numpy()


def _input(axes: Any, row: Influence) -> None:
    axes.set(xticks=[], yticks=[])
    axes.set_title(f"{row.mixer}, {row.module}", fontsize=9)
    x = row.image
    if x.ndim != 3:
        axes.axis("off")
        return
    x = (x - x.min()) / (x.max() - x.min()).clamp_min(1e-12)
    axes.imshow((x[:3].movedim(0, -1) if x.shape[0] >= 3 else x[0]).numpy(), cmap="gray")
