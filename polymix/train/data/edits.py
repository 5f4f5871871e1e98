"""Edit distances between what was read or heard and the truth, in characters or words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polymix.extras import needs


def distance(output: Sequence[str], true: Sequence[str]) -> int:
    """The fewest characters of a text, or words of a list, to replace, put in or leave out."""
    return int(_levenshtein().distance(output, true))


def wrong_places(output: Sequence[str], true: Sequence[str]) -> tuple[set[int], int]:
    """The places of the truth that were left out or taken for another, and how many were put in."""
    changes = _levenshtein().editops(output, true)
    # "insert": lacks in the output
    wrong = {change.dest_pos for change in changes if change.tag in ("replace", "insert")}
    return wrong, sum(change.tag == "delete" for change in changes)


def _levenshtein() -> Any:
    with needs("handwriting", "Errors are counted with it."):
        from rapidfuzz.distance import Levenshtein
    return Levenshtein
