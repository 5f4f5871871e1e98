"""What a comparison says: which mixer to use, from which length on, and when to keep attention.

The rule is `polymix.workflows.verdict`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, NamedTuple

from polymix.mixers import PomConfig, PomMixer
from polymix.mixers.registry import ATTENTION, FLOOR
from polymix.numbers import figure, fixed, listed, metric, plural, two_figures
from polymix.train.rows import UP
from polymix.workflows.verdict import FASTER, KEEP, OPEN, REPLACE, UNCLEAR, Contender, Speed, Verdict, judge, span

# Attention's accuracy on the scenes and on the digits, below which it is not trained enough to compare with.
WELL_TRAINED = {"digit scenes": 0.9, "scikit-learn digits": 0.95}
TYPICAL_TOKENS = 256  # tokens: the default data have fewer than the models that people have
MIN_NOISE = 0.01  # of accuracies, and of other metrics as a share of attention's
NOISE_OF_ONE_SEED = 0.05  # such a share where nothing says what chance makes


@dataclass(frozen=True)
class Score:
    """The headline metric of one mixer over the seeds."""

    mean: float
    low: float
    high: float
    runs: int

    @property
    def range(self) -> float:
        """From the lowest to the highest of the seeds."""
        return self.high - self.low


class Headline(NamedTuple):
    """The first metric of the rows, whether more of it is better, and its unit."""

    name: str
    more: bool
    unit: str


def headline(content: dict[str, Any]) -> Headline:
    """By which a comparison judges."""
    row = content["rows"][0]
    name = next(iter(row["metrics"]))
    return Headline(name, row["directions"][name] == UP, row["units"][name])


def scores(content: dict[str, Any]) -> dict[str, Score]:
    """The headline metric by mixer, without those that diverged in any run."""
    by_mixer = {}
    for mixer in labels(content):
        runs = [row["metrics"].get(headline(content).name) for row in content["rows"] if row["mixer"] == mixer]
        if runs and None not in runs:
            by_mixer[mixer] = Score(mean(runs), min(runs), max(runs), len(runs))
    return by_mixer


def labels(content: dict[str, Any]) -> list[str]:
    """The mixers of a comparison, in order."""
    return [row["label"] for row in content["mixers"]]


def noise(content: dict[str, Any]) -> float:
    """The difference in the headline metric that chance alone makes.

    Of accuracies: two standard errors of a difference for this many test samples and seeds; at least 0.01. Of other
    metrics: the widest range over the seeds of a mixer, and at least a hundredth of attention's value; of one seed a
    twentieth of it. Of other accuracies these are shares of 1.
    """
    score = scores(content).get(ATTENTION)
    if score is None:
        return MIN_NOISE
    if content["data"] is None:
        least = _least_noise(content, score, score.runs)
        return least if score.runs == 1 else max(least, *(its.range for its in scores(content).values()))
    p = min(max(score.mean, 0.5 / content["data"]["test"]), 1 - 0.5 / content["data"]["test"])
    return max(MIN_NOISE, 2 * math.sqrt(2 * p * (1 - p) / (content["data"]["test"] * score.runs)))


def uncertainty(content: dict[str, Any], one: str, other: str = ATTENTION) -> float:
    """The difference in the headline metric up to which neither of two mixers is called better.

    The range over the seeds of either, of one seed the widest of all mixers, and at least `noise` on this many test
    samples. Of other metrics at least a hundredth of attention's value, or a twentieth where one of the two has one
    seed.
    """
    found = scores(content)
    pair = found[one], found[other]
    if content["data"] is not None:
        least = noise(content)
    else:
        least = _least_noise(content, found[ATTENTION], min(its.runs for its in pair))
    widest = max(its.range for its in found.values())
    return max(least, *(its.range if its.runs > 1 else widest for its in pair))


def _least_noise(content: dict[str, Any], attention: Score, runs: int) -> float:
    """Where the number of test samples is unknown: a share of attention's value, of accuracies one of 1."""
    whole = 1.0 if headline(content).unit == "%" else abs(attention.mean)
    return (NOISE_OF_ONE_SEED if runs == 1 else MIN_NOISE) * whole


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
    by_mixer: dict[str, dict[int, Speed]] = {label: {} for label in labels(content)}
    for label, points in table.items():
        for n in sorted(points):
            factor, ours, attention = gain(table, label, n), at[label, n], at.get((ATTENTION, n), {})
            if factor is not None and math.isinf(factor):
                by_mixer[label][n] = Speed(math.inf, math.inf, math.inf)
            elif factor is not None:
                one_run = min(len(ours["runs"]), len(attention["runs"])) == 1
                low, high = attention["low"] / ours["high"], attention["high"] / ours["low"]
                by_mixer[label][n] = Speed(factor, low, high, one_run)
    return by_mixer


def timed(content: dict[str, Any]) -> str:
    """What the verdict is about: the whole model ("host") where it was timed, else the mixers alone."""
    return "alone" if content["host"]["tokens"] is None else "host"


def contenders(content: dict[str, Any]) -> list[Contender]:
    """The mixers with their speed in the whole model, or alone where the model was not timed, and their accuracy.

    Without the floor, which mixes nothing, and what diverged.
    """
    score, margin, speed = scores(content), noise(content), speeds(content, timed(content))
    if ATTENTION not in score:
        return []
    sign = 1 if headline(content).more else -1
    others = [m for m in score if m not in (ATTENTION, FLOOR) and m in speed]
    differences = {m: sign * (score[m].mean - score[ATTENTION].mean) for m in others}
    return [Contender(m, speed[m], (value - margin, value + margin)) for m, value in differences.items()]


def good_enough(content: dict[str, Any]) -> list[str]:
    """Mixers that are as accurate as attention, apart from noise."""
    return [contender.name for contender in contenders(content) if contender.accurate]


def answer(content: dict[str, Any]) -> dict[str, Any]:
    """The verdict: a headline, sentences, and the numbers behind them.

    On your data the headline is about their number of tokens. The default data have 16, which nobody's model has: there
    it is about the measured lengths from `USUAL` on.
    """
    host, alone = latencies(content, "host"), latencies(content, "alone")
    own, trained = content["host"]["tokens"], ATTENTION in scores(content)
    candidates = contenders(content)
    counts = sorted({n for points in latencies(content, timed(content)).values() for n in points})
    verdicts = {n: judge(candidates, n, reference=trained) for n in counts}
    if own is None:
        own = max(counts, default=0)
        place = f"By the time of the mixers alone at {own:,} tokens"
    else:
        place = f"At your {own:,} tokens"
    first = judge(candidates, own, place, reference=trained)
    headline_text = first.sentence
    speed = speeds(content, "alone")
    what = "it alone" if timed(content) == "alone" else "the whole model"
    sentences = _at_all_lengths(verdicts, what)
    usual = {n: its for n, its in verdicts.items() if n >= TYPICAL_TOKENS}
    if usual and own < TYPICAL_TOKENS and content["data"] is not None and content["data"]["name"] in WELL_TRAINED:
        headline_text, first = _at_lengths(usual, what), usual[max(usual)]
        name = content["data"]["name"]
        note = f"Accuracy is that on {name} of {own} tokens; times are those of the same model at each length."
        sentences.insert(0, note)
    sentences += [
        _alone(alone, speed[row["label"]], row["label"]) + _published(row["config"], content["settings"]["dim"])
        for row in content["mixers"]
        if row["label"] not in (ATTENTION, FLOOR) and row["config"]
    ]
    sentences += _accuracy(content)
    return {
        "headline": headline_text,
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


def _at_lengths(verdicts: dict[int, Verdict], what: str) -> str:
    """One sentence on several lengths; neighbours with the same answer are named together."""
    groups: list[list[Verdict]] = []
    for n in sorted(verdicts):
        verdict, before = verdicts[n], groups[-1][-1] if groups else None
        same = before is not None and (before.action, before.action == REPLACE and before.mixer) == (
            verdict.action, verdict.action == REPLACE and verdict.mixer)  # fmt: skip
        groups[-1].append(verdict) if same else groups.append([verdict])

    def answered(group: list[Verdict]) -> str:
        place = f"at {listed(f'{its.tokens:,}' for its in group)} tokens"
        if group[0].action != REPLACE:
            return f"{place} {'keep attention' if group[0].action == KEEP else 'the choice is open'}"
        gains = [its.speed.gain for its in group if its.speed is not None]
        speed = f"is {listed(map(figure, gains))} times as fast" if all(map(math.isfinite, gains)) else group[-1].speed
        return f"{place} use {group[0].mixer}: {what} {speed}"

    sentence = "; ".join(map(answered, groups))
    return f"{sentence[0].upper()}{sentence[1:]}."


def _at_all_lengths(verdicts: dict[int, Verdict], what: str) -> list[str]:
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
    sentences = [f"For long inputs use {top.mixer}: at {counts[-1]:,} tokens {what} {top.speed}."]
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


def _accuracy(content: dict[str, Any]) -> list[str]:
    score, chance = scores(content), noise(content)
    name, more, unit = headline(content)
    if ATTENTION not in score:
        return ["Attention itself diverged in training, so no accuracy can be judged."]
    reached, sign = score[ATTENTION].mean, 1 if more else -1
    seeds = plural(score[ATTENTION].runs, "seed")
    if content["data"] is None:
        direction = "more" if more else "less"
        first = f"{spelled(name).capitalize()}: attention reaches {metric(reached, unit)} ({direction} is better). "
        if score[ATTENTION].runs > 1:
            first += f"Over {seeds} differences below {metric(chance, unit)} can be chance."
        else:
            first += f"One seed does not show what chance does; differences below {metric(chance, unit)} are ignored."
    else:
        first = (
            f"Accuracy: attention reaches {metric(reached, unit)}. With {content['data']['test']:,} test samples and "
        )
        first += f"{seeds}, differences below {fixed(chance, 1, 100)} points can be chance"
        first += ", and so can those that the runs of a mixer have." if score[ATTENTION].runs > 1 else "."
    sentences = [first]

    def named(mixers: Sequence[str]) -> str:
        return ", ".join(f"{mixer} ({metric(score[mixer].mean, unit)})" for mixer in mixers)

    others = [m for m in score if m not in (ATTENTION, FLOOR)]
    if below := [m for m in others if sign * (score[m].mean - reached) < -uncertainty(content, m)]:
        sentences.append(f"Clearly less accurate than attention: {named(below)}.")
    if above := [m for m in others if sign * (score[m].mean - reached) > uncertainty(content, m)]:
        sentences.append(f"Clearly more accurate than attention: {named(above)}.")
    if diverged := [m for m in labels(content) if m not in score]:
        sentences.append(f"Diverged in training (loss became NaN or infinite): {', '.join(diverged)}.")
    enough = 0.0 if content["data"] is None else WELL_TRAINED.get(content["data"]["name"], 0.0)
    undertrained = (more and reached < enough) or content["settings"]["quick"]
    if FLOOR in score and sign * (score[FLOOR].mean - reached) >= -chance:
        sentence = f"A model without any token mixing ({FLOOR}) reaches {metric(score[FLOOR].mean, unit)}. "
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


def spelled(name: str) -> str:
    """The name of a metric in words."""
    return name.replace("_", " ")
