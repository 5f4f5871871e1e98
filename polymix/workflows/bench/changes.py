"""`polymix bench --compare`: what got faster or slower from one results file to another, beyond the noise of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from polymix.errors import ResultsError, check_number
from polymix.numbers import DASH, figure, fixed
from polymix.workflows.bench.tables import Row, label

Key = tuple[Any, ...]
KEY = ("mixer", "impl", "tokens", "dim", "batch", "dtype", "pass", "threads")
NOISE = 0.05
VERDICTS = ("slower", "stopped", "faster", "runs again", "only in A", "only in B", "same")  # most interesting first
HEADINGS = ("mixer", "pass", "tokens", "setting", "A, ms", "B, ms", "B÷A", "")
REGRESSIONS = ("slower", "stopped")
_MACHINE = ("cpu", "cpu_capability", "cores", "gpu", "device", "threads", "system", "python", "torch")


@dataclass(frozen=True)
class Change:
    """A row in A, in B, or in both, and the verdict on it."""

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
        row = self.row
        times = [
            DASH if side is None else "stopped" if side["stopped"] else figure(1e3 * side["seconds"])
            for side in (self.before, self.after)
        ]
        setting = f"{row['dtype']} ×{row['threads']} {row['batch']}·{row['dim']}"
        return [
            label(row), row["pass"], f"{row['tokens']:,}", setting, *times, fixed(self.ratio, 2), self.verdict,
        ]  # fmt: skip

    @property
    def ratio(self) -> float | None:
        """The time in B over the time in A."""
        if not self.before or not self.after or self.before["stopped"] or self.after["stopped"]:
            return None
        return float(self.after["seconds"] / self.before["seconds"])


def compare(a: Mapping[str, Any], b: Mapping[str, Any], noise: float = NOISE) -> list[Change]:
    """Every row of either file, the most interesting first.

    A row is slower, or faster, if its medians differ by more than `noise` (0.05 is 5 %), also after correcting for
    the floors that were timed in the same turns, and if the ranges of its runs, from the 10 % to the 90 % quantile,
    do not overlap. A row that ran in A and stopped in B is a regression too.

    Raises:
        ResultsError: the files have no row in common.
    """
    check_number("--noise", noise, 0.0, 10.0, "a number from 0 up (0.05 is 5 %)", NOISE)
    before, after = _by_key(a), _by_key(b)
    if not before.keys() & after.keys():
        cure = "Run polymix bench twice with the same options."
        raise ResultsError("--compare", "files with no row in common", "two results of the same measurements", cure)
    drifts = _drifts(before, after)
    changes = []
    for key in dict.fromkeys([*before, *after]):
        x, y = before.get(key), after.get(key)
        changes.append(Change(x, y, _verdict(x, y, noise, drifts.get(key[2:], 1.0))))
    return sorted(changes, key=lambda change: VERDICTS.index(change.verdict))


def _verdict(a: Row | None, b: Row | None, noise: float, drift: float) -> str:
    if a is None or b is None:
        return "only in B" if a is None else "only in A"
    if a["stopped"] or b["stopped"]:
        return "same" if a["stopped"] and b["stopped"] else "stopped" if b["stopped"] else "runs again"
    ratio, least = b["seconds"] / a["seconds"], 1 + noise
    if min(ratio, ratio / drift) > least and b["low"] > a["high"]:
        return "slower"
    if max(ratio, ratio / drift) < 1 / least and a["low"] > b["high"]:
        return "faster"
    return "same"


def _drifts(before: Mapping[Key, Row], after: Mapping[Key, Row]) -> dict[Key, float]:
    """For each group of rows that were timed in turn: the time of its floors in B over that in A.

    No mixer's code changes a floor, so this is how much the machine's speed changed.
    """
    ratios: dict[Key, list[float]] = {}
    for key in before.keys() & after.keys():
        if before[key]["floor"] and after[key]["floor"]:
            ratios.setdefault(key[2:], []).append(after[key]["floor"] / before[key]["floor"])
    return {group: median(values) for group, values in ratios.items()}


def comparability_warnings(a: Mapping[str, Any], b: Mapping[str, Any], noise: float = NOISE) -> list[str]:
    """Why the two may not be comparable: another machine, or one whose speed drifted between the runs."""
    warnings = [
        f"{name}: {a['machine'][name]} in A, {b['machine'][name]} in B"
        for name in _MACHINE
        if a["machine"][name] != b["machine"][name]
    ]
    warnings += [f"{name} is not finished" for name, content in (("A", a), ("B", b)) if not content["finished"]]
    drifts = _drifts(_by_key(a), _by_key(b))
    drift = median(drifts.values()) if drifts else 1.0
    if not 1 / (1 + noise) < drift < 1 + noise:
        speed = f"the floors took {drift:.2f} times as long in B, and no mixer's code affects them"
        warnings.append(f"the machine's speed drifted between the runs: {speed}")
    return warnings


def _by_key(content: Mapping[str, Any]) -> dict[Key, Row]:
    return {tuple(row[name] for name in KEY): row for row in content["rows"]}
