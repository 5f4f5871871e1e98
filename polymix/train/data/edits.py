"""Edit distances between what was read or heard and the truth, in characters or words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polymix.extras import needs


def distance(output: Sequence[str], true: Sequence[str]) -> int:
    """The fewest characters of a text, or words of a list, to replace, put in or leave out."""
    return int(_levenshtein().distance(output, true))


def error_rates(heard: Sequence[str], true: Sequence[str]) -> dict[str, float]:
    """wer and cer: edits from all texts to all that is true, as shares of its words and of its characters."""
    pairs = list(zip(heard, true, strict=True))
    words = sum(distance(text.split(), truth.split()) for text, truth in pairs)
    characters = sum(distance(text, truth) for text, truth in pairs)
    return {"wer": words / max(1, sum(len(truth.split()) for truth in true)),
            "cer": characters / max(1, sum(map(len, true)))}  # fmt: skip


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
