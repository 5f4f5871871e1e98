"""The verdict of a comparison in words: which mixer to use, from which length on, and when to keep attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from polymix.mixers import PomConfig, PomMixer
from polymix.mixers.registry import ATTENTION, FLOOR
from polymix.numbers import figure, plural, speedup, two_figures

WORTH = 1.1  # smaller gains vary from run to run
WELL_TRAINED = 0.95  # attention's accuracy on the digits, below which it has not been trained enough to compare with


@dataclass(frozen=True)
class Score:
    """The test accuracy of one mixer over the seeds."""

    mean: float
    low: float
    high: float
    runs: int


def scores(content: dict[str, Any]) -> dict[str, Score]:
    """Accuracy by mixer, without those that diverged in any run."""
    by_mixer = {}
    for mixer in labels(content):
        runs = [row["accuracy"] for row in content["training"] if row["mixer"] == mixer]
        if runs and None not in runs:
            by_mixer[mixer] = Score(mean(runs), min(runs), max(runs), len(runs))
    return by_mixer


def labels(content: dict[str, Any]) -> list[str]:
    """The mixers of a comparison, in order."""
    return [row["label"] for row in content["mixers"]]


def noise(content: dict[str, Any]) -> float:
    """Two standard errors of a difference between accuracies, for this many test images and seeds; at least 0.01."""
    score = scores(content).get(ATTENTION)
    if score is None:
        return 0.01
    p = min(max(score.mean, 0.5 / content["data"]["test"]), 1 - 0.5 / content["data"]["test"])
    return max(0.01, 2 * math.sqrt(2 * p * (1 - p) / (content["data"]["test"] * score.runs)))


def latencies(content: dict[str, Any], scope: str) -> dict[str, dict[int, float]]:
    """Milliseconds by mixer and token count."""
    table: dict[str, dict[int, float]] = {label: {} for label in labels(content)}
    for row in content["sweep"]:
        if row["scope"] == scope and row["latency"] is not None:
            table[row["mixer"]][row["tokens"]] = row["latency"]
    return table


def gain(table: dict[str, dict[int, float]], mixer: str, n: int) -> float | None:
    """The speedup over attention at n tokens; infinite where only attention was stopped."""
    ours, attention = table[mixer].get(n), table[ATTENTION].get(n)
    if ours is None:
        return None
    if attention is None:
        return math.inf if n > max(table[ATTENTION], default=math.inf) else None
    return attention / ours


def crossover(table: dict[str, dict[int, float]], mixer: str) -> float | None:
    """The token count from which on the mixer is faster than attention at every measured count; None if it never is.

    A crossing between two counts is read off the straight line between them in log-log.
    """
    counts = sorted(n for n in table[mixer] if gain(table, mixer, n) is not None)
    wins = [(n, gain(table, mixer, n) or 0.0) for n in counts]
    start = len(wins)
    while start and wins[start - 1][1] > 1:
        start -= 1
    if start == len(wins):
        return None
    if start == 0 or math.isinf(wins[start][1]):
        return float(wins[start][0])
    (n_0, g_0), (n_1, g_1) = wins[start - 1], wins[start]
    share = math.log(g_0) / (math.log(g_0) - math.log(g_1)) if g_0 < 1 else 0.0
    return math.exp(math.log(n_0) + share * (math.log(n_1) - math.log(n_0)))


def slope(points: dict[int, float]) -> float | None:
    """Least-squares slope of log time (or memory) against log N, over the upper half of the counts (at least 3)."""
    counts = sorted(n for n in points if points[n] > 0)
    counts = counts[-max(3, math.ceil(len(counts) / 2)) :]
    if len(counts) < 2:
        return None
    xs, ys = [math.log(n) for n in counts], [math.log(points[n]) for n in counts]
    x_mean, y_mean = mean(xs), mean(ys)
    spread = sum((x - x_mean) ** 2 for x in xs)
    return sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / spread


def good_enough(content: dict[str, Any]) -> list[str]:
    """Mixers that are as accurate as attention, apart from noise. The floor, which mixes nothing, is none of them."""
    score = scores(content)
    if ATTENTION not in score:
        return []
    limit = score[ATTENTION].mean - noise(content)
    return [m for m in score if m not in (ATTENTION, FLOOR) and score[m].mean >= limit]


def clear_of_noise(content: dict[str, Any], mixer: str, n: int) -> bool:
    """Whether nine runs in ten of the whole model with the mixer are faster than attention's median."""
    at = {row["mixer"]: row for row in content["sweep"] if row["scope"] == "host" and row["tokens"] == n}
    ours, attention = at[mixer], at[ATTENTION]
    return ours["high"] is not None and (attention["latency"] is None or ours["high"] < attention["latency"])


def best_at(table: dict[str, dict[int, float]], candidates: Sequence[str], n: int) -> tuple[str, float] | None:
    """The candidate with the largest speedup over attention at n tokens, and the speedup."""
    gains = [(m, g) for m in candidates if (g := gain(table, m, n)) is not None]
    return max(gains, key=lambda pair: pair[1]) if gains else None


def faster(factor: float) -> str:
    """A speedup in words."""
    return "within the budget, which attention exceeds" if math.isinf(factor) else speedup(factor)


def answer(content: dict[str, Any]) -> dict[str, Any]:
    """The verdict: a headline, sentences, and the numbers behind them."""
    host, alone = latencies(content, "host"), latencies(content, "alone")
    own_tokens = content["host"]["tokens"]
    candidates = good_enough(content)
    counts = sorted({n for points in host.values() for n in points})
    best = {n: best_at(host, candidates, n) for n in counts}
    worth = {
        n: pick
        for n, pick in best.items()
        if pick is not None and pick[1] >= WORTH and clear_of_noise(content, pick[0], n)
    }
    sentences = [_at_own_size(own_tokens, best.get(own_tokens), worth), *_at_all_lengths(counts, worth)]
    sentences += [
        _alone(alone, row["label"]) + _published(row["config"], content["settings"]["dim"])
        for row in content["mixers"]
        if row["label"] not in (ATTENTION, FLOOR)
    ]
    sentences += _accuracy(content, candidates)
    return {
        "headline": sentences[0],
        "sentences": sentences[1:],
        "take": {str(n): pick[0] for n, pick in worth.items()},
        "keep_attention": [n for n in counts if n not in worth],
        "crossover": {
            label: {"alone": crossover(alone, label), "host": crossover(host, label)}
            for label in labels(content) if label != ATTENTION
        },
        "noise": noise(content),
    }  # fmt: skip


def _at_own_size(n: int, pick: tuple[str, float] | None, worth: dict[int, tuple[str, float]]) -> str:
    if pick is not None and n in worth:
        return f"At your {n:,} tokens use {pick[0]}: the model is as accurate as with attention, and {faster(pick[1])}."
    best = ""
    if pick:
        speed = f"is {faster(pick[1])}" if pick[1] >= 1 else f"takes {figure(1 / pick[1])} times as long"
        best = f" (the fastest, {pick[0]}, {speed})"
    return f"At your {n:,} tokens keep attention: no mixer that is as accurate is clearly faster{best}."


def _at_all_lengths(counts: Sequence[int], worth: dict[int, tuple[str, float]]) -> list[str]:
    start = next((n for n in counts if all(later in worth for later in counts if later >= n)), None)
    if start is None:
        if worth:
            lengths = ", ".join(f"{n:,}" for n in worth)
            return [f"A mixer is worth it only at {lengths} tokens. At all other measured lengths keep attention."]
        return ["Keep attention at every measured length: no mixer as accurate is consistently faster."]
    top = max(worth)
    mixer, factor = worth[top]
    below = f" Below {start:,} tokens keep attention." if start > min(counts) else ""
    return [
        f"For long inputs use {mixer}: at {top:,} tokens the whole model is {faster(factor)}.",
        f"From {start:,} tokens on, some mixer is worth it at every measured length.{below}",
    ]


def _alone(table: dict[str, dict[int, float]], label: str) -> str:
    """One mixer by itself against attention by itself."""
    at, counts = crossover(table, label), sorted(table[label])
    if not counts:
        return f"{label} alone was not measured."
    if at is None:
        return f"{label} alone was never faster than attention up to {counts[-1]:,} tokens."
    last = gain(table, label, counts[-1])
    start = f"at every measured length ({counts[0]:,} tokens and up)"
    where = start if at <= counts[0] else f"from about {two_figures(at)} tokens on"
    return f"{label} alone is faster than attention {where}; at {counts[-1]:,} tokens it is {faster(last or 0.0)}."


def _published(config: dict[str, Any], dim: int) -> str:
    """The crossing that PoM's paper predicts, next to the measured one."""
    if config["name"] != "pom":
        return ""
    options = {key: value for key, value in config.items() if key != "name"}
    mixer = PomMixer(PomConfig(**options), dim, device="meta")
    return f" By the paper's count of multiplications it would be from {max(1, round(mixer.crossover())):,} tokens on."


def _accuracy(content: dict[str, Any], candidates: list[str]) -> list[str]:
    score, chance = scores(content), noise(content)
    if ATTENTION not in score:
        return ["Attention itself diverged in training, so no accuracy can be judged."]
    reached, images = score[ATTENTION].mean, content["data"]["test"]
    sentences = [
        f"Accuracy: attention reaches {reached:.1%}. With {images:,} test images and "
        f"{plural(score[ATTENTION].runs, 'seed')}, differences below {100 * chance:.1f} points can be chance."
    ]
    below = [m for m in score if m not in (ATTENTION, FLOOR, *candidates)]
    if below:
        sentences.append(f"Clearly less accurate than attention: {_listed(below, score)}.")
    above = [m for m in score if m not in (ATTENTION, FLOOR) and score[m].mean > reached + chance]
    if above:
        sentences.append(f"Clearly more accurate than attention: {_listed(above, score)}.")
    diverged = [m for m in labels(content) if m not in score]
    if diverged:
        sentences.append(f"Diverged in training (loss became NaN or infinite): {', '.join(diverged)}.")
    if FLOOR in score and score[FLOOR].mean >= reached - chance:
        sentences.append(
            f"A model without any token mixing ({FLOOR}) reaches {score[FLOOR].mean:.1%}. These data hardly need "
            "attention, so they cannot show which mixer is accurate where attention matters. Use other data for that."
        )
    if (reached < WELL_TRAINED and content["settings"]["data"] is None) or content["settings"]["quick"]:
        sentences.append("Attention is undertrained in this run: do not rank the mixers by these accuracies.")
    return sentences


def _listed(mixers: Sequence[str], score: dict[str, Score]) -> str:
    return ", ".join(f"{m} ({score[m].mean:.1%})" for m in mixers)
