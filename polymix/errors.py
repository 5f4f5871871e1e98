"""Typed errors. Each message names the argument, what was expected, what came instead, and what to do about it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

MOST_TOKENS = 2**31 - 1  # of a sequence


class PolymixError(Exception):
    """Base class of every error that polymix raises on purpose.

    The message reads "`argument`: expected <allowed>, got <got>. <cure>". The four parts are also attributes, so that
    programs can act on them.
    """

    def __init__(self, argument: str, got: Any, allowed: str, cure: str = "") -> None:
        self.argument, self.got, self.allowed, self.cure = argument, got, allowed, cure
        # torch.compile cannot trace super() here.
        Exception.__init__(self, f"`{argument}`: expected {allowed}, got {got}." + (f" {cure}" if cure else ""))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.argument, self.got, self.allowed, self.cure)


class OptionError(PolymixError, ValueError):
    """An option is unknown, out of range, or has no effect because of another option."""


class ShapeError(PolymixError, ValueError):
    """A tensor has the wrong shape, dtype or device."""


class MaskError(PolymixError, ValueError):
    """A mask, a segment tensor or a causal setting is invalid."""


class CapabilityError(PolymixError, NotImplementedError):
    """The mixer, as configured, does not support the request. The message names what does."""


class StateError(PolymixError, ValueError):
    """A recurrent state does not match this mixer or batch."""


class InputError(PolymixError, ValueError, RuntimeError):
    """A model fails on an input. The message says what the model takes, and how it failed."""


class UnknownNameError(PolymixError, LookupError):
    """A name is not registered. The message lists the registered names, most similar first."""


class MissingExtraError(PolymixError, ImportError):
    """An optional package is missing. The message names the extra that installs it."""


class DataError(PolymixError, ValueError):
    """A data folder or file cannot be used."""

    @staticmethod
    def first_of(problems: Sequence[str]) -> DataError:
        """The error for a data set with problems, each a sentence that names file and entry."""
        more = f" ({len(problems) - 1:,} more: --check lists them)" if len(problems) > 1 else ""
        return DataError("data", f"this: {problems[0]}{more}", "sound files", "Mend or remove them.")


class ParityError(PolymixError, ArithmeticError):
    """An exported file gives other numbers than the model. The message says where the files are."""


class ResultsError(PolymixError, ValueError):
    """A results file is damaged, was written by another program, or belongs to another run."""


def nearest_first(name: str, known: Iterable[str]) -> list[str]:
    """Return all `known` names, those most similar to `name` first."""
    known = sorted(known)
    by_lower = {other.lower(): other for other in known}
    close = [by_lower[match] for match in get_close_matches(name.lower(), by_lower, n=3, cutoff=0.4)]
    return close + [other for other in known if other not in close]


def check_choice(argument: str, value: Any, allowed: Iterable[Any]) -> None:
    """Raise OptionError unless `value` is one of `allowed`, in type too."""
    allowed = list(allowed)
    if not any(type(value) is type(other) and value == other for other in allowed):  # 1.0 and True are not 1
        raise OptionError(argument, repr(value), ", ".join(map(repr, allowed)), "Choose one of these.")


def check_int(argument: str, value: Any, low: int, high: int | None = None) -> None:
    """Raise OptionError unless `value` is an integer with low <= value <= high."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        beyond = isinstance(value, int) and high is not None and value > high
        if high is None or (high >= MOST_TOKENS and not beyond):  # a bound that few need to know
            allowed = f"an integer of at least {low}"
        else:
            allowed = f"an integer from {low} to {high}"
        raise OptionError(argument, repr(value), allowed, f"For example, pass {argument}={low}.")


def check_seed(argument: str, value: Any) -> None:
    """Raise OptionError unless `value` is a seed for PyTorch's generators: an integer from 0 to 2^63 - 1."""
    check_int(argument, value, 0, 2**63 - 1)


def check_number(argument: str, value: Any, low: float, high: float, allowed: str, usual: float) -> None:
    """Raise OptionError unless `value` is a finite number with low <= value < high.

    Args:
        allowed: describes the range in words.
        usual: a typical value, suggested in the message.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value < high:
        raise OptionError(argument, repr(value), allowed, f"For example, pass {argument}={usual}.")


def check_grid_option(grid: Any, allowed_axes: tuple[int, ...], cure: str = "For example, pass grid=(14, 14).") -> None:
    """Raise OptionError unless `grid` is a tuple of positive sizes with an allowed number of axes."""
    names = {1: "(N,)", 2: "(H, W)", 3: "(T, H, W)"}
    sizes = isinstance(grid, (tuple, list)) and all(type(size) is int and size >= 1 for size in grid)
    if not sizes or len(grid) not in allowed_axes:
        *most, last = (names[axes] for axes in allowed_axes)
        allowed = f"{', '.join(most)} or {last}" if most else last
        raise OptionError("grid", repr(grid), f"{allowed} with sizes of at least 1", cure)
    if math.prod(grid) > MOST_TOKENS:
        raise OptionError("grid", repr(grid), f"a grid of at most {MOST_TOKENS:,} tokens", cure)


def check_divides(argument: str, value: int, whole_name: str, whole: int) -> None:
    """Raise OptionError unless `value` divides `whole`."""
    if whole % value:
        divisors = ", ".join(str(k) for k in range(1, whole + 1) if whole % k == 0)
        cure = f"Change {argument} or {whole_name}."
        raise OptionError(argument, value, f"a divisor of {whole_name}={whole} ({divisors})", cure)
