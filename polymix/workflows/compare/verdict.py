"""What a comparison says: which mixer to use, from which length on, and when to keep attention.

The rule is `polymix.workflows.verdict`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from polymix.mixers import PomConfig, PomMixer
from polymix.mixers.registry import ATTENTION, FLOOR
from polymix.numbers import fixed, listed, percent, plural, two_figures
from polymix.workflows.verdict import FASTER, OPEN, REPLACE, UNCLEAR, Contender, Speed, Verdict, judge, span

# Attention's accuracy on the scenes and on the digits, below which it is not trained enough to compare with.
WELL_TRAINED = {None: 0.9, "digits": 0.95}


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


def speeds(content: dict[str, Any], scope: str) -> dict[str, dict[int, Speed]]:
    """The speedup over attention by mixer and number of tokens, where both were measured, or attention was stopped."""
    at = {(row["mixer"], row["tokens"]): row for row in content["sweep"] if row["scope"] == scope}
    table = latencies(content, scope)
    found: dict[str, dict[int, Speed]] = {label: {} for label in labels(content)}
    for label, points in table.items():
        for n in sorted(points):
            factor, ours, attention = gain(table, label, n), at[label, n], at.get((ATTENTION, n), {})
            if factor is not None and math.isinf(factor):
                found[label][n] = Speed(math.inf, math.inf, math.inf)
            elif factor is not None:
                one_run = min(len(ours["runs"]), len(attention["runs"])) == 1
                low, high = attention["low"] / ours["high"], attention["high"] / ours["low"]
                found[label][n] = Speed(factor, low, high, one_run)
    return found


def contenders(content: dict[str, Any]) -> list[Contender]:
    """The mixers in the whole model, with their accuracy; without the floor, which mixes nothing, and what diverged."""
    score, margin, speed = scores(content), noise(content), speeds(content, "host")
    if ATTENTION not in score:
        return []
    differences = {m: score[m].mean - score[ATTENTION].mean for m in score if m not in (ATTENTION, FLOOR)}
    return [Contender(m, speed[m], (value - margin, value + margin)) for m, value in differences.items()]


def good_enough(content: dict[str, Any]) -> list[str]:
    """Mixers that are as accurate as attention, apart from noise."""
    return [contender.name for contender in contenders(content) if contender.accurate]


def answer(content: dict[str, Any]) -> dict[str, Any]:
    """The verdict: a headline, sentences, and the numbers behind them."""
    host, alone = latencies(content, "host"), latencies(content, "alone")
    own, trained = content["host"]["tokens"], ATTENTION in scores(content)
    candidates = contenders(content)
    counts = sorted({n for points in host.values() for n in points})
    verdicts = {n: judge(candidates, n, reference=trained) for n in counts}
    first = judge(candidates, own, f"At your {own:,} tokens", reference=trained)
    speed = speeds(content, "alone")
    sentences = _at_all_lengths(verdicts)
    sentences += [
        _alone(alone, speed[row["label"]], row["label"]) + _published(row["config"], content["settings"]["dim"])
        for row in content["mixers"]
        if row["label"] not in (ATTENTION, FLOOR)
    ]
    sentences += _accuracy(content, [it.name for it in candidates if it.accurate])
    return {
        "headline": first.sentence,
        "sentences": sentences,
        "verdict": first.to_dict(),
        "take": {str(n): its.mixer for n, its in verdicts.items() if its.action == REPLACE},
        "keep_attention": [n for n, its in verdicts.items() if its.action != REPLACE],
        "open": [n for n, its in verdicts.items() if its.action == OPEN],
        "crossover": {
            label: {"alone": crossover(alone, label), "host": crossover(host, label)}
            for label in labels(content) if label != ATTENTION
        },
        "noise": noise(content),
    }  # fmt: skip


def _at_all_lengths(verdicts: dict[int, Verdict]) -> list[str]:
    """What holds at the other lengths; nothing where there is none."""
    counts = sorted(verdicts)
    worth = [n for n in counts if verdicts[n].action == REPLACE]
    doubt = [n for n in counts if verdicts[n].action == OPEN]
    if len(counts) < 2:
        return []
    unsure = f" At {listed(f'{n:,}' for n in doubt)} tokens the choice is open." if doubt else ""
    if not worth:
        if doubt:
            return [f"At no measured length is a mixer clearly worth it.{unsure}"]
        return ["Keep attention at every measured length: no mixer as accurate is consistently faster."]
    if counts[-1] not in worth:
        keep = "At all other measured lengths keep attention." if not doubt else f"Elsewhere keep attention.{unsure}"
        return [f"A mixer is worth it only at {listed(f'{n:,}' for n in worth)} tokens. {keep}"]
    top = verdicts[counts[-1]]
    sentences = [f"For long inputs use {top.mixer}: at {counts[-1]:,} tokens the whole model {top.speed}."]
    start = next(n for n in counts if all(later in worth for later in counts if later >= n))
    before = [n for n in counts if n < start]
    if not before:
        return [*sentences, f"Some mixer is worth it {span(dict.fromkeys(counts, True))}."]
    below = f" Below {start:,} tokens keep attention." if not set(before) & {*worth, *doubt} else unsure
    if start == counts[-1]:
        return [*sentences, f"That is the longest length measured.{below}"]
    return [*sentences, f"From {start:,} tokens on, some mixer is worth it at every measured length.{below}"]


def _alone(table: dict[str, dict[int, float]], speed: dict[int, Speed], label: str) -> str:
    """One mixer by itself against attention by itself."""
    counts = sorted(speed)
    if not counts:
        return f"{label} alone was not measured."
    at, last = crossover(table, label), speed[counts[-1]]
    if len(counts) == 1:
        doubt = f", but {last.doubt}" if last.outcome == UNCLEAR else ""
        return f"Against attention alone at {counts[0]:,} tokens, the only length measured, {label} {last}{doubt}."
    if at is None:
        if any(its.gain > 1 for its in speed.values()):
            return f"{label} alone is not faster than attention at {counts[-1]:,} tokens, the longest length measured."
        return f"{label} alone was never faster than attention up to {counts[-1]:,} tokens."
    if last.outcome != FASTER:
        doubt = "about as fast as" if last.outcome != UNCLEAR else "not clearly faster than"
        return f"{label} alone is {doubt} attention at {counts[-1]:,} tokens, the longest length measured."
    start = f"at every measured length ({counts[0]:,} to {counts[-1]:,} tokens)"
    where = start if at <= counts[0] else f"from about {two_figures(at)} tokens on"
    return f"{label} alone is faster than attention {where}; at {counts[-1]:,} tokens it {last}."


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
        f"Accuracy: attention reaches {percent(reached)}. With {images:,} test images and "
        f"{plural(score[ATTENTION].runs, 'seed')}, differences below {fixed(chance, 1, 100)} points can be chance."
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
    undertrained = reached < WELL_TRAINED.get(content["settings"]["data"], 0.0) or content["settings"]["quick"]
    if FLOOR in score and score[FLOOR].mean >= reached - chance:
        sentence = f"A model without any token mixing ({FLOOR}) reaches {percent(score[FLOOR].mean)}. "
        if undertrained:
            sentence += "So attention has not learned to mix in a run this short."
        else:
            sentence += (
                "These data hardly need attention, so they cannot show which mixer is accurate where attention "
                "matters. Use other data for that."
            )
        sentences.append(sentence)
    if undertrained:
        sentences.append("Attention is undertrained in this run: do not rank the mixers by these accuracies.")
    return sentences


def _listed(mixers: Sequence[str], score: dict[str, Score]) -> str:
    return ", ".join(f"{m} ({percent(score[m].mean)})" for m in mixers)
