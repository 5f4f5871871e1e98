"""results.json of a comparison."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from polymix.workflows import results
from polymix.workflows.results import write_atomically

__all__ = ["Results", "load", "write_atomically"]


class Results(results.Results):
    """The results of one comparison in one folder."""

    schema: ClassVar[str] = "polymix.compare/1"
    command: ClassVar[str] = "polymix compare"
    parts: ClassVar[Mapping[str, Any]] = {
        "data": None, "host": None, "mixers": [], "training": [], "sweep": [], "answer": None,
    }  # fmt: skip


def load(path: Path) -> dict[str, Any]:
    """The content of a results file, once it is known to be one."""
    return Results.load(path)
