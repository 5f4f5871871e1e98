"""The figures that the papers report, from polymix/published.toml: models in the domains, mixers alone, and claims."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from polymix.train.recipe_files import parse_toml

if TYPE_CHECKING:
    from polymix.mixers import MixerConfig

FILE = Path(__file__).parents[1] / "published.toml"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A model in a domain. note: what else must be the same, or what to know about the figures."""

    domain: str
    paper: str
    table: str
    data: str
    split: str
    host: str
    mixer: str
    metrics: Mapping[str, float]
    cost: Mapping[str, float] = field(default_factory=dict)
    note: str = ""

    @property
    def source(self) -> str:
        """Where it stands, and of which data it is."""
        return f"{self.paper}, {self.table}: {self.data}, {self.split}"


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A mixer alone."""

    paper: str
    table: str
    tokens: int
    channels: int
    mixer: str
    figures: Mapping[str, float]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Numbers of a text: `values` are `what` for `of`."""

    paper: str
    place: str
    what: str
    of: str
    values: tuple[float, ...]
    note: str = ""


T = TypeVar("T", Row, Layer, Claim)
HEAD = ("printed in", "data", "host", "mixer", "figures", "note")


def cells(entries: Iterable[Row | Layer | Claim]) -> list[tuple[str, ...]]:
    """Entries as lines below HEAD. A note stands in the first of the lines that share it."""
    lines: list[tuple[str, ...]] = []
    last = ""
    for entry in entries:
        note, last = "" if entry.note == last else entry.note, entry.note
        lines.append((*_cells(entry), note))
    return lines


def _cells(entry: Row | Layer | Claim) -> tuple[str, ...]:
    if isinstance(entry, Claim):
        values = ", ".join(f"{value:,g}" for value in entry.values)
        return f"{entry.paper}, {entry.place}", "", "", entry.of, f"{entry.what}: {values}".rstrip(": ")
    figures = {**entry.metrics, **entry.cost} if isinstance(entry, Row) else entry.figures
    text = ", ".join(f"{name.replace('_', ' ')} {value:,.10g}" for name, value in figures.items())
    if isinstance(entry, Row):
        return f"{entry.paper}, {entry.table}", f"{entry.data}, {entry.split}", entry.host, entry.mixer, text
    size = f"{entry.tokens:,} tokens, {entry.channels:,} channels"
    return f"{entry.paper}, {entry.table}", size, "", entry.mixer, text


def papers() -> tuple[str, ...]:
    """The names of the papers, as the file has them."""
    return tuple(dict.fromkeys(entry.paper for kind in _file() for entry in kind))


def of(name: str) -> list[Row | Layer | Claim]:
    """All that a paper prints, or that the papers print of a host: of("PADRe"), of("SiT-L/2")."""
    return [*rows(paper=name), *rows(host=name), *layers(paper=name), *claims(paper=name)]


def of_mixer(config: MixerConfig) -> list[Row]:
    """The models whose mixer has these options, whatever its grid, in all layers or in a plan."""
    own = config.unnamed.without_grid()
    return [row for row in rows() if own in (_config(row.mixer)[0], _config(row.mixer, preset="paper")[0])]


def lines(entries: Iterable[Row | Layer | Claim]) -> list[str]:
    """Entries as lines of text."""
    return [": ".join((", ".join(filter(None, where)), figures)) + (f" ({note})" if note else "")
            for *where, figures, note in cells(entries)]  # fmt: skip


def rows(**place: Any) -> tuple[Row, ...]:
    """The models of all tables, or of those with these fields: rows(paper="PoM", domain="satellite")."""
    return _where(_file()[0], place)


def layers(**place: Any) -> tuple[Layer, ...]:
    """The mixers alone, or those with these fields."""
    return _where(_file()[1], place)


def claims(**place: Any) -> tuple[Claim, ...]:
    """The numbers of the papers' texts, or those with these fields."""
    return _where(_file()[2], place)


def published(domain: str, *, data: str, split: str, host: str, mixer: str) -> dict[str, Any] | None:
    """A paper's metrics for this data, split, host and mixer, with their "source"; None where no paper has them.

    Args:
        mixer: as a recipe names it; options that stand in the file must be the same: "padre:degree=2". With a plan it
            is "pom (1:1)". The mixer's form preset="paper" is the paper's too.
    """
    for row in rows(domain=domain, data=data, split=split, host=host):
        if row.metrics and _config(mixer) in (_config(row.mixer), _config(row.mixer, preset="paper")):
            return {**row.metrics, "source": row.source}
    return None


def _where(entries: Iterable[T], place: Mapping[str, Any]) -> tuple[T, ...]:
    return tuple(entry for entry in entries if all(getattr(entry, name) == value for name, value in place.items()))


@cache
def _file() -> tuple[tuple[Row, ...], tuple[Layer, ...], tuple[Claim, ...]]:
    content = parse_toml(FILE.read_text("utf-8"))
    models = [
        Row(**place, metrics={name: value for name, value in row.items() if name not in Row.__dataclass_fields__},
            **{name: value for name, value in row.items() if name in Row.__dataclass_fields__})
        for place, row in _lines(content["table"])
    ]  # fmt: skip
    alone = [
        Layer(**place, mixer=row.pop("mixer"), note=row.pop("note", ""), figures=row)
        for place, row in _lines(content["layer"])
    ]
    told = [Claim(**place, **{**row, "values": tuple(row["values"])}) for place, row in _lines(content["claim"])]
    return tuple(models), tuple(alone), tuple(told)


def _lines(tables: Iterable[Mapping[str, Any]]) -> Iterable[tuple[dict[str, Any], dict[str, Any]]]:
    """Each row with what its table says of all of them; notes of both are joined in the row."""
    for table in tables:
        place = {name: value for name, value in table.items() if name not in ("rows", "note")}
        for row in table["rows"]:
            notes = [part["note"] for part in (table, row) if "note" in part]
            yield place, {**row, "note": "; ".join(notes)}


def _config(name: str, **changes: Any) -> Any:
    """A mixer's options and plan, by its name in a recipe or in the file."""
    from polymix.mixers.spec import parse_mixer

    spec, _, plan = name.partition(" (")
    if spec in ("keep", "none"):
        return spec, plan
    config = parse_mixer(spec)[1]
    return (config.changed(**changes) if config.forms else config).unnamed, plan
