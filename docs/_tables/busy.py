"""The tables of threads beside busy processes."""

from __future__ import annotations

import sys
from statistics import median
from typing import Any

from .figures import load, table, where

FILE = "busy.json"
CASES = {"training": "training", "inference": "inference", "language": "language model", "kernels": "C kernels"}
NAMES = {"passive": "`OMP_WAIT_POLICY=passive`", "libiomp": "libiomp", "libiomp 1": "libiomp, `KMP_BLOCKTIME=1`",
         "libiomp 0": "libiomp, `KMP_BLOCKTIME=0`"}  # fmt: skip
AIM = 0.5  # of a fair share, when busy


def busy() -> str:
    """Calls a second by threads and spinning: the median and the range of the tries, quiet and busy."""
    content = load(FILE)
    columns = (f"{case}, {state}" for case in CASES.values() for state in ("quiet", "busy"))
    head = ("threads", "`GOMP_SPINCOUNT`", "tries", *columns)
    lines = []
    for row, tries in _tries(content).items():
        cells = (_cell([one[state][case] for one in tries]) for case in CASES for state in ("quiet", "busy"))
        absent = next(
            (f"not measured: {one['absent']}" for one in content["rows"] if _of(one) == row and "absent" in one), ""
        )
        lines.append((row[0], NAMES.get(row[1], row[1]), len(tries) or absent, *cells))
    return f"{table(head, lines)}\n\n{where(content['machine'])}; `python benchmarks/busy.py OUT.json --tries 2`."


def aims() -> str:
    """Quiet speeds over those of two threads by default; busy speeds over a fair share of these."""
    content = load(FILE)
    tries, share = _tries(content), 2 / (2 + content["busy"])
    best = {case: median(one["quiet"][case] for one in tries[2, "default"]) for case in CASES}
    lines = []
    for (threads, setting), its in tries.items():
        if not its:
            continue
        cells = []
        for case in CASES:
            quiet, busy = (median(one[state][case] for one in its) / best[case] for state in ("quiet", "busy"))
            cells += [f"{quiet:.2f}", f"{busy / share:.2f}" if busy / share >= AIM else f"**{busy / share:.2f}**"]
        lines.append((threads, NAMES.get(setting, setting), *cells))
    columns = (f"{case}, {what}" for case in CASES.values() for what in ("quiet", "busy"))
    return table(("threads", "`GOMP_SPINCOUNT`", *columns), lines)


def compare() -> str:
    """Seconds of `polymix compare --quick`, quiet and busy."""
    content, lines = load(FILE), []
    for how in dict.fromkeys(row["how"] for row in content["compare"]):
        cells = []
        for state in ("quiet", "busy"):
            rows = [row for row in content["compare"] if (row["how"], row["state"]) == (how, state)]
            cells.append("; ".join(map(_seconds, rows)) or "–")
        lines.append((how, *cells))
    return f"{table(('', 'quiet, s', 'busy, s'), lines)}\n\n`python benchmarks/busy.py OUT.json --compare`"


def _seconds(row: dict[str, Any]) -> str:
    beside = f" (others took {row['others']:.1f} cores)" if row["others"] >= 0.1 else ""
    return f"{row['seconds']:.0f}{'' if row['ended'] else ', not ended'}{beside}"


def _of(row: dict[str, Any]) -> tuple[int, str]:
    return row["threads"], row["setting"]


def _tries(content: dict[str, Any]) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """The measured tries of every row, in the table's order."""
    return {row: [one for one in content["rows"] if _of(one) == row and "quiet" in one]
            for row in sorted({_of(one) for one in content["rows"]}, key=_place)}  # fmt: skip


def _cell(rates: list[float]) -> str:
    if not rates:
        return "–"
    low, middle, high = (_short(rate) for rate in (min(rates), median(rates), max(rates)))
    return f"{middle} ({low}–{high})" if len(rates) > 1 else middle


def _place(row: tuple[int, str]) -> tuple[int, int, int]:
    """Two threads before one; the default, then by spins, then passive, then Intel's."""
    count = row[1].replace(",", "")
    named = list(NAMES).index(row[1]) if row[1] in NAMES else 0
    return -row[0], int(count) if count.isdecimal() else 0 if count == "default" else sys.maxsize, named


def _short(rate: float) -> str:
    return f"{rate:.1f}" if rate < 10 else f"{rate:.0f}"


TABLES = {"busy": busy, "busy-aims": aims, "busy-compare": compare}
