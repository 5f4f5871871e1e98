"""The table of threads beside busy processes."""

from __future__ import annotations

import sys
from statistics import median

from .figures import load, table, where

FILE = "busy.json"
CASES = {"training": "training", "inference": "inference", "language": "language model", "kernels": "C kernels"}


def busy() -> str:
    """Calls a second by threads and spinning: the median and the range of the tries, quiet and busy."""
    content = load(FILE)
    columns = (f"{case}, {state}" for case in CASES.values() for state in ("quiet", "busy"))
    head = ("threads", "`GOMP_SPINCOUNT`", "tries", *columns)
    lines = []
    for threads, setting in sorted({(row["threads"], row["setting"]) for row in content["rows"]}, key=_place):
        its = [row for row in content["rows"] if (row["threads"], row["setting"]) == (threads, setting)]
        cells = (_cell([row[state][case] for row in its]) for case in CASES for state in ("quiet", "busy"))
        name = "`OMP_WAIT_POLICY=passive`" if setting == "passive" else setting
        lines.append((threads, name, len(its), *cells))
    return f"{table(head, lines)}\n\n{where(content['machine'])}; `python benchmarks/busy.py OUT.json --tries 2`."


def _cell(rates: list[float]) -> str:
    low, middle, high = (_short(rate) for rate in (min(rates), median(rates), max(rates)))
    return f"{middle} ({low}–{high})" if len(rates) > 1 else middle


def _place(row: tuple[int, str]) -> tuple[int, int]:
    """Two threads before one; the default, then by spins, then passive."""
    count = row[1].replace(",", "")
    return -row[0], int(count) if count.isdecimal() else 0 if count == "default" else sys.maxsize


def _short(rate: float) -> str:
    return f"{rate:.1f}" if rate < 10 else f"{rate:.0f}"


TABLES = {"busy": busy}
