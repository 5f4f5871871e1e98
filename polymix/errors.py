"""Typed errors. Each message names the argument, what was expected, what came instead, and what to do about it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from difflib import get_close_matches
from functools import partial
from typing import Any

MAX_TOKENS = 2**31 - 1  # of a sequence
MAX_SHOWN = 200  # characters of a value in a message, which is to stay readable
MAX_GOT = 1_000  # characters of what came instead, where a message quotes a file, a path or another library
MAX_FLOAT = 3.4028234663852886e38  # the largest float32
_SURROGATES = re.compile(r"[\ud800-\udfff]")


class PolymixError(Exception):
    """Base class of every error that polymix raises on purpose.

    The message reads "`argument`: expected <allowed>, got <got>. <cure>". The four parts are also attributes, so that
    programs can act on them.
    """

    def __init__(self, argument: str, got: Any, allowed: str, cure: str = "") -> None:
        self.argument, self.got, self.allowed, self.cure = argument, got, allowed, cure
        text = got if isinstance(got, str) else shown(got)
        if len(text) > MAX_GOT:
            text = f"{text[: MAX_GOT // 2]} … {text[-MAX_GOT // 2 :]}"
        # torch.compile can trace no __init__ of the base classes here.
        self.args = (f"`{argument}`: expected {allowed}, got {text}." + (f" {cure}" if cure else ""),)

    def __str__(self) -> str:
        return printable(Exception.__str__(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.argument, self.got, self.allowed, self.cure)


class OptionError(PolymixError, ValueError):
    """An option is unknown, out of range, or has no effect because of another option."""


class UnknownOptionError(OptionError):
    """There is no such option. `allowed` are those that there are, the most similar ones first."""

    def __init__(self, argument: str, allowed: str, cure: str = "Check the spelling.") -> None:
        self.argument, self.got, self.allowed, self.cure = argument, "an unknown option", allowed, cure
        self.args = (f"`{argument}` is {self.got}. Choose from {allowed}. {cure}",)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.argument, self.allowed, self.cure)


class IdleOptionError(OptionError):
    """An option has no effect beside the value that another one has."""


class DivergedError(OptionError):
    """The loss of a training became NaN or infinite, with the options that it has."""


class ShapeError(PolymixError, ValueError):
    """A tensor has the wrong shape, dtype or device."""


class MaskError(PolymixError, ValueError):
    """A mask, a segment tensor or a causal setting is invalid."""


class CapabilityError(PolymixError, NotImplementedError):
    """The mixer, as configured, does not support the request. The message names what does."""


class ParallelError(PolymixError, RuntimeError):
    """A process of a group failed, or did not come to a step that all take together. The message names it."""


class StateError(PolymixError, ValueError):
    """A recurrent state does not match this mixer or batch."""


class InputError(PolymixError, ValueError, RuntimeError):
    """A model fails on an input. The message says what the model takes, and how it failed."""


class UnknownNameError(PolymixError, LookupError):
    """A name is not registered. The message lists the registered names, most similar first."""


class MissingExtraError(PolymixError, ImportError):
    """An optional package is not installed. The message says what installs it, in words that work when copied.

    Args:
        package: its name for pip; several with spaces.
        extra: the extra of polymix that brings it with what else its users need, or several with commas; "" for a
            package that is in none.
        why: a sentence: what needs the package, or what does without it.
        state: what is wrong with it.
        install: the command, for a package that is not Python's.
    """

    def __init__(self, package: str, extra: str = "", why: str = "", *, state: str = "", install: str = "") -> None:
        several = " " in package
        self.package, self.extra, self.why = package, extra, why
        self.state = state or f"{'are' if several else 'is'} not installed"
        self.install = install or f"pip install {package}"
        # After a semicolon a shell takes the command as it stands; after a comma or a full stop pip would not.
        whole = f"; in a clone of polymix, with the rest of its extra: {install_extra(extra)}" if extra else ""
        self.argument, self.got, self.allowed = package.replace(" ", ", "), self.state, "what can be imported"
        self.cure = f"Install {'them' if several else 'it'} with: {self.install}{whole}"
        self.args = (" ".join(part for part in (f"{self.argument} {self.state}.", why, self.cure) if part),)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), state=self.state, install=self.install), (self.package, self.extra, self.why)


class DataError(PolymixError, ValueError):
    """A data folder or file cannot be used."""


class ParityError(PolymixError, ArithmeticError):
    """An exported file gives other numbers than the model. The message says where the files are."""


class ResultsError(PolymixError, ValueError):
    """A results file is damaged, was written by another program, or belongs to another run."""


def install_extra(extra: str = "") -> str:
    """The one way to install polymix, here with an extra: in a clone, with versions that were tested together."""
    return f'pip install -c constraints.txt ".[{extra}]"' if extra else "pip install -c constraints.txt ."


def shown(value: Any) -> str:
    """A value in a message: its repr on one line, of at most MAX_SHOWN characters."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # of a value of any class; Python prints no integer of more than 4,300 digits
        text = f"an integer of {value.bit_length():,} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


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
        raise OptionError(argument, shown(value), ", ".join(map(repr, allowed)), "Choose one of these.")


def check_int(argument: str, value: Any, low: int, high: int | None = None) -> None:
    """Raise OptionError unless `value` is an integer with low <= value <= high."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        beyond = isinstance(value, int) and high is not None and value > high
        if high is None or (high >= MAX_TOKENS and not beyond):  # a bound that few need to know
            allowed = f"an integer of at least {low}"
        else:
            allowed = f"an integer from {low} to {high}"
        raise OptionError(argument, shown(value), allowed, f"For example, pass {argument}={low}.")


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
        raise OptionError(argument, shown(value), allowed, f"For example, pass {argument}={usual}.")


def check_grid_option(grid: Any, allowed_axes: tuple[int, ...], cure: str = "For example, pass grid=(14, 14).") -> None:
    """Raise OptionError unless `grid` is a tuple of positive sizes with an allowed number of axes."""
    names = {1: "(N,)", 2: "(H, W)", 3: "(T, H, W)"}
    sizes = isinstance(grid, (tuple, list)) and all(type(size) is int and size >= 1 for size in grid)
    if not sizes or len(grid) not in allowed_axes:
        *most, last = (names[axes] for axes in allowed_axes)
        allowed = f"{', '.join(most)} or {last}" if most else last
        raise OptionError("grid", shown(grid), f"{allowed} with sizes of at least 1", cure)
    if math.prod(grid) > MAX_TOKENS:
        raise OptionError("grid", shown(grid), f"a grid of at most {MAX_TOKENS:,} tokens", cure)


def divisors(whole: int) -> list[int]:
    """The divisors of a number of at least 1, in order, in √whole steps."""
    small = [k for k in range(1, math.isqrt(whole) + 1) if whole % k == 0]
    return sorted({*small, *(whole // k for k in small)})


def check_divides(argument: str, value: int, whole_name: str, whole: int) -> None:
    """Raise OptionError unless `value` divides `whole`."""
    if whole % value:
        factors = f" ({', '.join(map(str, divisors(whole)))})" if 0 < whole <= MAX_TOKENS else ""
        cure = f"Change {argument} or {whole_name}."
        raise OptionError(argument, value, f"a divisor of {whole_name}={shown(whole)}{factors}", cure)


def check_plain(argument: str, value: Any) -> None:
    """Raise OptionError unless `value` is what JSON and every check can take: a number, text, None, or a tuple of them.

    A tensor, an array or an object of another class would fail where it is compared, copied or printed.
    """
    for part in value if isinstance(value, (tuple, list)) else (value,):
        if part is not None and not isinstance(part, (bool, int, float, str)):
            allowed = "a number, text, None, or a tuple of these"
            raise OptionError(argument, shown(value), allowed, "Pass plain values.")
    check_numbers(argument, value)


def check_numbers(argument: str, value: Any) -> None:
    """Raise OptionError if a number in `value` is one that int64 or float32 cannot hold, which layers are made of."""
    if isinstance(value, (tuple, list)):
        for part in value:
            check_numbers(argument, part)
    if isinstance(value, int) and abs(value) >= 2**63:
        raise OptionError(argument, shown(value), f"integers of at most {2**63 - 1}", "Pass a smaller one.")
    if isinstance(value, float) and MAX_FLOAT < abs(value) < math.inf:
        raise OptionError(argument, shown(value), "numbers that float32 can hold", "Pass a smaller one.")


def printable(text: str) -> str:
    """The text with the bytes of names that are not UTF-8 as "\\xf6": what can be printed, drawn and written.

    Python holds such bytes of a file's name as lone surrogates, which no encoding takes.
    """
    return _SURROGATES.sub(_escaped, text)


def _escaped(surrogate: re.Match[str]) -> str:
    code = ord(surrogate.group())
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"\\u{code:04x}"


def shortened(text: str, most: int = 1000) -> str:
    """A text of one line without the middle of what is too long to be read."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most // 2]} … {line[-most // 2 :]}"


def reason_of(error: BaseException) -> str:
    """Why an operation failed: the system's words for an OSError ("No space left on device"), else `one_line`."""
    return error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)


def one_line(error: BaseException) -> str:
    """Format an error's type and message on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
