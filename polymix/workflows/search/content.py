"""What results.json of `polymix search` holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypedDict

from polymix.results import RESULTS, Results, empty_parts, schema_name


class TimeRow(TypedDict):
    layer: str
    mixer: Annotated[str, "a candidate, or keep: the layer's attention"]
    ms: Annotated[float | None, "median; null: it ran out of memory"]
    low_ms: float | None
    high_ms: float | None
    runs: int
    clock: str


class DamageRow(TypedDict):
    layer: str
    mixer: str
    stage: Annotated[
        Literal["untrained", "trained", "restored"],
        "untrained: on a quarter of the samples; restored: as converted, since training made it worse",
    ]
    damage: Annotated[float | None, "of the model with this mixer alone; null: its output is not finite"]


class PointRow(TypedDict):
    name: str
    share: Annotated[float, "of the attention's time"]
    predicted: Annotated[float | None, "the sum of the damages alone"]
    true: Annotated[float | None, "measured with all mixers in place, on other samples; null: not measured"]
    plan: Annotated[dict[str, str], "layer -> mixer or keep"]


class SearchContent(TypedDict):
    """Rows are there as soon as they are known; the front and what follows when the search has finished."""

    schema: Literal["polymix.search/1"]
    finished: bool
    settings: dict[str, Any]
    machine: dict[str, Any]
    damage: Annotated[str | None, "what is measured: logits, features or squares"]
    refused: Annotated[dict[str, dict[str, str]], "mixer -> layer -> why it cannot have it"]
    times: list[TimeRow]
    damages: list[DamageRow]
    diverged: Annotated[list[str], "mixers whose training did"]
    front: list[PointRow]
    points: Annotated[list[PointRow], "the chosen plan first"]
    rules: Annotated[list[PointRow], "the best fixed rules within the budget"]
    headline: str | None
    notes: list[str]


class SearchResults(Results):
    """results.json of a search."""

    kind: ClassVar[Any] = SearchContent
    command: ClassVar[str] = "polymix search"


class InMemory(SearchResults):
    """The same where no folder was named."""

    def save(self) -> None:
        pass


def opened(
    out: Path | None, settings: dict[str, Any], machine: dict[str, Any], resume: bool, **parts: Any
) -> SearchResults:
    """The results of a search in a folder, new, with what is known, or continued; without a folder in memory."""
    if out is not None and (out / RESULTS).exists():
        return SearchResults.open(out, settings, machine, resume=resume)
    head = {"schema": schema_name(SearchContent), "finished": False, "settings": settings, "machine": machine}
    kind = InMemory if out is None else SearchResults
    results = kind(out or Path(), {**empty_parts(SearchContent), **head, **parts})
    results.save()
    return results
