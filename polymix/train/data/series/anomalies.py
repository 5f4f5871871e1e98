"""How well scores of steps find anomalies: the area under the ROC, F1, and the point-adjusted F1, which flatters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from polymix.extras import needs
from polymix.train.data.series.times import Series
from polymix.train.data.series.windows import Window, Windows

Scored = tuple[Tensor, Tensor]  # of the steps of a series: scores, NaN where nothing was observed; 1 at anomalies


def moving_mean(values: Tensor, steps: int) -> Tensor:
    """The mean (T) of what is no NaN among the `steps` steps around each of values (T); NaN where all are."""
    known = values.isfinite()
    around = (steps // 2, steps - 1 - steps // 2)
    sums = [pad(part, around).unfold(0, steps, 1).sum(-1) for part in (values.nan_to_num(0.0), known.to(values.dtype))]
    return torch.where(known, sums[0] / sums[1], values)


def runs(chosen: Tensor) -> list[tuple[int, int]]:
    """Where the runs of True in chosen (T) begin, and the first step after each."""
    result, place = [], 0
    for value, group in groupby(chosen.tolist()):
        length = len(list(group))
        if value:
            result.append((place, place + length))
        place += length
    return result


def point_adjusted(scores: Tensor, labels: Tensor) -> Tensor:
    """The scores (T), where all steps of an anomaly have its highest.

    Papers measure F1 of these, so that one step over the threshold counts as all of a long anomaly: random scores can
    reach more than models (Kim et al., AAAI 2022). It is here to be compared with what papers print.
    """
    result = scores.clone()
    for first, last in runs(labels.bool()):
        result[first:last] = scores[first:last].max()
    return result


def quality(parts: Sequence[Scored], threshold: float | None = None) -> dict[str, float]:
    """What scores are worth: auc, of the ROC; f1_best, of the best threshold there is; f1_adjusted, point-adjusted.

    With a threshold, chosen without labels, f1 too. Empty where no step or every step is an anomaly.
    """
    known = [(scores[seen], labels[seen]) for scores, labels in parts for seen in (scores.isfinite(),)]
    scores, labels = (torch.cat(part) for part in zip(*known, strict=True))
    if labels.unique().numel() < 2:
        return {}
    with needs("train"):
        from sklearn.metrics import roc_auc_score
    result = {"auc": float(roc_auc_score(labels.numpy(), scores.numpy()))}
    if threshold is not None:
        above = scores > threshold
        right = float((above & labels.bool()).sum())
        result["f1"] = 2 * right / float(above.sum() + labels.sum())
    adjusted = torch.cat([point_adjusted(*part) for part in known])
    return {**result, "f1_best": best_f1(scores, labels), "f1_adjusted": best_f1(adjusted, labels)}


def best_f1(scores: Tensor, labels: Tensor) -> float:
    """The highest F1 that any threshold has."""
    with needs("train"):
        from sklearn.metrics import precision_recall_curve
    precision, recall, _ = precision_recall_curve(labels.numpy(), scores.numpy())
    return float((2 * precision * recall / (precision + recall).clip(1e-12)).max())


def by_chance(labels: Iterable[Tensor]) -> list[Scored]:
    """Random scores of the same steps."""
    draw = torch.Generator().manual_seed(0)
    return [(torch.rand(len(one), generator=draw), one) for one in labels]


def apart(window: Window, output: Tensor) -> Tensor:
    """|y − output| (B, V, H) of a batch, NaN where nothing was observed."""
    future = slice(window.values.shape[-1] - output.shape[-1], None)
    error = (window.values[..., future] - output).abs()
    return error.where(window.observed[..., future], torch.nan)


def _labels(windows: Windows) -> dict[int, tuple[int, Tensor]]:
    """By series, whose variables share them: the first step that windows forecast, and all labels."""
    result: dict[int, tuple[int, Tensor]] = {}
    for which, start in windows.places:
        one = windows.series[which].series
        labels = torch.zeros(len(one)) if one.labels is None else torch.from_numpy(one.labels).float()
        result.setdefault(id(one.labels), (start, labels))
    return result


def scored(windows: Windows, errors: Tensor, smooth: int) -> list[Scored]:
    """Scores and labels of each series' steps from the first window on, from errors (n, V, H) of windows in a row.

    The error of a step is averaged over the variables and over `smooth` steps around it.
    """
    rows: dict[int, list[Tensor]] = {}
    for (which, _), error in zip(windows.places, errors.nanmean(1), strict=True):
        rows.setdefault(which, []).append(error)
    series: dict[int, list[Tensor]] = {}
    for which, parts in rows.items():
        series.setdefault(id(windows.series[which].series.labels), []).append(torch.cat(parts))
    labels = _labels(windows)
    scored = []
    for key, parts in series.items():
        first, its = labels[key]
        score = torch.stack(parts).nanmean(0)[: len(its) - first]
        scored.append((moving_mean(score, smooth), its[first : first + len(score)]))
    return scored


def run_of(series: Series, first: int, last: int) -> dict[str, Any]:
    """A run of steps as JSON has it, with its times where they are known."""
    times = series.times(first, last + 1)
    known = {} if times is None else {"times": [str(times[0]), str(times[-1])]}
    return {"first": first, "last": last, **known}
