"""A virtual LiDAR: 32 beams that turn through streets of boxes, cylinders and ellipsoids, with exact labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy
from numpy.random import Generator

BEAMS, TURNS = 32, 480
HEIGHT, REACH = 1.8, 40.0  # of the sensor above the road, and how far it sees, in metres
NOISE, LOST = 0.02, 0.05  # of the range in metres; share of the returns that are lost
ROAD, KERB = 4.0, 0.15  # half the road's width, and the pavement's height
# SemanticKITTI's numbers, and how much of the light each reflects.
SURFACES = {"road": (40, 0.2), "sidewalk": (48, 0.35), "building": (50, 0.5), "car": (10, 0.7), "person": (30, 0.45),
            "pole": (80, 0.9), "vegetation": (70, 0.3), "truck": (18, 0.7)}  # fmt: skip
_NAMES = tuple(SURFACES)
DARK, BRIGHT = 0.3, 0.7  # what houses and cars reflect where the two are compared


class Solid(NamedTuple):
    """A box, cylinder or ellipsoid: its centre, half its sides, its turn about the vertical axis, and its surface.

    shine: how much of the light it reflects; None: as its surface.
    """

    kind: str
    centre: tuple[float, float, float]
    half: tuple[float, float, float]
    yaw: float
    surface: str
    shine: float | None = None


def street(rng: Generator, question: str = "what") -> list[Solid]:
    """Houses, cars, persons, poles and trees along a straight road in the direction of x, as `Streets` asks."""
    solids = []
    for side in (-1, 1):
        x = -REACH
        while x < REACH:
            width, deep, high = rng.uniform(6, 14), rng.uniform(4, 8), rng.uniform(4, 10)
            y = side * (ROAD + rng.uniform(3.5, 6) + deep / 2)
            solids.append(Solid("box", (x + width / 2, y, high / 2), (width / 2, deep / 2, high / 2), 0.0, "building"))
            x += width + rng.uniform(0.5, 6)
        for _ in range(rng.integers(2, 5)):
            place = (rng.uniform(-25, 25), side * (ROAD - rng.uniform(1.0, 1.6)), 0.75)
            solids.append(Solid("box", place, (2.1, 0.9, 0.75), rng.normal(0, 0.1), "car"))
        for surface, count in (("person", rng.integers(2, 6)), ("pole", rng.integers(2, 5))):
            for _ in range(count):
                high, wide = (0.87, 0.3) if surface == "person" else (rng.uniform(2, 3.5), 0.1)
                place = (rng.uniform(-22, 22), side * (ROAD + rng.uniform(0.5, 3)), KERB + high)
                solids.append(Solid("cylinder", place, (wide, wide, high), 0.0, surface))
        for _ in range(rng.integers(1, 4)):
            x, y, wide = rng.uniform(-25, 25), side * (ROAD + rng.uniform(1, 3)), rng.uniform(1, 1.8)
            solids.append(Solid("ellipsoid", (x, y, KERB + 3.2), (wide, wide, 1.4), 0.0, "vegetation"))
            solids.append(Solid("cylinder", (x, y, KERB + 1), (0.15, 0.15, 1.0), 0.0, "vegetation"))
    return solids if question == "what" else compared(solids, rng, question)


def compared(solids: Sequence[Solid], rng: Generator, question: str) -> list[Solid]:
    """The same street with houses of one brightness, which decide whether its cars are cars or trucks.

    Neither a car's brightness nor its place tells anything, and the houses are metres away. same: cars are dark or
    bright, and one unlike the houses is a truck. houses: where they are dark, all are trucks.
    """
    houses, told = rng.choice((DARK, BRIGHT)), []
    for solid in solids:
        if solid.surface == "building":
            solid = solid._replace(shine=houses)
        elif solid.surface == "car":
            shine = rng.choice((DARK, BRIGHT)) if question == "same" else BRIGHT
            solid = solid._replace(shine=shine, surface="car" if shine == houses else "truck")
        told.append(solid)
    return told


def scan(rng: Generator, question: str = "what") -> tuple[Any, Any]:
    """One scan of a new street: float32 (n, 4) of x, y, z and reflectivity, and uint32 labels of SemanticKITTI.

    The origin is the sensor. In the labels' high bits stands the number of the solid, as an instance.
    """
    solids = street(rng, question)
    points, labels, _ = cast(rng, solids, (0.0, rng.uniform(-1.5, 1.5), HEIGHT))
    return points, labels


def cast(rng: Generator, solids: Sequence[Solid], sensor: Any) -> tuple[Any, Any, Any]:
    """One turn of a LiDAR at `sensor`: points and labels as `scan` has them, and the solid of each point.

    Points are in the directions of the street, from the sensor. Solids count from 1; the ground is 0.
    """
    up, round_ = numpy.meshgrid(numpy.radians(numpy.linspace(-24, 8, BEAMS)),
                                numpy.arange(TURNS) * 2 * numpy.pi / TURNS, indexing="ij")  # fmt: skip
    rays = numpy.stack([numpy.cos(up) * numpy.cos(round_), numpy.cos(up) * numpy.sin(round_), numpy.sin(up)], -1)
    rays = rays.reshape(-1, 3)
    sensor = numpy.array(sensor)
    with numpy.errstate(divide="ignore", invalid="ignore"):
        far = numpy.where(rays[:, 2] < 0, -sensor[2] / rays[:, 2], numpy.inf)
        across = sensor[1] + far * rays[:, 1]
        high = numpy.where(rays[:, 2] < 0, (KERB - sensor[2]) / rays[:, 2], numpy.inf)
    off = ~(numpy.abs(across) < ROAD)
    nearest = numpy.where(off, high, far)
    surface = numpy.where(off, _NAMES.index("sidewalk"), _NAMES.index("road"))
    shares = numpy.array([share for _, share in SURFACES.values()])
    shine = shares[surface]
    instance = numpy.zeros(len(rays), dtype=numpy.uint32)
    for number, solid in enumerate(solids, 1):
        hit = _distance(sensor, rays, solid)
        closer = hit < nearest
        nearest = numpy.where(closer, hit, nearest)
        place = _NAMES.index(solid.surface)
        surface = numpy.where(closer, place, surface)
        shine = numpy.where(closer, shares[place] if solid.shine is None else solid.shine, shine)
        instance = numpy.where(closer, number, instance)
    seen = (nearest < REACH) & (rng.random(len(rays)) >= LOST)
    ranges = nearest[seen] + rng.normal(0, NOISE, seen.sum())
    shine = shine[seen] + rng.normal(0, 0.05, seen.sum())
    points = numpy.concatenate([rays[seen] * ranges[:, None], shine.clip(0, 1)[:, None]], 1).astype(numpy.float32)
    raw = numpy.array([number for number, _ in SURFACES.values()], dtype=numpy.uint32)[surface[seen]]
    return points, raw | (instance[seen].astype(numpy.uint32) << 16), instance[seen]


def _distance(sensor: Any, rays: Any, solid: Solid) -> Any:
    """How far each ray goes until it meets the solid; infinity where it does not."""
    cos, sin = numpy.cos(solid.yaw), numpy.sin(solid.yaw)
    turn = numpy.array([[cos, sin, 0], [-sin, cos, 0], [0, 0, 1]])
    half = numpy.array(solid.half)
    start, way = turn @ (sensor - numpy.array(solid.centre)) / half, rays @ turn.T / half  # the solid is of size one
    with numpy.errstate(divide="ignore", invalid="ignore"):
        if solid.kind == "ellipsoid":
            low, high = _roots((way**2).sum(1), way @ start, (start**2).sum() - 1)
        else:
            sides = [0, 1, 2] if solid.kind == "box" else [2]
            ends = numpy.stack([(-1 - start[sides]) / way[:, sides], (1 - start[sides]) / way[:, sides]])
            low, high = ends.min(0).max(1), ends.max(0).min(1)
            if solid.kind == "cylinder":
                flat = way[:, :2]
                near, away = _roots((flat**2).sum(1), flat @ start[:2], (start[:2] ** 2).sum() - 1)
                low, high = numpy.maximum(low, near), numpy.minimum(high, away)
    return numpy.where((low < high) & (low > 0), low, numpy.inf)


def _roots(a: Any, b: Any, c: float) -> tuple[Any, Any]:
    """The two solutions of a t² + 2 b t + c = 0; not a number where there is none."""
    root = numpy.sqrt(b * b - a * c)
    return (-b - root) / a, (-b + root) / a
