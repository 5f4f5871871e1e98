"""Options that have an effect only beside some values of another one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from polymix.errors import IdleOptionError, shortened
from polymix.train.option_words import default_of, shown

if TYPE_CHECKING:
    from pydantic import BaseModel

# Values of an option, or what tells them; none: any that is not empty, 0, False or None.
Values = tuple[Any, ...] | Callable[[Any], bool]
# (an option, its values, the options that have an effect beside these values alone)
Beside = tuple[str, Values, tuple[str, ...]]


def has_effect(value: Any, values: Values) -> bool:
    """Whether options of a `Beside` have an effect beside this value of its first one."""
    if callable(values):
        return values(value)
    return value in values if values else bool(value)


def find_idle(recipe: BaseModel, rules: Iterable[Beside]) -> IdleOptionError | None:
    """The error about the first option that is set in vain; None: there is none."""
    for other, values, names in rules:
        beside = getattr(recipe, other)
        if has_effect(beside, values):
            continue
        for name in names:
            value = getattr(recipe, name)
            if value != default_of(type(recipe), name):
                got = f"{shown(value)} beside {other}={shortened(shown(beside))}, where it has no effect"
                return IdleOptionError(name, got, "it left out", f"Leave it out, or set {_instead(other, values)}.")
    return None


def _instead(other: str, values: Values) -> str:
    if callable(values):
        return f"another {other}"
    return f"{other}={' or '.join(map(shown, values))}" if values else f"{other} as well"
