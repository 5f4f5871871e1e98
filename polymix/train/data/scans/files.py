"""Files of points and labels as they lie on disk: plain numbers, without a header."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy

from polymix.errors import DataError, reason_of
from polymix.files import regular
from polymix.limits import memory_of

COARSEST = 0.01  # metres by which stored coordinates may be rounded
KILOMETRE = 1000.0  # within so many metres of the origin float32 keeps a tenth of a millimetre
MAX_REMISSION = 2.0  # sensors are calibrated to 1, and some return a little more


def read_points(path: Path, columns: int = 4) -> Any:
    """float32 (n, columns): x, y, z, remission and more.

    Raises DataError for no points, numbers that are not finite, a length that is none of such points, coordinates that
    float32 rounds (`check_places`), and remissions (of four columns) that do not go from 0 to 1.
    """
    allowed = f"{4 * columns} bytes a point: x, y, z and {'remission' if columns == 4 else 'more'} in float32"
    points = sound(path, read_numbers(path, numpy.float32, 4 * columns, allowed).reshape(-1, columns))
    check_places(path, points[:, :3])
    if columns == 4:
        check_remission(path, points[:, 3])
    return points


def check_places(path: Path, places: Any) -> None:
    """Raise DataError where points (n, 3) lie so far away that the type of their metres has rounded off centimetres."""
    if places.dtype.kind != "f" or not len(places):
        return
    away = numpy.abs(places).min(0).max()  # of the nearest point, along the axis where that is the most
    if numpy.isfinite(away) and numpy.spacing(away) > COARSEST:
        step = float(numpy.spacing(away))
        got = f"{path}, {float(away):,.0f} m from the origin, where {places.dtype} has steps of {step:.2g} m"
        allowed = f"steps of at most {COARSEST:g} m"
        raise DataError("data", got, allowed, "Subtract an offset in float64 before the points are written.")


def check_remission(path: Path, values: Any) -> None:
    """Raise DataError for remissions in another unit than shares from 0 to 1, such as bytes."""
    if not (values.min(initial=0) >= -MAX_REMISSION and values.max(initial=0) <= MAX_REMISSION):
        got = f"{path} with a remission of {float(values.max()):g}"
        raise DataError("data", got, "shares from 0 to 1", "Divide it by the sensor's largest value, such as 255.")


def near(places: Any) -> Any:
    """Coordinates (n, 3) in metres as float32, of which centimetres survive.

    Axes that leave the first kilometre around the origin, as in a national grid, lose the whole kilometres before
    their smallest coordinate.
    """
    places = places.astype(numpy.float64)
    with numpy.errstate(invalid="ignore"):  # `sound` names numbers that are not finite
        kilometres = numpy.floor(places.min(0, initial=numpy.inf) / KILOMETRE) * KILOMETRE
        places = places - numpy.where(numpy.abs(places).max(0, initial=0) > KILOMETRE, kilometres, 0.0)
    return places.astype(numpy.float32)


def sound(path: Path, points: Any) -> Any:
    """The points of a file. Raises DataError if there are none, or a number is not finite."""
    if not len(points):
        raise DataError("data", f"{path} without points", "one point or more", "Remove it.")
    wrong = ~numpy.isfinite(points).all(1)
    if wrong.any():
        place = int(wrong.argmax())
        got = f"{path}, point {place}: {points[place].tolist()}"
        raise DataError("data", got, "finite numbers", "Remove the point.")
    return points


def read_numbers(path: Path, dtype: Any, size: int, allowed: str) -> Any:
    """The numbers of a file of `size` bytes a point.

    Raises DataError where it cannot be read, does not fit into memory, or is cut off.
    """
    there = check_size(path)
    if there % size:
        raise DataError("data", f"{path} with {there:,} bytes, no multiple of {size}", allowed, "It may be cut off.")
    return numpy.fromfile(path, dtype=dtype)


def check_size(path: Path) -> int:
    """The bytes of a file. Raises DataError where it cannot be read, or is larger than this machine's memory."""
    try:
        size = regular(path).stat().st_size
    except (OSError, ValueError) as error:
        raise DataError(
            "data", f"{path}: {reason_of(error)}", "a file of points or labels", "Check the path."
        ) from error
    memory = memory_of()
    if size > memory:
        got, allowed = f"{path} with {size:,} bytes, larger than memory", f"at most the {memory:,} bytes of memory here"
        raise DataError("data", got, allowed, "Cut it into smaller scans.")
    return size
