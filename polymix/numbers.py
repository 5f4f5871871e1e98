"""Numbers as text, in tables, pages and sentences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

NONE = "–"


def figure(value: float | None, unit: str = "") -> str:
    """Three significant digits, or all digits from 100 up: "0.0123 ms", "12.3 ms", "1,234 ms"."""
    if value is None:
        return NONE
    return (f"{value:,.0f}" if value >= 100 else f"{value:.3g}") + unit


def fixed(value: float | None, digits: int, scale: float = 1.0) -> str:
    """`scale` times the value, with so many digits after the point."""
    return NONE if value is None else f"{scale * value:,.{digits}f}"


def percent(share: float | None) -> str:
    """ "95.3 %" from 0.953."""
    return NONE if share is None else f"{fixed(share, 1, 100)} %"


def arrow(pair: Iterable[float | None], unit: str = "") -> str:
    """ "12.3 → 4.56 ms": a value before and after."""
    return " → ".join(figure(value) for value in pair) + unit


def accuracy_interval(share: float, count: int) -> str:
    """ "81.2 % (95 % interval 75.9 to 85.6 %)": a share of `count` cases with Wilson's score interval."""
    z = 1.96
    centre, width = share + z * z / (2 * count), z * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    low, high = ((centre + side * width) / (1 + z * z / count) for side in (-1, 1))
    return f"{percent(share)} (95 % interval {fixed(max(low, 0), 1, 100)} to {percent(min(high, 1))})"


def speedup(factor: float) -> str:
    """ "2.5 times as fast"."""
    return f"{figure(factor)} times as fast"


def two_figures(n: float) -> str:
    """A token count for a sentence, rounded to two figures: an interpolated crossing is no more precise."""
    digits = 10 ** max(0, math.floor(math.log10(n)) - 1)
    return f"{round(n / digits) * digits:,}"


def plural(count: int, noun: str) -> str:
    """ "1 thread", "2 threads"."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def machine_line(machine: Mapping[str, Any]) -> str:
    """The machine of a results file in one line."""
    processor = f"{machine['gpu'] or machine['cpu']} ({machine['cpu_capability']}, {machine['cores']} cores)"
    return f"{processor}, torch {machine['torch']}"


def listed(words: Iterable[str]) -> str:
    """ "a, b and c"."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last
