"""Objects by their score: which reach a threshold, and what is said of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from polymix.numbers import figure, plural


def reaching(objects: Mapping[str, Tensor], threshold: float) -> dict[str, Tensor]:
    """The objects whose score is at least the threshold. objects: "scores" (k) and other tensors of k rows."""
    high = objects["scores"] >= threshold
    return {name: value[high] for name, value in objects.items()}


def said_of(objects: Mapping[str, Tensor], classes: Sequence[str], threshold: float) -> str:
    """How many objects reach the threshold, or what the best one has.

    objects: "scores" (k) and "labels" (k).
    """
    scores = objects["scores"]
    if not len(scores):
        return "no object"
    count, best = int((scores >= threshold).sum()), int(scores.argmax())
    if count:
        return f"{plural(count, 'object')} with a score of at least {threshold:g}"
    name = classes[int(objects["labels"][best])]
    return f"no object reaches a score of {threshold:g}; the best, '{name}', has {figure(float(scores[best]))}"
