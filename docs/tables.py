"""What the hooks that write tables share."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def table(head: Iterable[Any], rows: Iterable[Iterable[Any]]) -> str:
    """In Markdown."""
    lines = [list(head)]
    lines += [["---"] * len(lines[0]), *(list(row) for row in rows)]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
