"""The figures that the papers report, from polymix/published.toml: of models in the domains, and of mixers alone."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from polymix.train.recipe_files import parse_toml

FILE = Path(__file__).parents[1] / "published.toml"


_PLACE = ("domain", "paper", "table", "data", "split")


@cache
def rows() -> tuple[dict[str, Any], ...]:
    """The rows of all tables, each with its domain, paper, table, data, split, host, mixer, metrics and cost."""
    flat = []
    for table in parse_toml(FILE.read_text("utf-8"))["table"]:
        place = {name: table[name] for name in _PLACE}
        for row in table["rows"]:
            metrics = {name: value for name, value in row.items() if name not in ("host", "mixer", "cost")}
            named = {"host": row["host"], "mixer": row["mixer"]}
            flat.append({**place, **named, "metrics": metrics, "cost": row.get("cost", {})})
    return tuple(flat)


@cache
def layers() -> tuple[dict[str, Any], ...]:
    """Mixers alone, each with its paper, table, tokens, channels, mixer, figures and note."""
    flat = []
    for table in parse_toml(FILE.read_text("utf-8"))["layer"]:
        place = {name: table[name] for name in ("paper", "table", "tokens", "channels")}
        for row in table["rows"]:
            notes = [part["note"] for part in (table, row) if "note" in part]
            figures = {name: value for name, value in row.items() if name not in ("mixer", "note")}
            flat.append({**place, "mixer": row["mixer"], "note": "; ".join(notes), "figures": figures})
    return tuple(flat)


def _config(name: str, **changes: Any) -> Any:
    """A mixer's options and plan, by its name in a recipe or in the file."""
    from polymix.mixers.spec import parse_mixer

    spec, _, plan = name.partition(" (")
    if spec in ("keep", "none"):
        return spec, plan
    config = parse_mixer(spec)[1]
    return (config.changed(**changes) if config.forms else config).unnamed, plan


def published(domain: str, *, data: str, split: str, host: str, mixer: str) -> dict[str, Any] | None:
    """A paper's metrics for this data, split, host and mixer, with their "source"; None where no paper has them.

    Args:
        mixer: as a recipe names it; options that stand in the file must be the same: "padre:degree=2". With a plan it
            is "pom (1:1)". The mixer's form preset="paper" is the paper's too.
    """
    for row in rows():
        same = (row["domain"], row["data"], row["split"], row["host"]) == (domain, data, split, host)
        if same and row["metrics"] and _config(mixer) in (_config(row["mixer"]), _config(row["mixer"], preset="paper")):
            return {**row["metrics"], "source": f"{row['paper']}, {row['table']}: {row['data']}, {row['split']}"}
    return None
