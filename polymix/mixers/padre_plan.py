"""What the options of a PADRe settle: a structure for every map, the input of every Y, the kernel, the terms."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from polymix.errors import OptionError, check_int
from polymix.structured.registry import check_spec, kinds_of, needs_kernel

if TYPE_CHECKING:
    from polymix.mixers.padre_config import PadreConfig


class Plan(NamedTuple):
    """One structure for every map: d + e of A and B, (d - 1) + (e - 1) of C and D; the letter each Y reads."""

    A: tuple[str, ...]
    B: tuple[str, ...]
    C: tuple[str, ...]
    D: tuple[str, ...]
    kernel: tuple[int, ...]
    terms: tuple[int, ...]
    letters: str

    @property
    def token(self) -> set[str]:
        """The kinds of all token maps."""
        return set().union(*map(kinds_of, self.A + self.C))


def make_plan(config: PadreConfig) -> Plan:
    """What the options settle; raises OptionError where they do not fit together."""
    check_spec("token", config.token)
    check_spec("channel", config.channel)
    letters = _letters(config)
    A, C = _preset(config, config.degree)
    if config.denominator:
        more = _preset(config, config.denominator)
        A, C = A + more[0], C + more[1]
    B, D = (config.channel,) * len(A), (config.channel,) * len(C)
    if config.pattern is not None:
        A = tuple(spec if letter == "a" else "mean" for spec, letter in zip(A, letters, strict=True))
        C, D = ("identity",) * len(C), ("identity",) * len(D)
    A, B, C, D = (_names(config, *pair) for pair in (("A", A), ("B", B), ("C", C), ("D", D)))
    kernel = _kernel(config, any(map(needs_kernel, A + C)))
    return Plan(A, B, C, D, kernel, _terms(config), letters)


def _preset(config: PadreConfig, degree: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    first = config.token if degree == 1 or config.preset == "full" else "identity"
    inner = "identity" if degree == 2 and config.preset == "paper" else config.token
    return (first, *(config.token,) * (degree - 1)), (inner,) * (degree - 1)


def _letters(config: PadreConfig) -> str:
    count = config.degree + config.denominator
    if config.pattern is None:
        return "a" * count
    pattern = config.pattern
    allowed = f"{count} letters from a on, at least two of them different, a for x itself"
    known = "abcdefghijklmnop"
    if not isinstance(pattern, str) or len(pattern) != count or set(pattern) != set(known[: len(set(pattern))]):
        raise OptionError("pattern", repr(pattern), allowed, 'Use pattern="aab" at degree=3, say.')
    if len(set(pattern)) == 1:
        raise OptionError("pattern", repr(pattern), allowed, "One input alone needs no pattern: leave it out.")
    return pattern


def _names(config: PadreConfig, letter: str, preset: tuple[str, ...]) -> tuple[str, ...]:
    given, count = getattr(config, letter), len(preset)
    if given is None:
        return preset
    if count == 0:
        allowed = f"None at degree {config.degree}, which has no {letter}"
        raise OptionError(letter, repr(given), allowed, "Leave it out.")
    names = tuple(given) if isinstance(given, (tuple, list)) else (given,) * count
    if len(names) != count:
        of = f" and denominator {config.denominator}" if config.denominator else ""
        allowed = f"one name, or {count} of them at degree {config.degree}{of}"
        raise OptionError(letter, repr(given), allowed, "One for each degree.")
    for name in names:
        check_spec(letter, name)
    return names


def _kernel(config: PadreConfig, needed: bool) -> tuple[int, ...]:
    axes = 1 if config.grid is None else len(config.grid)
    if not needed:
        return (11,) * axes
    size = config.kernel_size
    kernel = tuple(size) if isinstance(size, (tuple, list)) else (size,) * axes
    if len(kernel) != axes:
        raise OptionError("kernel_size", repr(size), f"one number, or {axes} for grid={config.grid}",
                          "One for each axis.")  # fmt: skip
    for k in kernel:
        check_int("kernel_size", k, 1)
        if k % 2 == 0 and not config.causal:
            raise OptionError("kernel_size", k, "an odd number unless causal", f"Use {k - 1} or {k + 1}.")
    return kernel


def _terms(config: PadreConfig) -> tuple[int, ...]:
    if config.terms is None:
        return tuple(range(2, config.degree + 1)) or (1,)
    terms = config.terms if isinstance(config.terms, (tuple, list)) else ()
    known = all(type(i) is int and 1 <= i <= config.degree for i in terms)
    if not terms or not known or len(set(terms)) != len(terms):
        allowed = f"different degrees from 1 to {config.degree}"
        raise OptionError("terms", repr(config.terms), allowed, f"Use terms=({config.degree},), say.")
    if config.degree not in terms:
        cure = f"Use degree={max(terms)}: what lies beyond would be computed for nothing."
        raise OptionError("terms", repr(config.terms), f"terms that include the degree, {config.degree}", cure)
    return tuple(sorted(terms))
