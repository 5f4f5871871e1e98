"""Typed errors. Each message names the argument, what came, what is allowed, and the cure."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


class PolymixError(Exception):
    """Base of every error that polymix raises on purpose.

    `argument`, `got`, `allowed` and `cure` are kept as attributes, so that a program can act on them.
    """

    def __init__(self, argument: str, got: Any, allowed: str, cure: str = "") -> None:
        self.argument, self.got, self.allowed, self.cure = argument, got, allowed, cure
        # not by super(), through which torch.compile cannot follow
        Exception.__init__(self, f"`{argument}`: expected {allowed}, got {got}." + (f" {cure}" if cure else ""))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.argument, self.got, self.allowed, self.cure)


class OptionError(PolymixError, ValueError):
    """An option is unknown, out of range, or made meaningless by another option."""


class ShapeError(PolymixError, ValueError):
    """A tensor has the wrong shape, dtype or device."""


class MaskError(PolymixError, ValueError):
    """A mask, a segment tensor or a causal setting is malformed."""


class CapabilityError(PolymixError, NotImplementedError):
    """The mixer, as built, cannot do what was asked; the message names the mixers that can."""


class StateError(PolymixError, ValueError):
    """A recurrent state does not belong to this mixer or batch."""


class UnknownNameError(PolymixError, LookupError):
    """A name that is not registered; the message lists those that are, nearest first."""


class MissingExtraError(PolymixError, ImportError):
    """An optional package is needed; the message says which extra installs it."""


class DataError(PolymixError, ValueError):
    """A data folder or file cannot be used."""


class ResultsError(PolymixError, ValueError):
    """A results file is damaged, foreign, or belongs to another run."""


def nearest_first(name: str, known: Iterable[str]) -> list[str]:
    """All of `known`, those that look like `name` in front."""
    known = sorted(known)
    by_lower = {other.lower(): other for other in known}
    close = [by_lower[match] for match in get_close_matches(name.lower(), by_lower, n=3, cutoff=0.4)]
    return close + [other for other in known if other not in close]


def check_choice(argument: str, value: Any, allowed: Iterable[Any]) -> None:
    allowed = list(allowed)
    if not any(type(value) is type(other) and value == other for other in allowed):  # 1.0 and True are not 1
        raise OptionError(argument, repr(value), ", ".join(map(repr, allowed)), "Choose one of these.")


def check_int(argument: str, value: Any, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        allowed = f"an integer from {low} to {high}" if high is not None else f"an integer of at least {low}"
        raise OptionError(argument, repr(value), allowed, f"Pass {argument}={low}, say.")


def check_number(argument: str, value: Any, low: float, high: float, allowed: str, usual: float) -> None:
    """A finite number with low <= value < high."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value < high:
        raise OptionError(argument, repr(value), allowed, f"Pass {argument}={usual}, say.")


def check_grid_option(grid: Any, allowed_axes: tuple[int, ...], cure: str = "Pass grid=(14, 14), say.") -> None:
    """A tuple of sizes of at least 1, with one of the allowed numbers of axes."""
    names = {1: "(N,)", 2: "(H, W)", 3: "(T, H, W)"}
    sizes = isinstance(grid, (tuple, list)) and all(type(size) is int and size >= 1 for size in grid)
    if not sizes or len(grid) not in allowed_axes:
        *most, last = (names[axes] for axes in allowed_axes)
        allowed = f"{', '.join(most)} or {last}" if most else last
        raise OptionError("grid", repr(grid), f"{allowed}, sizes of at least 1", cure)


def check_divides(argument: str, value: int, whole_name: str, whole: int) -> None:
    if whole % value:
        fits = ", ".join(str(k) for k in range(1, whole + 1) if whole % k == 0)
        raise OptionError(argument, value, f"a divisor of {whole_name}={whole} ({fits})", "Change one of the two.")
