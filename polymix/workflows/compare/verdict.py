"""What the numbers say, in words: from how many tokens on, which mixer, and when to keep attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from polymix.mixers import PomConfig, PomMixer

YARDSTICK = "softmax"
FLOOR = "linear_floor"
WORTH = 1.1  # a smaller gain comes and goes from one run to the next
WELL_TRAINED = 0.95  # on the digits; below it the accuracies say more about the budget than about the mixers


@dataclass(frozen=True)
class Score:
    """Test accuracy of one mixer over the seeds."""

    mean: float
    low: float
    high: float
    runs: int


def scores(content: dict[str, Any]) -> dict[str, Score]:
    """Accuracy by mixer, of those with every run finite."""
    found = {}
    for mixer in labels(content):
        runs = [row["accuracy"] for row in content["training"] if row["mixer"] == mixer]
        if runs and None not in runs:
            found[mixer] = Score(mean(runs), min(runs), max(runs), len(runs))
    return found


def labels(content: dict[str, Any]) -> list[str]:
    return [row["label"] for row in content["mixers"]]


def noise(content: dict[str, Any]) -> float:
    """Two standard errors of a difference of accuracies: what chance alone makes of this many test images and seeds."""
    score = scores(content).get(YARDSTICK)
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
    """Attention's time over the mixer's at n tokens; infinite where only attention was stopped."""
    ours, attention = table[mixer].get(n), table[YARDSTICK].get(n)
    if ours is None:
        return None
    if attention is None:
        return math.inf if n > max(table[YARDSTICK], default=math.inf) else None
    return attention / ours


def crossover(table: dict[str, dict[int, float]], mixer: str) -> float | None:
    """Tokens from which on the mixer is faster than attention at every measured count; None if it never is.

    Between two counts the crossing is found on the straight line in log-log; at the first count there is none before.
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
    """Least-squares slope of log time (or memory) against log N over the upper half of the counts, three at least."""
    counts = sorted(n for n in points if points[n] > 0)
    counts = counts[-max(3, math.ceil(len(counts) / 2)) :]
    if len(counts) < 2:
        return None
    xs, ys = [math.log(n) for n in counts], [math.log(points[n]) for n in counts]
    x_mean, y_mean = mean(xs), mean(ys)
    spread = sum((x - x_mean) ** 2 for x in xs)
    return sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / spread


def good_enough(content: dict[str, Any]) -> list[str]:
    """Mixers that mix, and are as accurate as attention but for noise."""
    score = scores(content)
    if YARDSTICK not in score:
        return []
    limit = score[YARDSTICK].mean - noise(content)
    return [m for m in score if m not in (YARDSTICK, FLOOR) and score[m].mean >= limit]


def clear_of_noise(content: dict[str, Any], mixer: str, n: int) -> bool:
    """Whether nine runs in ten of the mixer, in the whole model, beat attention's median."""
    at = {row["mixer"]: row for row in content["sweep"] if row["scope"] == "host" and row["tokens"] == n}
    ours, attention = at[mixer], at[YARDSTICK]
    return ours["high"] is not None and (attention["latency"] is None or ours["high"] < attention["latency"])


def best_at(table: dict[str, dict[int, float]], candidates: Sequence[str], n: int) -> tuple[str, float] | None:
    """The candidate with the largest gain over attention at n tokens, and the gain."""
    found = [(m, g) for m in candidates if (g := gain(table, m, n)) is not None]
    return max(found, key=lambda pair: pair[1]) if found else None


def count(n: float) -> str:
    """A token count for a sentence: two figures are all that a crossing on a line deserves."""
    digits = 10 ** max(0, math.floor(math.log10(n)) - 1)
    return f"{round(n / digits) * digits:,}"


def times(factor: float) -> str:
    return "while attention passed its budget" if math.isinf(factor) else f"{factor:.3g} times as fast"


def answer(content: dict[str, Any]) -> dict[str, Any]:
    """The verdict: a headline, sentences, and the numbers behind them."""
    host, alone = latencies(content, "host"), latencies(content, "alone")
    n_0 = content["host"]["tokens"]
    candidates = good_enough(content)
    counts = sorted({n for points in host.values() for n in points})
    choices = {n: best_at(host, candidates, n) for n in counts}
    worth = {
        n: pick
        for n, pick in choices.items()
        if pick is not None and pick[1] >= WORTH and clear_of_noise(content, pick[0], n)
    }
    start = next((n for n in counts if all(later in worth for later in counts if later >= n)), None)
    sentences = [_own_size(n_0, choices.get(n_0), worth)]
    if start is not None:
        top = max(worth)
        sentences.append(
            f"For long inputs take {worth[top][0]}: at {top:,} tokens the whole model is {times(worth[top][1])}."
        )
        below = "; below, keep attention" if start > min(counts) else ""
        sentences.append(f"At every measured length from {start:,} tokens on some mixer pays{below}.")
    else:
        sentences.append("Keep attention at every measured length: no mixer of its accuracy is faster throughout.")
    sentences += [
        _speed(alone, row["label"]) + _printed(row["config"], content["settings"]["dim"])
        for row in content["mixers"]
        if row["label"] not in (YARDSTICK, FLOOR)
    ]
    sentences += _accuracy(content, candidates)
    return {
        "headline": sentences[0],
        "sentences": sentences[1:],
        "take": {str(n): pick[0] for n, pick in worth.items()},
        "keep_attention": [n for n in counts if n not in worth],
        "crossover": {
            label: {"alone": crossover(alone, label), "host": crossover(host, label)}
            for label in labels(content) if label != YARDSTICK
        },
        "noise": noise(content),
    }  # fmt: skip


def _own_size(n: int, pick: tuple[str, float] | None, worth: dict[int, tuple[str, float]]) -> str:
    if pick is not None and n in worth:
        speed = f"{times(pick[1])} as with attention"
        return f"At your {n:,} tokens take {pick[0]}: the whole model is as accurate, and {speed}."
    best = f" (the best, {pick[0]}, would be {times(pick[1])})" if pick else ""
    return f"At your {n:,} tokens keep attention: no mixer of its accuracy is clearly faster{best}."


def _speed(table: dict[str, dict[int, float]], label: str) -> str:
    at, counts = crossover(table, label), sorted(table[label])
    if not counts:
        return f"{label} was not measured alone."
    if at is None:
        return f"{label} alone was never faster than attention up to {counts[-1]:,} tokens."
    last = gain(table, label, counts[-1])
    where = f"at every length from {counts[0]:,} tokens on" if at <= counts[0] else f"from about {count(at)} tokens on"
    return f"{label} alone is faster than attention {where}; at {counts[-1]:,} tokens it is {times(last or 0.0)}."


def _printed(config: dict[str, Any], dim: int) -> str:
    """The crossing that PoM's paper counts out, to stand beside the measured one."""
    if config["name"] != "pom":
        return ""
    options = {key: value for key, value in config.items() if key != "name"}
    mixer = PomMixer(PomConfig(**options), dim, device="meta")
    return f" By its paper's count of multiplications it would be from {max(1, round(mixer.crossover())):,} tokens on."


def _accuracy(content: dict[str, Any], candidates: list[str]) -> list[str]:
    score, chance = scores(content), noise(content)
    if YARDSTICK not in score:
        return ["Attention itself did not train to a finite loss: no accuracy can be judged."]
    yard = score[YARDSTICK].mean
    said = [
        f"Accuracy: attention reaches {yard:.1%}. With {content['data']['test']:,} test images and "
        f"{score[YARDSTICK].runs} seed(s), differences under {100 * chance:.1f} points are chance."
    ]
    below = [m for m in score if m not in (YARDSTICK, FLOOR, *candidates)]
    if below:
        said.append(
            "Less accurate than attention beyond chance: "
            + ", ".join(f"{m} ({score[m].mean:.1%})" for m in below)
            + "."
        )
    above = [m for m in score if m not in (YARDSTICK, FLOOR) and score[m].mean > yard + chance]
    if above:
        said.append(
            "More accurate than attention beyond chance: "
            + ", ".join(f"{m} ({score[m].mean:.1%})" for m in above)
            + "."
        )
    diverged = [m for m in labels(content) if m not in score]
    if diverged:
        said.append("Left the finite numbers in training: " + ", ".join(diverged) + ".")
    if FLOOR in score and score[FLOOR].mean >= yard - chance:
        said.append(
            f"A model that mixes no tokens at all ({FLOOR}) reaches {score[FLOOR].mean:.1%} here: this data hardly "
            "needs attention, so it cannot show which mixer keeps up where attention matters: judge that on other data."
        )
    if (yard < WELL_TRAINED and content["settings"]["data"] is None) or content["settings"]["quick"]:
        said.append("Attention is undertrained in this run: take the accuracies as a sign of life, not as a ranking.")
    return said
