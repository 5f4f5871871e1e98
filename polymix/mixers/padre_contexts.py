"""PADRe of several inputs: which factor reads which input, in one pattern or several (PADRe, App. A.1)."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from polymix.errors import OptionError, ShapeError
from polymix.structured import StructuredMap

_LETTERS = "abcdefghijklmnop"


class Factors(NamedTuple):
    """The different factors Y_i^(c) of all patterns. Patterns with the same input at the same place share a factor.

    letters: the input c of each factor. places: its index i, from 0. patterns: the factors of each pattern, in order.
    """

    letters: str
    places: tuple[int, ...]
    patterns: tuple[tuple[int, ...], ...]


def read_patterns(pattern: Any, count: int) -> Factors:
    """The factors that `pattern` names: None, letters such as "aab", or a tuple of them, each for `count` factors.

    Raises:
        OptionError: a pattern has another length, reads one input alone, appears twice, or skips a letter.
    """
    if pattern is None:
        return Factors("a" * count, tuple(range(count)), (tuple(range(count)),))
    allowed = f"{count} letters from a on, at least two of them different, a for x itself"
    patterns = pattern if isinstance(pattern, (tuple, list)) else (pattern,)
    used: set[str] = set().union(*(set(each) for each in patterns if isinstance(each, str)))
    consecutive = used == set(_LETTERS[: len(used)])
    if not patterns or not consecutive or any(not isinstance(each, str) or len(each) != count for each in patterns):
        raise OptionError("pattern", repr(pattern), allowed, 'Use for example pattern="aab" at degree=3.')
    if any(len(set(each)) == 1 for each in patterns):
        raise OptionError("pattern", repr(pattern), allowed, "Leave it out: a single input needs no pattern.")
    if len(set(patterns)) != len(patterns):
        raise OptionError("pattern", repr(pattern), "different patterns", "Name each once.")
    factors = sorted({(place, letter) for each in patterns for place, letter in enumerate(each)})
    letters = "".join(letter for _, letter in factors)
    indices = tuple(tuple(factors.index(pair) for pair in enumerate(each)) for each in patterns)
    return Factors(letters, tuple(place for place, _ in factors), indices)


def crossing(part: nn.Module) -> bool:
    """Whether a token map changes the number of tokens."""
    return isinstance(part, StructuredMap) and part.site.cross


def cross_factors(
    A: Any, B: Any, letters: str, inputs: dict[str, tuple[Tensor, Tensor | None]], grid: tuple[int, ...]
) -> list[Tensor]:
    """The factors Y = A (X B) of inputs (tokens, mask) by letter; all get the length of x, the input "a".

    Raises:
        ShapeError: an input has another length than x, and its A cannot change it.
    """
    n = inputs["a"][0].shape[1]
    for token, letter in zip(A, letters, strict=True):
        length = inputs[letter][0].shape[1]
        if length != n and not crossing(token):
            cure = 'Set its A to "mean", "dense", "low_rank", "rank_one" or "sparse", which change the length.'
            raise ShapeError("context", f"{length} tokens for input {letter}", f"{n}, as many as x has", cure)
    projected = {letter: iter(B[letter](u)) for letter, (u, _) in inputs.items()}
    ys: list[Tensor] = []
    for token, letter in zip(A, letters, strict=True):
        u, mask = next(projected[letter]), inputs[letter][1]
        ys.append(token(u, None, mask, out=n) if crossing(token) else token(u, grid, mask))
    return ys


def hide(x: Tensor, mask: Tensor | None) -> Tensor:
    """x with zeros at padding, so that its values reach neither outputs nor gradients."""
    return x if mask is None else x.masked_fill(~mask.unsqueeze(-1), 0.0)
