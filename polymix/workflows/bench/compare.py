"""What got faster or slower from one results file to another, beyond the noise of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from polymix.errors import ResultsError, check_number
from polymix.workflows.bench.table import Row, label

Key = tuple[Any, ...]
KEY = ("mixer", "impl", "tokens", "dim", "batch", "dtype", "pass", "threads")
NOISE = 0.05
VERDICTS = ("slower", "stopped", "faster", "runs again", "only in A", "only in B", "same")  # in the order of interest
HEADINGS = ("mixer", "pass", "tokens", "at", "A, ms", "B, ms", "B÷A", "")
REGRESSIONS = ("slower", "stopped")
_SHOWN = ("cpu", "cpu_capability", "cores", "gpu", "device", "threads", "system", "python", "torch")


@dataclass(frozen=True)
class Change:
    """One row in A, in B, or in both, and what became of it."""

    before: Row | None
    after: Row | None
    verdict: str

    @property
    def row(self) -> Row:
        row = self.after or self.before
        assert row is not None
        return row

    def cells(self) -> list[str]:
        """Text under HEADINGS."""
        its = self.row
        texts = [
            "–" if row is None else "stopped" if row["stopped"] else f"{1e3 * row['seconds']:.3g}"
            for row in (self.before, self.after)
        ]
        ratio = self.ratio
        rest = f"{its['dtype']} ×{its['threads']} {its['batch']}·{its['dim']}"
        moved = "–" if ratio is None else f"{ratio:.2f}"
        return [label(its), its["pass"], f"{its['tokens']:,}", rest, *texts, moved, self.verdict]

    @property
    def ratio(self) -> float | None:
        """Time in B over time in A."""
        if not self.before or not self.after or self.before["stopped"] or self.after["stopped"]:
            return None
        return float(self.after["seconds"] / self.before["seconds"])


def compare(a: Mapping[str, Any], b: Mapping[str, Any], noise: float = NOISE) -> list[Change]:
    """Every row of either file, the most interesting first; no row in common is a ResultsError.

    A row is slower, or faster, if its medians differ by more than `noise` (0.05: 5 %), also beyond what the floors that
    were timed in the same turns differ by, and if the ranges of its runs, from the 10 % to the 90 % quantile, have
    nothing in common. One that ran in A and stopped in B is a regression as well.
    """
    check_number("--noise", noise, 0.0, 10.0, "a number from 0 up, 0.05 for 5 %", NOISE)
    before, after = _by_key(a), _by_key(b)
    if not before.keys() & after.keys():
        cure = "Run polymix bench twice with the same options."
        raise ResultsError("--compare", "two files with no row in common", "results of the same cells", cure)
    moods = _moods(before, after)
    changes = []
    for key in dict.fromkeys([*before, *after]):
        x, y = before.get(key), after.get(key)
        changes.append(Change(x, y, _verdict(x, y, noise, moods.get(key[2:], 1.0))))
    return sorted(changes, key=lambda change: VERDICTS.index(change.verdict))


def _verdict(a: Row | None, b: Row | None, noise: float, mood: float) -> str:
    if a is None or b is None:
        return "only in B" if a is None else "only in A"
    if a["stopped"] or b["stopped"]:
        return "same" if a["stopped"] and b["stopped"] else "stopped" if b["stopped"] else "runs again"
    ratio, least = b["seconds"] / a["seconds"], 1 + noise
    if min(ratio, ratio / mood) > least and b["low"] > a["high"]:
        return "slower"
    if max(ratio, ratio / mood) < 1 / least and a["low"] > b["high"]:
        return "faster"
    return "same"


def _moods(before: Mapping[Key, Row], after: Mapping[Key, Row]) -> dict[Key, float]:
    """By group of rows that were timed in turn, how many times as long its floors took in B, which no mixer does."""
    ratios: dict[Key, list[float]] = {}
    for key in before.keys() & after.keys():
        if before[key]["floor"] and after[key]["floor"]:
            ratios.setdefault(key[2:], []).append(after[key]["floor"] / before[key]["floor"])
    return {group: median(values) for group, values in ratios.items()}


def warnings(a: Mapping[str, Any], b: Mapping[str, Any], noise: float = NOISE) -> list[str]:
    """Why the two may not be comparable: another machine, or the same one in another mood."""
    found = [
        f"{name}: {a['machine'][name]} in A, {b['machine'][name]} in B"
        for name in _SHOWN
        if a["machine"][name] != b["machine"][name]
    ]
    found += [f"{name} is not finished" for name, content in (("A", a), ("B", b)) if not content["finished"]]
    moods = _moods(_by_key(a), _by_key(b))
    mood = median(moods.values()) if moods else 1.0
    if not 1 / (1 + noise) < mood < 1 + noise:
        found.append(
            f"the floors, which no mixer's code touches, took {mood:.2f} times as long in B: that is the machine"
        )
    return found


def _by_key(content: Mapping[str, Any]) -> dict[Key, Row]:
    return {tuple(row[name] for name in KEY): row for row in content["rows"]}
