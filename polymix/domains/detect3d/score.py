"""nuScenes' detection score: average precision by distance of centres, five errors of true positives, and NDS."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy

DISTANCES = (0.5, 1.0, 2.0, 4.0)  # metres on the ground at which a prediction matches
ERRORS = ("ATE", "ASE", "AOE", "AVE", "AAE")
ERROR_DISTANCE = 2.0  # the distance of matches whose errors count
MIN_RECALL, MIN_PRECISION = 0.1, 0.1
RANGES = {"car": 50.0, "truck": 50.0, "bus": 50.0, "trailer": 50.0, "construction_vehicle": 50.0, "pedestrian": 40.0,
          "motorcycle": 40.0, "bicycle": 40.0, "cyclist": 40.0, "traffic_cone": 30.0, "barrier": 30.0}  # fmt: skip
DEFAULT_RANGE = 50.0  # of other classes
_UNDEFINED = {"traffic_cone": ("AOE", "AVE", "AAE"), "barrier": ("AVE", "AAE")}
_RECALLS = numpy.linspace(0, 1, 101)
_FIRST_RECALL = round(100 * MIN_RECALL) + 1


class Sample(NamedTuple):
    """Boxes float64 (n, 9) in the vehicle's frame, classes by name (n,), attributes (n,), and scores (n,) or None."""

    boxes: Any
    names: Any
    attributes: Any
    scores: Any = None


def in_range(sample: Sample, points: Any = None) -> Sample:
    """The boxes within their class's distance from the vehicle, and with a point if `points` (n,) are given."""
    reach = numpy.array([RANGES.get(name, DEFAULT_RANGE) for name in sample.names])
    inside = numpy.hypot(sample.boxes[:, 0], sample.boxes[:, 1]) < reach if len(reach) else numpy.zeros(0, bool)
    inside = inside & (points > 0) if points is not None else inside
    return Sample(*(None if part is None else part[inside] for part in sample))


def detection_score(
    truths: Sequence[Sample], predictions: Sequence[Sample], classes: Sequence[str]
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """NDS, mAP and the five errors, and a row with AP at each distance and the errors of each class.

    A prediction matches the nearest free true box of its class and sample below a distance, the best score first. AP =
    mean over recalls above 0.1 of max(0, precision - 0.1) / 0.9, and mAP its mean over distances and classes. The
    errors are running means of matches within 2 m, averaged over recalls above 0.1: ATE, distance in metres; ASE, 1 -
    IoU of boxes put onto each other; AOE, turn in radians; AVE, metres per second; AAE, 1 - share of right attributes.
    NDS = (5 mAP + Σ max(0, 1 - error)) / 10. An error that no class defines (no velocities, as in KITTI) is left out of
    the metrics, and so is NDS then. Costs O(predictions · true boxes of a sample).

    Source: Caesar et al. 2020 (nuScenes), Section 3.2.

    Args:
        truths, predictions: for each sample, as `in_range` leaves them. classes: to average over.
    """
    rows = []
    for name in classes:
        curves = {distance: _curves(truths, predictions, name, distance) for distance in DISTANCES}
        row: dict[str, Any] = {"name": name}
        row |= {f"AP {distance} m": _precision(curves[distance]) for distance in DISTANCES}
        row["AP"] = float(numpy.mean([row[f"AP {distance} m"] for distance in DISTANCES]))
        curve = curves[ERROR_DISTANCE]
        row |= {error: math.nan if error in _UNDEFINED.get(name, ()) else _error(curve, error) for error in ERRORS}
        rows.append(row)
    metrics = {"mAP": float(numpy.mean([row["AP"] for row in rows]))}
    for error in ERRORS:
        values = [row[error] for row in rows if not math.isnan(row[error])]
        if values and _known(truths, error):
            metrics[error] = float(numpy.mean(values))
    if len(metrics) == 1 + len(ERRORS):
        score = (5 * metrics["mAP"] + sum(max(0.0, 1 - metrics[error]) for error in ERRORS)) / 10
        metrics = {"NDS": score, **metrics}
    return metrics, [{key: value for key, value in row.items() if value == value} for row in rows]


def _known(truths: Sequence[Sample], error: str) -> bool:
    """Whether any true box has what the error is about."""
    if error == "AVE":
        return any(numpy.isfinite(sample.boxes[:, 7]).any() for sample in truths)
    return error != "AAE" or any((sample.attributes != "").any() for sample in truths)


def _curves(
    truths: Sequence[Sample], predictions: Sequence[Sample], name: str, distance: float
) -> Mapping[str, Any] | None:
    """Precision, score and errors at 101 recalls; None without a match."""
    true = [numpy.flatnonzero(sample.names == name) for sample in truths]
    count = sum(map(len, true))
    order: list[tuple[float, int, int]] = sorted(
        (float(sample.scores[place]), number, int(place))
        for number, sample in enumerate(predictions)
        for place in numpy.flatnonzero(sample.names == name)
    )[::-1]
    taken: set[tuple[int, int]] = set()
    hits: list[bool] = []
    matched: list[tuple[float, ...]] = []
    for score, number, place in order:
        box, best, nearest = predictions[number].boxes[place], None, math.inf
        for other in true[number]:
            if (number, int(other)) not in taken:
                gap = math.hypot(*(truths[number].boxes[other, :2] - box[:2]))
                if gap < nearest:
                    best, nearest = int(other), gap
        hits.append(best is not None and nearest < distance)
        if best is not None and hits[-1]:
            taken.add((number, best))
            attributes = truths[number].attributes[best], predictions[number].attributes[place]
            matched.append((score, *_errors(truths[number].boxes[best], box, attributes, name)))
    if not matched:
        return None
    right = numpy.cumsum(hits)
    recall, precision = right / count, right / numpy.arange(1, len(hits) + 1)
    scores = numpy.array([row[0] for row in order])
    at = numpy.interp(_RECALLS, recall, scores, right=0)
    curves: dict[str, Any] = {"precision": numpy.interp(_RECALLS, recall, precision, right=0), "score": at}
    table = numpy.array(matched)
    for place, error in enumerate(ERRORS, 1):
        mean = _running_mean(table[:, place])
        curves[error] = numpy.interp(at[::-1], table[::-1, 0], mean[::-1])[::-1]
    return curves


def _errors(truth: Any, box: Any, attributes: tuple[str, str], name: str) -> tuple[float, ...]:
    """The five errors of one match; not a number where the truth does not tell."""
    smaller = float(numpy.minimum(truth[3:6], box[3:6]).prod())
    scale = 1 - smaller / float(truth[3:6].prod() + box[3:6].prod() - smaller)
    period = math.pi if name == "barrier" else 2 * math.pi
    turn = abs((truth[6] - box[6] + period / 2) % period - period / 2)
    speed = math.hypot(*(truth[7:9] - box[7:9]))
    attribute = math.nan if attributes[0] == "" else float(attributes[0] != attributes[1])
    return math.hypot(*(truth[:2] - box[:2])), scale, float(turn), speed, attribute


def _running_mean(values: Any) -> Any:
    """The mean of the values so far that are numbers: 0 before the first, and 1 throughout if there is none."""
    known = ~numpy.isnan(values)
    if not known.any():
        return numpy.ones(len(values))
    count = known.cumsum()
    return numpy.divide(numpy.nancumsum(values), count, out=numpy.zeros(len(values)), where=count > 0)


def _precision(curves: Mapping[str, Any] | None) -> float:
    if curves is None:
        return 0.0
    return float(numpy.clip(curves["precision"][_FIRST_RECALL:] - MIN_PRECISION, 0, None).mean() / (1 - MIN_PRECISION))


def _error(curves: Mapping[str, Any] | None, error: str) -> float:
    """The mean over recalls from above 0.1 to the highest one reached; 1 if that is not above 0.1."""
    reached: Any = numpy.flatnonzero(curves["score"]) if curves is not None else []
    if curves is None or not len(reached) or reached[-1] < _FIRST_RECALL:
        return 1.0
    return float(curves[error][_FIRST_RECALL : reached[-1] + 1].mean())
