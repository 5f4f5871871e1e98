"""The stages of a search. What one finds is in the results before the next begins, so that a search can go on."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polymix.convert.plan import KEEP
from polymix.convert.trained import PLAN, TrainedPlan, fingerprint, read_plan
from polymix.errors import CapabilityError, DivergedError, OptionError
from polymix.measure.machine import busy, manifest
from polymix.mixers import MixerConfig
from polymix.numbers import listed, percent, plural
from polymix.results import RESULTS, Progress
from polymix.workflows.search.answer import Search, headline
from polymix.workflows.search.candidates import Candidates
from polymix.workflows.search.content import opened
from polymix.workflows.search.damage import CARRIES, Damage, kind_of
from polymix.workflows.search.knapsack import (
    RULES,
    UNITS,
    Front,
    Options,
    Pair,
    by_rule,
    damage_of,
    near_front,
    shortest,
)
from polymix.workflows.search.samples import Samples
from polymix.workflows.search.timing import layer_times

CHECKPOINTS = "checkpoints"  # folder in `out` while a search is not finished
GLANCE = 0.25  # share of the samples on which untrained mixers are scored
DECAY = 0.01  # of the weights, while they imitate
MAX_POINTS = 100  # of the front, in the results


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to search, checked: the arguments of `polymix.search`. keeps: whether a layer may keep its attention."""

    model: nn.Module
    samples: Samples
    mixers: Mapping[str, MixerConfig]
    keeps: bool
    budget: float
    steps: int
    learning_rate: float
    seed: int
    example: Any
    loss: str | None
    forward: Callable[..., Tensor] | None
    seconds: float
    memory: float
    out: Path | None
    resume: bool
    progress: Progress | None
    say: Callable[[str], None]

    @property
    def limit(self) -> int:
        """The budget in units of the knapsack."""
        return int(UNITS * self.budget)

    def bar(self, what: str, total: int) -> Callable[..., None]:
        """A bar for a stage; without bars, a line."""
        if self.progress is not None:
            return self.progress.start(what, total)
        self.say(f"{what[0].upper()}{what[1:]}.")
        return lambda done, note="": None


class Run:
    """One search, from adapters to a plan."""

    def __init__(self, request: Request) -> None:
        from polymix.train.data.sampling import number, seed_all
        from polymix.train.distill.batches import features_of, logits_of, moved

        self.request, self.model, self.samples = request, request.model, request.samples
        self.device = str(next(self.model.parameters()).device)
        first = moved(self.samples.scoring[0], self.device)
        request.say("Converting each layer to each mixer.")
        example = first if request.example is None else request.example
        self.candidates = Candidates(
            self.model, request.mixers, first, example, lambda label: seed_all(number(request.seed, label))
        )
        self.refusals = self._refused()
        self.kind = request.loss or ("logits" if request.forward else kind_of(self.model, first))
        self.forward = request.forward or (features_of if self.kind == "features" else logits_of)
        self.ms: dict[Pair, float | None] = {}

    def _refused(self) -> list[str]:
        """Sentences on mixers that layers cannot have. Raises CapabilityError where a layer has nothing to choose."""
        names, sentences = list(self.candidates.layers), []
        for label, layers in self.candidates.refused.items():
            where = "" if len(layers) == len(names) else f" in {listed(layers)}"
            sentences.append(f"{label} is left out{where}: {next(iter(layers.values()))}.")
        bare = [name for name in names if not self.candidates.labels(name)]
        if bare and (not self.request.keeps or len(bare) == len(names)):
            got = f"{', '.join(self.request.mixers)}, none of which {bare[0] or 'the model'} can have: {sentences[0]}"
            raise CapabilityError("mixers", got, f'a mixer that fits, or "{KEEP}" for such layers', "See polymix list.")
        for sentence in sentences:
            self.request.say(sentence)
        return sentences

    def __call__(self) -> Search:
        request, out = self.request, self.request.out
        settings = {
            "budget": request.budget, "mixers": [*request.mixers, *([KEEP] if request.keeps else [])],
            "steps": request.steps, "learning_rate": request.learning_rate, "seed": request.seed, "damage": self.kind,
            "model": type(self.model).__name__, "weights": fingerprint(self.model), "data": self.samples.fingerprint(),
        }  # fmt: skip
        machine, new = manifest(self.device, torch.get_num_threads()), {}
        if out is None or not (out / RESULTS).exists():
            notes = [*self.refusals, *filter(None, [busy()])]
            new = {"times": self._times(), "refused": self.candidates.refused, "damage": self.kind, "notes": notes}
        self.results = results = opened(out, settings, machine, request.resume, **new)
        content = results.content
        if content["finished"] and out is not None:
            shutil.rmtree(out / CHECKPOINTS, ignore_errors=True)  # there, if it was killed just before its end
            return Search(content, read_plan(out / PLAN))
        self._take_times(content["times"])
        self.scored = Damage(self.model, self.samples.scoring, self.kind, self.forward, request.memory)
        self._warn()
        untrained = self._score("untrained", [pair for pair in self.candidates.adapters if self._useful(pair)])
        return self._finish(self._train(self._near(untrained), untrained))

    # Times

    def _times(self) -> list[dict[str, Any]]:
        bar = self.request.bar("timing layers", len(self.candidates.layers))
        rows = layer_times(self.candidates, self.request.seconds, self.device, bar)
        self._take_times(rows)
        return rows

    def _take_times(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Raises OptionError where no plan is as fast as asked."""
        self.ms = {(row["layer"], row["mixer"]): row["ms"] for row in rows}
        slow = next((name for name in self.candidates.layers if self.ms[name, KEEP] is None), None)
        if slow is not None:
            got = f"one at which the attention of {slow} runs out of memory"
            raise OptionError("input", got, "a shape at which it can be timed", "Use a smaller batch.")
        self.whole = math.fsum(self.ms[name, KEEP] or 0.0 for name in self.candidates.layers)
        options = self._options({}, self.candidates.adapters)
        if not all(options.values()):
            got = f"candidates that all run out of memory in {next(name for name in options if not options[name])}"
            raise CapabilityError("mixers", got, f'one that fits, or "{KEEP}"', "Use a smaller batch.")
        least = shortest(options) / UNITS
        if least > 1:
            got = f"{', '.join(self.request.mixers)}, with which all layers take {least:.3g} times the attention's time"
            raise OptionError("mixers", got, f'faster ones, or "{KEEP}"', "Or pass a longer input.")
        if least > self.request.budget:
            allowed = f"at least {math.ceil(1000 * least) / 1000:g}, the share that the fastest of all plans takes"
            got = f"{self.request.budget:g}, which no plan of these candidates meets"
            cure = "Raise it, or add faster mixers." if least < 1 else "Pass faster mixers, or a longer input."
            raise OptionError("budget", got, allowed, cure)

    def _useful(self, pair: Pair) -> bool:
        """Whether a candidate saves time, or must do because attention may not be kept."""
        ms, attention = self.ms.get(pair), self.ms[pair[0], KEEP]
        return ms is not None and attention is not None and (not self.request.keeps or ms < attention)

    def _options(self, damages: Mapping[Pair, float], known: Collection[Pair]) -> dict[str, Any]:
        """What the knapsack chooses from: the known candidates of each layer, with times in units, and damages."""
        options = {}
        for name in self.candidates.layers:
            pairs = [(name, label) for label in self.candidates.labels(name)]
            pairs = [pair for pair in pairs if pair in known and self._useful(pair)]
            pairs += [(name, KEEP)] if self.request.keeps else []
            options[name] = {
                pair[1]: (int(UNITS * (self.ms[pair] or 0.0) / self.whole), damages.get(pair, 0.0)) for pair in pairs
            }
        return options

    def _budgets(self, options: Options) -> tuple[int, int, int]:
        """The budget, and two between it and both ends of the front."""
        limit = self.request.limit
        return limit, (limit + UNITS) // 2, (limit + shortest(options)) // 2

    # Damages and training

    def _warn(self) -> None:
        """Say so where the original model's output tells nothing of its input."""
        share = self.scored.information()
        if share is not None and share < CARRIES:
            note = (
                f"WARNING: the model's output carries nothing, as with random weights: it tells {percent(share)} of "
                "what it could of its input. A plan found by it means nothing for the trained model."
            )
            self.request.say(note)
            self.results.set(notes=list(dict.fromkeys([*self.results.content["notes"], note])))

    def _score(self, stage: str, pairs: Sequence[Pair]) -> dict[Pair, float]:
        """The damage of each candidate alone; infinite where the output is not finite."""
        rows = [row for row in self.results.content["damages"] if row["stage"] == stage]
        scores = {(row["layer"], row["mixer"]): row["damage"] for row in rows}
        bar = self.request.bar(f"damage of each, {stage}", len(pairs)) if pairs else None
        for place, (layer, label) in enumerate(pairs, 1):
            if (layer, label) not in scores:
                share = GLANCE if stage == "untrained" else 1.0
                value = finite(self.scored(self.candidates.install({layer: label}), share))
                self.results.add("damages", [{"layer": layer, "mixer": label, "stage": stage, "damage": value}])
                scores[layer, label] = value
            if bar is not None:
                bar(place)
        return {pair: math.inf if value is None else value for pair, value in scores.items()}

    def _near(self, untrained: Mapping[Pair, float]) -> list[Pair]:
        """Which candidates to train: those near the front, and what the fixed rules of its first mixer need.

        Untrained damages rank the layers of a mixer, but not mixers, which gain differently by training: so each mixer
        has a front of its own, too.
        """
        options = self._options(untrained, untrained)
        near = near_front(options, self._budgets(options))
        for label in self.request.mixers:
            alone = self._options(untrained, [pair for pair in untrained if pair[1] == label])
            if all(alone.values()):
                near |= near_front(alone, self._budgets(alone))
        front = Front.of(options)
        best = front.least(self.request.limit)
        labels = [label for label in front.plan(best[0]).values() if label != KEEP] if best else []
        for rule in RULES if labels and self.request.keeps else ():
            near |= set((by_rule(rule, max(labels, key=labels.count), options, KEEP, self.request.limit) or {}).items())
        pairs = [pair for pair in self.candidates.adapters if pair in near]
        self.request.say(f"Training {len(pairs)} of {plural(len(untrained), 'candidate')}, those near the front.")
        return pairs

    def _train(self, pairs: Sequence[Pair], untrained: Mapping[Pair, float]) -> dict[Pair, float]:
        """Each mixer imitates the attention in its place; returns the damages. What got worse has its old weights.

        Untrained mixers were scored on fewer samples: what seems worse is scored again with its old weights, on all.
        """
        before = {pair: self.candidates.state(pair) for pair in pairs}
        diverged = list(self.results.content["diverged"])
        for place, label in enumerate(self.request.mixers):
            its = [pair for pair in pairs if pair[1] == label]
            if its and label not in diverged:
                try:
                    self._imitate(its, place, label)
                except DivergedError as error:
                    diverged.append(label)
                    note = f"{label} is not trained: with learning_rate={self.request.learning_rate:g} it diverged."
                    self.request.say(f"{note} {error}")
                    self.results.set(diverged=diverged, notes=[*self.results.content["notes"], note])
            if label in diverged:
                self._restore(its, before)
        trained = self._score("trained", pairs)
        doubtful = [pair for pair in pairs if not trained[pair] < untrained[pair]]
        learnt = {pair: self.candidates.state(pair) for pair in doubtful}
        self._restore(doubtful, before)
        restored = self._score("restored", doubtful)
        self._restore([pair for pair in doubtful if trained[pair] < restored[pair]], learnt)
        return {pair: min(damage, restored.get(pair, math.inf)) for pair, damage in trained.items()}

    def _restore(self, pairs: Sequence[Pair], states: Mapping[Pair, Any]) -> None:
        for pair in pairs:
            self.candidates.adapters[pair].load_state_dict(states[pair])

    def _imitate(self, pairs: Sequence[Pair], place: int, label: str) -> None:
        """Train a mixer in its layers at once: each learns on the original's activations, apart from the others."""
        from polymix.train.distill import imitate
        from polymix.train.distill.comparison import Comparison
        from polymix.train.distill.fit import Fit
        from polymix.train.distill.guard import HeldBack
        from polymix.train.distill.stages import Listener

        request, train = self.request, self.samples.train
        out = None if request.out is None else request.out / CHECKPOINTS / str(place)
        bars = None if request.progress is None else Named(request.progress, f"training {label}")
        fit = Fit(out, out is not None and request.resume, self.device, 1, "float32", Listener(bars, request.say))
        epochs = math.ceil(request.steps / len(train))
        recipe = fit.recipe(train, epochs, request.learning_rate, DECAY, request.seed, "last")
        nobody = HeldBack([], Comparison(0.0, 1.0, forward=self.forward), ())
        report = self.candidates.report(pairs)
        try:
            with report.former() as host:
                imitate(report, host, fit, train, nobody, recipe, self.forward, epochs)
        finally:
            report.undo()

    # The result

    def _finish(self, damages: Mapping[Pair, float]) -> Search:
        request, results = self.request, self.results
        options = self._options(damages, [pair for pair, damage in damages.items() if math.isfinite(damage)])
        front = Front.of(options)
        points = [front.least(limit) for limit in self._budgets(options)] if all(options.values()) else []
        if not points or points[0] is None:
            got = f"{', '.join(request.mixers)}, whose outputs are not finite in too many layers"
            raise CapabilityError("mixers", got, "candidates that meet the budget", "Lower learning_rate.")
        plans = list({point[0]: front.plan(point[0]) for point in points if point}.values())
        measured = [*(("searched", plan) for plan in plans), *self._rules(options).items()]
        self.scored.held.clear()  # to hold the others in their stead
        compare = Damage(self.model, self.samples.comparing, self.kind, self.forward, request.memory)
        bar = request.bar("true damage", len(measured))
        rows = []
        for place, (name, plan) in enumerate(measured, 1):
            rows.append(self._row(name, plan, options, finite(compare(self.candidates.install(plan)))))
            bar(place)
        times = front.points()
        drawn = [front.plan(time) for time, _ in times[:: math.ceil(len(times) / MAX_POINTS)]]
        content: dict[str, Any] = results.content
        content |= {
            "points": rows[: len(plans)], "rules": rows[len(plans) :],
            "front": [self._row("front", plan, options, None) for plan in drawn],
        }  # fmt: skip
        content["headline"] = headline(content)
        mixers = {name: None if label == KEEP else request.mixers[label] for name, label in plans[0].items()}
        parts = {pair[0]: self.candidates.state(pair) for pair in plans[0].items() if pair[1] != KEEP}
        answer = Search(content, TrainedPlan(mixers, fingerprint(self.model), parts))
        if request.out is not None:
            from polymix.workflows.search.page import write

            answer.trained.save(request.out)
            write(answer, request.out)
        results.set(finished=True)
        if request.out is not None:
            shutil.rmtree(request.out / CHECKPOINTS, ignore_errors=True)
        return answer

    def _rules(self, options: Options) -> dict[str, dict[str, str]]:
        """Each fixed rule with the mixer for which the least damage is predicted, of those whose parts are known."""
        chosen = {}
        timed = self._options({}, self.candidates.adapters)
        for rule in RULES if self.request.keeps else ():
            plans = {label: by_rule(rule, label, timed, KEEP, self.request.limit) for label in self.request.mixers}
            known = {label: plan for label, plan in plans.items() if plan and within(plan, options)}
            if known:
                label = min(known, key=lambda each: damage_of(known[each], options))
                count = list(known[label].values()).count(label)
                chosen[f"{rule.format(count)}, {label}"] = known[label]
        return chosen

    def _row(self, name: str, plan: dict[str, str], options: Options, true: float | None) -> dict[str, Any]:
        share = math.fsum(self.ms[pair] or 0.0 for pair in plan.items()) / self.whole
        return {"name": name, "share": share, "predicted": damage_of(plan, options), "true": true, "plan": plan}


def within(plan: Mapping[str, str], options: Options) -> bool:
    """Whether a plan can be chosen from the options."""
    return all(choice in options[layer] for layer, choice in plan.items())


def finite(value: float) -> float | None:
    """A number as JSON holds it."""
    return value if math.isfinite(value) else None


class Named:
    """Bars with a name of ours."""

    def __init__(self, progress: Progress, name: str) -> None:
        self.progress, self.name = progress, name

    def start(self, what: str, total: int) -> Callable[..., None]:
        return self.progress.start(self.name, total)
