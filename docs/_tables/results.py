"""The fields of every results.json, from the types that check it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .figures import table
from .mixers import text

Schema = Mapping[str, Any]
SHORT = ("settings", "machine")  # their parts are options, or explain themselves


def bench() -> str:
    from polymix.workflows.bench.run import Results

    return fields(Results.json_schema())


def compare() -> str:
    from polymix.workflows.compare.run import Results

    return fields(Results.json_schema())


def search() -> str:
    from polymix.workflows.search.content import SearchResults

    return fields(SearchResults.json_schema())


def train() -> str:
    from polymix.results import schema_of
    from polymix.train.rows import TrainContent

    return fields(schema_of(TrainContent))


def fields(schema: Schema) -> str:
    return table(("field", "type", "meaning"), parts(schema, ""))


def parts(schema: Schema, place: str) -> Iterator[tuple[str, str, str]]:
    """A row for each field, followed by those of its parts."""
    for name, part in schema.get("properties", {}).items():
        whole = f"{place}{name}"
        yield f"`{whole}`", kind(part), text(part.get("description", ""))
        if name not in SHORT:
            yield from parts(part.get("items", {}), f"{whole}[].")
            yield from parts(part, f"{whole}.")
            for case in part.get("anyOf", ()):
                yield from parts(case, f"{whole}.")


def kind(part: Schema) -> str:
    """The JSON type in a few words; fixed values as they are."""
    if "enum" in part:
        return ", ".join(f"`{value}`" for value in part["enum"])
    if "anyOf" in part:
        return " or ".join(dict.fromkeys(kind(case) for case in part["anyOf"]))
    kinds = part.get("type", "any")
    named = " or ".join([kinds] if isinstance(kinds, str) else kinds)
    return f"{named} of {kind(part['items'])}" if "items" in part and named == "array" else named


TABLES: dict[str, Callable[[], str]] = {
    "results-bench": bench, "results-compare": compare, "results-search": search, "results-train": train,
}  # fmt: skip
