"""Pictures of scans with their boxes, from above and in perspective."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
from torch import Tensor

from polymix.domains.detect3d.rotated import corners
from polymix.train.data.drawing import save_figure
from polymix.train.data.scans.page import EDGES

TRUTH, PREDICTION = "#2a9d3a", "#d1495b"
GREYS = ("#a0a0a0", "#606060")  # of points: on a light and on a dark page
EYE, DOWN = (-22.0, 0.0, 12.0), 0.42  # where the perspective is seen from, metres; how far it looks down, radians
NEAR_PLANE = 2.0  # metres before the eye from which things are drawn


def seen(places: Any) -> tuple[Any, Any]:
    """Places (n, 3) in perspective: right and up (n, 2) as shares of the distance, and the distance (n,)."""
    x, y, z = (numpy.asarray(places, dtype=numpy.float64) - numpy.array(EYE)).T
    ahead, up = numpy.cos(DOWN) * x - numpy.sin(DOWN) * z, numpy.sin(DOWN) * x + numpy.cos(DOWN) * z
    return numpy.stack((-y, up), 1) / numpy.maximum(ahead, 1e-6)[:, None], ahead


def draw_scans(path: Path, rows: Sequence[tuple[Tensor, Tensor | None, Tensor]], space: Sequence[float]) -> None:
    """A picture with a row for each scan: points (n, 5), true boxes (m, 9) or None, and predicted ones."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    greys = LinearSegmentedColormap.from_list("greys", GREYS)
    figure = Figure(figsize=(12, 3.4 * len(rows) + 0.4), layout="constrained")
    grid = figure.subplots(len(rows), 2, squeeze=False)
    for (above, eye), (points, true, predicted) in zip(grid, rows, strict=True):
        xyz = points[:, :3].numpy()
        inside = ((xyz >= numpy.array(space[:3])) & (xyz < numpy.array(space[3:]))).all(1)
        xyz = xyz[inside]
        flat, far = seen(xyz)
        ahead = far > NEAR_PLANE
        above.scatter(xyz[:, 0], xyz[:, 1], s=0.3, c=xyz[:, 2], cmap=greys, vmin=-3, vmax=3, linewidths=0)
        eye.scatter(*flat[ahead].T, s=0.3, c=far[ahead], cmap=greys.reversed(), vmin=0, vmax=80, linewidths=0)
        for boxes, colour in ((true, TRUTH), (predicted, PREDICTION)):
            for eight in corners(boxes[:, :7]).numpy() if boxes is not None and len(boxes) else ():
                ground = eight[[0, 1, 2, 3, 0]]
                above.plot(ground[:, 0], ground[:, 1], color=colour, linewidth=0.9)
                front = numpy.stack(((eight[0] + eight[3]) / 2, eight[:4].mean(0)))
                above.plot(front[:, 0], front[:, 1], color=colour, linewidth=0.9)
                places, distances = seen(eight)
                if distances.min() > NEAR_PLANE:
                    for a, b in EDGES:
                        eye.plot(places[[a, b], 0], places[[a, b], 1], color=colour, linewidth=0.9)
        above.set_aspect("equal")
        above.set(xlim=(space[0], space[3]), ylim=(space[1], space[4]))
        eye.set_aspect("equal")
        eye.set(xlim=(-0.8, 0.8), ylim=(-0.35, 0.3))
        for axes in (above, eye):
            axes.set_axis_off()
    kinds = (("truth", TRUTH), ("prediction", PREDICTION)) if rows[0][1] is not None else (("prediction", PREDICTION),)
    figure.legend(handles=[Line2D([], [], color=colour, label=name) for name, colour in kinds],
                  loc="outside lower center", ncols=2, frameon=False, fontsize=8)  # fmt: skip
    save_figure(path, figure, dpi=120)
