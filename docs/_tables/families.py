"""The tables of models that convert takes, from benchmarks/results/families.json."""

from __future__ import annotations

from collections.abc import Callable
from textwrap import shorten
from typing import Any

from .figures import load, table

CHECKS = {
    "finite": "its outputs are finite", "trains": "every mixer learns", "padding": "padding changes nothing",
    "generates": "generation with a cache is that without", "loads": "it comes back from disk",
    "undone": "undo is exact", "softmax": "softmax gives the host's output",
}  # fmt: skip
WAYS = {"BorrowingAdapter": "keeps maps", "KeptAdapter": "keeps maps", "FamilyAdapter": "replaced"}


Families = dict[tuple[str, str], dict[str, dict[str, Any]]]


def _rows() -> Families:
    """The rows of each library and family, by mixer; without configs of transformers that could not be built here."""
    families: Families = {}
    for row in load("families.json")["rows"]:
        families.setdefault((row["library"], row["family"]), {})[row["mixer"]] = row
    return {
        (library, name): rows for (library, name), rows in families.items()
        if library != "transformers" or all(row.get("stage") != "build" for row in rows.values())
    }  # fmt: skip


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
    """How many families of each library work with each mixer."""
    content, families = load("families.json"), _rows()
    lines, versions = [], content["versions"]
    for library in versions:
        its = [rows for (of, _), rows in families.items() if of == library]
        for mixer in ("pom", "qt"):
            rows = [rows[mixer] for rows in its if mixer in rows and rows[mixer].get("stage") != "build"]
            empty = sum("with no attention." in str(row.get("why")) for row in rows)
            stages = [row.get("stage") for row in rows]
            failed = [row for row in rows if "why" not in row and not works(row)]
            faults = stages.count("traceback") + stages.count("crash")
            lines.append((library, mixer, len(rows), empty, sum(map(works, rows)), len(failed),
                          stages.count("refused") - empty, stages.count("slow"), faults))  # fmt: skip
    head = ("library", "mixer", "built", "no attention", "all checks hold", "a check fails", "refused by name",
            "too slow", "tracebacks")  # fmt: skip
    timm = [rows for (of, _), rows in families.items() if of == "timm"]
    timm = [rows for rows in timm if any(row.get("stage") != "build" for row in rows.values())]
    some, both = (sum(how(works(row) for row in rows.values()) for rows in timm) for how in (any, all))
    exact = sum(rows["qt"].get("softmax") is True for rows in timm)
    missing = sum(any(row.get("stage") == "build" for row in rows.values())
                  for (of, _), rows in families.items() if of == "diffusers")  # fmt: skip
    softmax = [row["softmax"] for row in content["rows"] if row.get("softmax") is not None]
    kinds = len({row["family"] for row in content["rows"] if row["library"] == "transformers"})
    text = (
        f"Of {kinds} types of configs in transformers {versions['transformers']}, "
        f"{sum(library == 'transformers' for library, _ in families)} could be built small and called here; the others "
        "are parts of models, or need packages or inputs that the benchmark lacks. "
        f"Of the {len(timm)} classes of attention over tokens that models of timm {versions['timm']} have, {some} "
        f"convert with pom or qt ({some / len(timm):.0%}), {both} with both; in the models of {exact} of them, softmax "
        "mixers give the host's output; the others lose a part by name, or have no softmax over all pairs of tokens. "
        f"{missing} transformers and U-Nets of diffusers "
        f"{versions['diffusers']} could not be built small or called here: their rows say why, and they are untried. "
        f"Softmax was compared with {len(softmax)} hosts, and gives the output of {sum(softmax)}."
    )
    return f"{table(head, lines)}\n\n{text} `python benchmarks/families.py benchmarks/results/families.json`"


def every() -> str:
    """A table for each library, with a row for each family."""
    tables: dict[str, list[tuple[str, ...]]] = {}
    for (library, family), rows in _rows().items():
        cells = (_told(rows[mixer]) if mixer in rows else "–" for mixer in ("pom", "qt"))
        tables.setdefault(library, []).append((family, *cells))
    return "\n\n".join(f"## {library}\n\n{table(('family', 'pom', 'qt'), lines)}" for library, lines in tables.items())


def left_out() -> str:
    """The classes of timm whose names speak of attention and that were not tried, by the reason."""
    reasons: dict[str, list[str]] = {}
    for name, why in load("families.json")["left_out"]["timm"].items():
        reasons.setdefault(why, []).append(f"`{name}`")
    return table(("why", "classes"), [(why, ", ".join(names)) for why, names in reasons.items()])


TABLES: dict[str, Callable[[], str]] = {"families": summary, "left-out": left_out, "every-family": every}
