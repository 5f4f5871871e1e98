"""Pictures of scans with their boxes, from above and in perspective."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy

from polymix.train.data.drawing import save_figure
from polymix.train.data.scans.page import EDGES, Scene

TRUTH, PREDICTION = "#2a9d3a", "#d1495b"
GREYS = ("#a0a0a0", "#606060")  # of points: on a light and on a dark page
EYE, DOWN = (-22.0, 0.0, 12.0), 0.42  # where the perspective is seen from, metres; how far it looks down, radians
NEAR_PLANE = 2.0  # metres before the eye from which things are drawn


def seen(places: Any) -> tuple[Any, Any]:
    """Places (n, 3) in perspective: right and up (n, 2) as shares of the distance, and the distance (n,)."""
    x, y, z = (numpy.asarray(places, dtype=numpy.float64) - numpy.array(EYE)).T
    ahead, up = numpy.cos(DOWN) * x - numpy.sin(DOWN) * z, numpy.sin(DOWN) * x + numpy.cos(DOWN) * z
    return numpy.stack((-y, up), 1) / numpy.maximum(ahead, 1e-6)[:, None], ahead


def draw_scans(path: Path, scenes: Sequence[Scene], space: Sequence[float]) -> None:
    """A picture with a row for each scan; from above every box has its class beside it."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    greys = LinearSegmentedColormap.from_list("greys", GREYS)
    figure = Figure(figsize=(12, 3.4 * len(scenes) + 0.4), layout="constrained")
    grid = figure.subplots(len(scenes), 2, squeeze=False)
    for (above, eye), scene in zip(grid, scenes, strict=True):
        xyz = scene.points[:, :3].numpy()
        inside = ((xyz >= numpy.array(space[:3])) & (xyz < numpy.array(space[3:]))).all(1)
        xyz = xyz[inside]
        flat, far = seen(xyz)
        ahead = far > NEAR_PLANE
        above.scatter(xyz[:, 0], xyz[:, 1], s=0.3, c=xyz[:, 2], cmap=greys, vmin=-3, vmax=3, linewidths=0)
        eye.scatter(*flat[ahead].T, s=0.3, c=far[ahead], cmap=greys.reversed(), vmin=0, vmax=80, linewidths=0)
        for place, boxes in enumerate(scene.boxes.values()):
            for eight, name in zip(boxes.corners.numpy(), boxes.names, strict=True):
                ground = eight[[0, 1, 2, 3, 0]]
                above.plot(ground[:, 0], ground[:, 1], color=boxes.colour, linewidth=0.9)
                front = numpy.stack(((eight[0] + eight[3]) / 2, eight[:4].mean(0)))
                above.plot(front[:, 0], front[:, 1], color=boxes.colour, linewidth=0.9)
                edge, way = (eight[:4, 1].max(), "bottom") if place else (eight[:4, 1].min(), "top")
                above.text(eight[:4, 0].mean(), edge, name, color=boxes.colour, fontsize=5, ha="center", va=way,
                           clip_on=True)  # fmt: skip
                places, distances = seen(eight)
                if distances.min() > NEAR_PLANE:
                    for a, b in EDGES:
                        eye.plot(places[[a, b], 0], places[[a, b], 1], color=boxes.colour, linewidth=0.9)
        above.set_aspect("equal")
        above.set(xlim=(space[0], space[3]), ylim=(space[1], space[4]))
        eye.set_aspect("equal")
        eye.set(xlim=(-0.8, 0.8), ylim=(-0.35, 0.3))
        for axes in (above, eye):
            axes.set_axis_off()
    figure.legend(handles=[Line2D([], [], color=its.colour, label=name) for name, its in scenes[0].boxes.items()],
                  loc="outside lower center", ncols=2, frameon=False, fontsize=8)  # fmt: skip
    save_figure(path, figure, dpi=120)
