"""The options of every training, and of each domain, from the recipes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from polymix.extras import EXTRAS
from polymix.train.recipe import Recipe, table
from polymix.train.registry import OWN_RECIPES, recipe_class

from .figures import table as markdown
from .mixers import text


def shared() -> str:
    """What all domains share."""
    return _lines(table(Recipe))


def own(domain: str) -> str:
    """A domain's own options, and the shared ones that have another default there."""
    defaults = {name: default for name, _, default, _ in table(Recipe)}
    return _lines(row for row in table(recipe_class(domain)) if defaults.get(row[0]) != row[2])


def _lines(rows: Iterable[tuple[str, str, str, str]]) -> str:
    cells = ((f"`{name}`", text(kind), f"`{default}`", text(meaning)) for name, kind, default, meaning in rows)
    return markdown(("option", "type", "default", "meaning"), cells)


def extras() -> str:
    return markdown(("extra", "for"), ((f"`{name}`", text(extra.purpose)) for name, extra in EXTRAS.items()))


TABLES: dict[str, Callable[[], str]] = {
    "options": shared, "extras": extras, **{f"options-{name}": partial(own, name) for name in OWN_RECIPES},
}  # fmt: skip
