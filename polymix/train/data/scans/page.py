"""A page in which one can turn a cloud of points: its classes and boxes, true and predicted, in one HTML file."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy

from polymix.errors import MissingExtraError
from polymix.extras import needs
from polymix.files import write_whole

MAX_POINTS = 200_000  # of a page; of larger clouds every nth is drawn
EDGES = ((0, 1), (1, 2), (2, 3), (3, 0), (4, 5), (5, 6), (6, 7), (7, 4), (0, 4), (1, 5), (2, 6), (3, 7))
GREY = "#8a8f98"
OWN = "own"  # in place of a class's colour: each point has that of the scene
EYE = (-0.9, -0.9, 0.7)  # from where a scene is first seen
# The page may load nothing. The library compiles its shaders' bindings, which needs 'unsafe-eval'.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval' blob:; style-src 'unsafe-inline'; "
    "img-src data: blob:; worker-src blob:; font-src data:"
)
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}"><title>{title}</title>
<style>html, body {{ margin: 0; height: 100%; font: 15px/1.4 system-ui, sans-serif; background: #fff; color: #1d2129; }}
body {{ display: flex; flex-direction: column; }} p {{ margin: 0.5rem 1rem; }}
main {{ flex: 1; min-width: 0; min-height: 0; overflow: hidden; }}</style>
</head><body><p>{sentence}</p><main>{figure}</main></body></html>
"""


@dataclass(frozen=True)
class Colouring:
    """Classes of the points (n,), and for each class that is shown its name and colour; OWN: the points' own ones."""

    classes: Any
    legend: Mapping[int, tuple[str, str]]


@dataclass(frozen=True)
class Boxes:
    """Corners (m, 8, 3), as `polymix.domains.detect3d.rotated.corners` returns them, a name for each, and a colour."""

    corners: Any
    names: Sequence[str]
    colour: str


@dataclass(frozen=True)
class Scene:
    """A cloud (n, 3 or more), the ways of colouring it by name, sets of boxes by name, the points' own colours as bytes
    (n, 3), and from where it is first seen.
    """

    points: Any
    colourings: Mapping[str, Colouring] = field(default_factory=dict)
    boxes: Mapping[str, Boxes] = field(default_factory=dict)
    colours: Any = None
    eye: tuple[float, float, float] = EYE


class Pages:
    """Writes pages where plotly is installed; otherwise none, which is said once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say, self.possible = say, True

    def write(self, path: Path, scene: Scene, title: str) -> list[Path]:
        """The path of the page; nothing without plotly."""
        try:
            return [write_page(path, scene, title)] if self.possible else []
        except MissingExtraError as error:
            self.possible = False
            self.say(f"No page in which a scan turns, {path.name}: {error}")
            return []


def write_page(path: Path, scene: Scene, title: str) -> Path:
    """Write the page of a scene, about 5 MB, which needs no network. Returns its path.

    Dragging turns the cloud, the wheel or two fingers come nearer. Buttons choose the colouring; a click in the legend
    hides a class or a set of boxes. Clouds of more than `MAX_POINTS` points are thinned evenly, and the page says so.
    """
    with needs("scans", "The page turns the scan with it."):
        from plotly import graph_objects

    points = numpy.asarray(scene.points)[:, :3].astype(numpy.float32)
    step = -(-len(points) // MAX_POINTS) or 1
    shown = points[::step]
    figure = graph_objects.Figure()
    owners: list[str | None] = []  # of each trace: the colouring that shows it, or None for boxes
    for name, colouring in scene.colourings.items():
        classes = numpy.asarray(colouring.classes)[::step]
        for k, (label, colour) in colouring.legend.items():
            if len(part := shown[classes == k]):
                paint = colour if colour != OWN else _painted(numpy.asarray(scene.colours)[::step][classes == k])
                figure.add_trace(_points(graph_objects, part, label, paint, name == next(iter(scene.colourings))))
                owners.append(name)
    if not scene.colourings:
        figure.add_trace(_points(graph_objects, shown, "points", GREY, True))
        owners.append(None)
    for name, boxes in scene.boxes.items():
        figure.add_trace(_lines(graph_objects, name, boxes))
        owners.append(None)
    names = list(scene.colourings)
    buttons = [
        {"label": name, "method": "restyle", "args": ["visible", [owner in (name, None) for owner in owners]]}
        for name in names
    ]
    figure.update_layout(
        margin={"l": 0, "r": 0, "t": 0, "b": 0}, showlegend=True, template="none",
        legend={"x": 0, "y": 0, "bgcolor": "rgba(255,255,255,0.7)", "itemsizing": "constant"},
        scene={"aspectmode": "data", **{f"{axis}axis": {"visible": False} for axis in "xyz"},
               "camera": {"eye": dict(zip("xyz", scene.eye, strict=True))}},
        updatemenus=[{"type": "buttons", "direction": "right", "x": 0, "xanchor": "left", "y": 1, "yanchor": "top",
                      "buttons": buttons}] if len(buttons) > 1 else [],
    )  # fmt: skip
    drawn = figure.to_html(full_html=False, include_plotlyjs=True, default_height="100%",
                           config={"displaylogo": False, "responsive": True, "scrollZoom": True,
                                   "modeBarButtonsToRemove": ["sendChartToCloud"]})  # fmt: skip
    thinned = "" if step == 1 else f", one in {step} of them drawn"
    sentence = f"{html.escape(title)}: {len(points):,} points{thinned}. Drag to turn, scroll or pinch to come nearer."
    write_whole(path, PAGE.format(policy=POLICY, title=html.escape(title), sentence=sentence, figure=drawn))
    return path


def _painted(colours: Any) -> list[str]:
    """Colours (n, 3) of bytes in the words of a page."""
    return [f"#{red:02x}{green:02x}{blue:02x}" for red, green, blue in colours.tolist()]


def _points(library: Any, points: Any, name: str, colour: str | list[str], visible: bool) -> Any:
    x, y, z = points.T
    marker = {"size": 1.6, "color": colour}
    return library.Scatter3d(x=x, y=y, z=z, mode="markers", name=name, marker=marker, visible=visible,
                             hoverinfo="name")  # fmt: skip


def _lines(library: Any, name: str, boxes: Boxes) -> Any:
    """All edges of all boxes as one line with gaps."""
    places, texts = [], []
    for eight, label in zip(numpy.asarray(boxes.corners, dtype=numpy.float32), boxes.names, strict=True):
        for a, b in EDGES:
            places += [eight[a], eight[b], numpy.full(3, numpy.nan, numpy.float32)]
            texts += [label] * 3
    x, y, z = numpy.array(places, dtype=numpy.float32).reshape(-1, 3).T
    line = {"color": boxes.colour, "width": 4}
    return library.Scatter3d(x=x, y=y, z=z, mode="lines", name=name, line=line, text=texts, hoverinfo="text")
