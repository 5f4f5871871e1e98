"""The tables of transformers' families, from benchmarks/results/families.json."""

from __future__ import annotations

from collections.abc import Callable
from textwrap import shorten
from typing import Any

from .figures import load, table

CHECKS = {
    "finite": "its outputs are finite", "trains": "every mixer learns", "padding": "padding changes nothing",
    "generates": "generation with a cache is that without", "loads": "it comes back from disk",
    "undone": "undo is exact",
}  # fmt: skip
WAYS = {"BorrowingAdapter": "keeps maps", "FamilyAdapter": "replaced"}


def _rows() -> dict[str, dict[str, dict[str, Any]]]:
    """The rows of each family that could be built here, by mixer."""
    families: dict[str, dict[str, dict[str, Any]]] = {}
    for row in load("families.json")["rows"]:
        families.setdefault(row["family"], {})[row["mixer"]] = row
    return {name: rows for name, rows in families.items() if all(row.get("stage") != "build" for row in rows.values())}


def works(row: dict[str, Any]) -> bool:
    return "why" not in row and all(row.get(name) is not False for name in CHECKS)


def _told(row: dict[str, Any]) -> str:
    """What became of a family with one mixer, in a cell."""
    if "why" in row:
        _, got, reason = str(row["why"]).replace("|", "/").replace("`", "").partition(", got ")
        reason = (reason if got else str(row["why"])).partition(". ")[0]
        return "no: " + shorten(reason, 120, placeholder=" …")
    if failed := [words for name, words in CHECKS.items() if row.get(name) is False]:
        return f"fails: {', '.join(failed)}"
    ways = " and ".join(dict.fromkeys(WAYS.get(way, "adapter") for way in row["way"]))
    converted, layers = row["layers"]
    parts = [ways, *([f"{converted} of {layers} layers"] if converted < layers else [])]
    parts += [f"drops {', '.join(row['dropped'])}"] if row["dropped"] else []
    return "; ".join(parts)


def summary() -> str:
    """How many families work with each mixer."""
    content, families = load("families.json"), _rows()
    kinds = len({row["family"] for row in content["rows"]})
    mixers = list(next(iter(families.values())))
    lines = []
    for mixer in mixers:
        rows = [family[mixer] for family in families.values() if mixer in family]
        empty = sum("with no attention." in str(row.get("why")) for row in rows)
        stages = [row.get("stage") for row in rows]
        failed = [row for row in rows if "why" not in row and not works(row)]
        faults = stages.count("traceback") + stages.count("crash")
        refused = stages.count("refused") - empty
        lines.append(
            (mixer, len(rows), empty, sum(map(works, rows)), len(failed), refused, stages.count("slow"), faults)
        )
    head = ("mixer", "built", "no attention", "all checks hold", "a check fails", "refused by name",
            "over 25 s on a busy machine", "tracebacks")  # fmt: skip
    text = (
        f"Of {kinds} types of configs in transformers {content['transformers']}, {len(families)} could be built small "
        "and called here; the others are parts of models, or need packages or inputs that the benchmark lacks."
    )
    return f"{table(head, lines)}\n\n{text} `python benchmarks/families.py benchmarks/results/families.json`"


def every() -> str:
    """A row for each family."""
    families = _rows()
    mixers = list(next(iter(families.values())))
    return table(("family", *mixers), ((name, *(_told(rows[mixer]) if mixer in rows else "–" for mixer in mixers))
                                       for name, rows in families.items()))  # fmt: skip


TABLES: dict[str, Callable[[], str]] = {"families": summary, "every-family": every}
