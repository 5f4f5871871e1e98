"""Numbers as text: the one way in which terminals, pages and sentences write them, and tables of them."""

from __future__ import annotations

import math
import re
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

DASH = "–"


def figure(value: float | None, unit: str = "") -> str:
    """Three significant digits, or all digits from 100 up: "0.0123 ms", "12.3 ms", "1,234 ms"."""
    if value is None:
        return DASH
    return significant(value, 3) + unit


def fixed(value: float | None, digits: int, scale: float = 1.0) -> str:
    """`scale` times the value, with so many digits after the point."""
    return DASH if value is None else f"{scale * value:,.{digits}f}"


def arrow(pair: Iterable[float | None], unit: str = "") -> str:
    """ "12.3 → 4.56 ms": a value before and after."""
    return " → ".join(figure(value) for value in pair) + unit


def between(values: Sequence[float]) -> str:
    """The least and the greatest of some values: "0.21 – 0.35"."""
    ends = dict.fromkeys(figure(value) for value in (min(values), max(values))) if values else [DASH]
    return " – ".join(ends)


def percent(share: float | None, digits: int = 1) -> str:
    """A share from 0 to 1: "95.3 %"."""
    return DASH if share is None else f"{fixed(share, digits, 100)} %"


def metric(value: float | None, unit: str) -> str:
    """A measurement in its metric's unit: "%", which is of shares, or "", with four significant digits."""
    if unit == "%":
        return percent(value)
    return DASH if value is None else f"{value:,}" if isinstance(value, int) else significant(value, 4)


def significant(value: float, digits: int) -> str:
    """A number with so many significant digits, or all those before the point: "0.0123", "12,345", "1.2 × 10^-9"."""
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    exponent = math.floor(math.log10(abs(float(f"{value:.{digits - 1}e}"))))
    if exponent < -6 or exponent > 14:
        return f"{significant(value / 10.0**exponent, digits)} × 10^{exponent}"
    text = f"{value:,.{max(0, digits - 1 - exponent)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


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


def plural(count: int, noun: str, nouns: str = "") -> str:
    """ "1 thread", "2 threads", "2 classes"; `nouns` where the plural is irregular."""
    return f"{count:,} {noun if count == 1 else nouns or noun + ('es' if noun.endswith('s') else 's')}"


def machine_line(machine: Mapping[str, Any]) -> str:
    """The machine of a results file in one line."""
    processor = f"{machine['gpu'] or machine['cpu']} ({machine['cpu_capability']}, {machine['cores']} cores)"
    return f"{processor}, torch {machine['torch']}"


def listed(words: Iterable[str]) -> str:
    """ "a, b and c"."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def spanned(names: Sequence[str]) -> str:
    """Names that differ in one number as one: "blocks.0–11.attn"; others by the first and the last."""
    if len(names) == 1:
        return names[0]
    parts = [re.split(r"(\d+)", name) for name in names]
    same_form = len({len(part) for part in parts}) == 1
    differ = [i for i in range(len(parts[0])) if len({part[i] for part in parts}) > 1] if same_form else []
    if len(differ) != 1 or not all(part[differ[0]].isdigit() for part in parts):
        return f"{names[0]} … {names[-1]} ({len(names)})"
    numbers = [int(part[differ[0]]) for part in parts]
    together = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    span = f"{numbers[0]}–{numbers[-1]}" if together else ",".join(map(str, numbers))
    return "".join([*parts[0][: differ[0]], span, *parts[0][differ[0] + 1 :]])


def terminal_width() -> int:
    """Characters across the terminal; many where the text goes elsewhere."""
    return shutil.get_terminal_size((200, 24)).columns


def aligned(rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """Lines of a table whose first row has the headings: in columns, or where those do not fit, one below the other."""
    width = width or terminal_width()
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(size) for cell, size in zip(row, widths, strict=True)).rstrip() for row in rows]
    if max(map(len, lines)) <= width:
        return lines
    return [line for row in rows[1:] for line in stacked(rows[0], row, width)]


def stacked(headings: Sequence[str], row: Sequence[str], width: int) -> list[str]:
    """A row of a table for a narrow terminal: its name, and below it the other cells with their headings."""
    pairs = [(" ".join(name.split()), " ".join(cell.split())) for name, cell in zip(headings, row, strict=True)]
    cells = ", ".join(f"{name} {cell}".strip() for name, cell in pairs[1:] if cell)
    below = textwrap.wrap(cells, width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    return [*textwrap.wrap(pairs[0][1], width, break_on_hyphens=False), *below]
