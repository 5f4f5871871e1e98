"""All domains in one table: quality and speed of attention, the mixers and the control, wins and losses alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from posixpath import normpath
from statistics import fmean
from typing import Any

from polymix.mixers.registry import ATTENTION, FLOOR
from polymix.workflows.compare.verdict import Score, scores, uncertainty

from .domains import MAIN_METRICS, NONE, all_runs
from .figures import load, spread, table

HYBRID = "hybrid"
NO_BLOCK = "none"  # where a mixer is a block beside others, the host without it
COLUMNS = (ATTENTION, HYBRID, "padre", "pom", "qt", "poly_nl", "poly_sa", FLOOR, NO_BLOCK)
HEADS = {ATTENTION: "attention", HYBRID: "hybrid", FLOOR: "control", NO_BLOCK: "no block"}
BETTER, WORSE, NO_BETTER = "▲", "▼", "○"
SHARES = ("cer_blotted", "wer")  # error rates, judged as accuracies are: near 0 a twentieth of them is nothing
# Names of three studies as a recipe has them.
LANGUAGE = {"pom+local": "pom (1:1 local)", "nothing": FLOOR}
SCALING = {"attention": ATTENTION, "pom and local": "pom (1:1 local)", "nothing": FLOOR}
RECALL = {
    "pom, k = 2": "pom", "pom, k = 2, then softmax": "pom (1:1)", "local, window 32": "local",
    "padre, degree 2": "padre-2", "nothing": FLOOR,
}  # fmt: skip
LOCAL = ("text", "text, Brown corpus", "recall")  # where a token's attention to itself stands for linear_floor
PLAN = "1:1"  # of the hybrids that were compared
PAIRS = 16  # of the sizes of recall.json, the one where most mixers still know something


@dataclass(frozen=True)
class Domain:
    """The runs of a domain's default data.

    scores: by mixer, with its options. speeds: of training, over attention's. chance: the difference between two mixers
    that says nothing.
    """

    name: str
    page: str
    metric: str
    up: bool
    scores: dict[str, Score]
    speeds: dict[str, float]
    chance: Callable[[str, str], float]

    def first(self, column: str) -> str | None:
        """The first mixer of a column of the table."""
        return next((mixer for mixer in self.scores if base(mixer) == column), None)

    def ahead(self, mixer: str, other: str) -> int:
        """1: better than the other, -1: worse, 0: no difference, or nothing to compare with."""
        if mixer == other or mixer not in self.scores or other not in self.scores:
            return 0
        gain = (self.scores[mixer].mean - self.scores[other].mean) * (1 if self.up else -1)
        return 0 if abs(gain) <= self.chance(mixer, other) else 1 if gain > 0 else -1

    def cell(self, mixer: str | None) -> str:
        """The mean, half the range over the seeds, and how it compares."""
        if mixer is None:
            return NONE
        score = self.scores[mixer]
        written = ("{:.1f}" if abs(score.mean) >= 10 else "{:.3f}").format
        ends = (score.low, score.high) if score.runs > 1 else ()
        return f"{written(score.mean)}{spread(ends, written)}{self.marks(mixer)}"

    def marks(self, mixer: str) -> str:
        against = {1: f" {BETTER}", 0: "", -1: f" {WORSE}"}[self.ahead(mixer, ATTENTION)]
        lost = FLOOR in self.scores and mixer not in (FLOOR, NO_BLOCK) and self.ahead(mixer, FLOOR) < 1
        return against + (f" {NO_BETTER}" if lost else "")

    def speed(self, mixer: str | None) -> str:
        return f"{self.speeds[mixer]:.2f} ×" if mixer in self.speeds else NONE

    def title(self) -> str:
        return f"[{self.name}]({self.page})"

    def seeds(self) -> str:
        """How many runs a mixer has, from the fewest to the most."""
        counts = sorted({score.runs for score in self.scores.values()})
        return " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))

    def what(self) -> str:
        return f"{self.metric.replace('_', ' ')} {'↑' if self.up else '↓'}"


def base(mixer: str) -> str:
    """The column of a mixer: "pom:degree=3" is pom, "pom (1:1)" a hybrid."""
    return HYBRID if " (" in mixer else mixer.partition(":")[0].partition("-")[0]


def _domain(
    name: str, page: str, metric: str, up: bool, runs: dict[str, list[float]], speeds: dict[str, float],
    test: int | None = None, unit: str = "",
) -> Domain:  # fmt: skip
    """The noise is that by which `polymix compare` judges. test: samples of which an accuracy is."""
    rows = [
        {"mixer": mixer, "metrics": {metric: value}, "directions": {metric: "up" if up else "down"},
         "units": {metric: unit}}
        for mixer, values in runs.items() for value in values
    ]  # fmt: skip
    content: dict[str, Any] = {
        "rows": rows, "mixers": [{"label": mixer} for mixer in runs], "data": None if test is None else {"test": test}
    }  # fmt: skip
    own = speeds.get(ATTENTION)
    over = {mixer: speed / own for mixer, speed in speeds.items()} if own else {}
    return Domain(name, page, metric, up, scores(content), over, partial(uncertainty, content))


def _tasks() -> Iterator[Domain]:
    for task, metric in MAIN_METRICS.items():
        found = all_runs(task)
        runs = {mixer: [run["metrics"][metric] for run in its] for mixer, its in found.items()}
        if ATTENTION in runs:  # with which the others are compared
            rows = {mixer: its[0] for mixer, its in found.items()}
            up = rows[ATTENTION]["directions"][metric] == "up"
            speeds = {mixer: row["training_per_second"] for mixer, row in rows.items() if row["training_per_second"]}
            unit = "%" if metric in SHARES else rows[ATTENTION]["units"][metric]
            page = f"{task.partition('/')[0]}.md"
            yield _domain(task.replace("/", ", "), page, metric, up, runs, speeds, unit=unit)


def _comparison(name: str, folder: str, page: str) -> Domain:
    """With the hybrids, which were compared by themselves; their speeds, of another day, are left out."""
    content = load(f"{folder}/results.json")
    runs: dict[str, list[float]] = {}
    speeds: dict[str, list[float]] = {}
    for row in content["rows"]:
        runs.setdefault(row["mixer"], []).append(row["metrics"]["accuracy"])
        speeds.setdefault(row["mixer"], []).append(row["training_per_second"])
    hybrids = load(f"{folder}-hybrid/results.json")
    for row in hybrids["rows"]:
        if row["mixer"] not in (ATTENTION, FLOOR):
            runs.setdefault(f"{row['mixer']} ({PLAN})", []).append(row["metrics"]["accuracy"])
    means = {mixer: fmean(values) for mixer, values in speeds.items()}
    return _domain(name, page, "accuracy", True, runs, means, content["data"]["test"], "%")


def _text() -> Domain:
    runs: dict[str, list[float]] = {}
    speeds: dict[str, float] = {}
    for row in load("language.json")["rows"]:
        mixer = LANGUAGE.get(row["model"], row["model"])
        if "," in mixer or " k=" in mixer:
            continue  # what is no mixer of the others
        if row["kind"] == "train":
            runs.setdefault(mixer, []).append(row["loss"])
        elif row["kind"] == "time":
            speeds[mixer] = row["tokens_per_second"]
    return _domain("text", "../research/language.md", "loss", False, runs, speeds)


def _brown() -> Domain:
    """The Brown corpus at the largest size of the study of sizes, trained on a GPU."""
    content, runs = load("scaling.json"), dict[str, list[float]]()
    for row in content["rows"]:
        if (row["task"], row["size"]) == ("text", list(content["sizes"])[-1]):
            runs.setdefault(SCALING.get(row["mixer"], row["mixer"]), []).append(row["val_loss"])
    return _domain("text, Brown corpus", "../research/scaling.md", "loss", False, runs, {})


def _recall() -> Domain:
    """At the better of the two learning rates."""
    runs: dict[str, list[float]] = {}
    for row in load("recall.json")["rows"]:
        mixer = RECALL.get(row["model"], row["model"])
        if row["task"] == "recall" and row["best"] and ", " not in mixer and " in " not in mixer:
            runs.setdefault(mixer, []).append(row["accuracy"][row["sizes"].index(PAIRS)])
    return _domain("recall", "../language/recall.md", "accuracy", True, runs, {}, unit="%")


@cache
def all_domains() -> tuple[Domain, ...]:
    return (
        _comparison("classify, digit scenes", "compare-scenes", "classify.md"),
        _comparison("classify, Fashion-MNIST", "compare-fashion", "classify.md"),
        *_tasks(), _text(), _brown(), _recall(),
    )  # fmt: skip


def quality() -> str:
    lines = [
        (it.title(), it.what(), it.seeds(), *(it.cell(it.first(column)) for column in COLUMNS)) for it in all_domains()
    ]
    return table(("domain", "metric", "seeds", *(HEADS.get(column, f"`{column}`") for column in COLUMNS)), lines)


def speed() -> str:
    """Of the domains in which it was measured."""
    columns = [column for column in COLUMNS if column != ATTENTION]
    lines = [(it.title(), *(it.speed(it.first(column)) for column in columns)) for it in all_domains() if it.speeds]
    return table(("training, items per second over attention's", *(HEADS.get(c, f"`{c}`") for c in columns)), lines)


def verdicts() -> str:
    """A sentence for each domain: does mixing decide, who wins and who loses?"""
    return "\n".join(f"- **{it.title()}**: {_verdict(it)}" for it in all_domains())


def _verdict(it: Domain) -> str:
    mixers = [mixer for mixer in it.scores if mixer not in (ATTENTION, FLOOR, NO_BLOCK)]
    decides = it.ahead(ATTENTION, FLOOR)
    place = {1: "mixing decides", 0: "attention is level with the control", -1: "attention is behind the control"}
    parts = [place[decides] if FLOOR in it.scores else "no control was trained"]
    if FLOOR in it.scores and decides < 1:
        ahead = _named(mixer for mixer in mixers if it.ahead(mixer, FLOOR) == 1)
        parts += [f"better than it: {ahead}" if ahead else "no mixer is clearly better"]
    for sign, words in ((1, "better than attention"), (-1, "worse"), (0, "level")):
        names = _named(mixer for mixer in mixers if it.ahead(mixer, ATTENTION) == sign)
        parts += [f"{words}: {names}"] if names else []
    lost = _named(mixer for mixer in mixers if NO_BETTER in it.marks(mixer))
    parts += [f"not clearly better than the control: {lost}"] if lost else []
    return "; ".join(parts) + "."


def _named(mixers: Iterable[str]) -> str:
    return ", ".join(f"`{mixer}`" for mixer in mixers)


def of_mixer(name: str) -> str:
    """A mixer's own rows, for its page; nothing where no domain has any."""
    lines = []
    for it in all_domains():
        own = (mixer for mixer in it.scores if base(mixer.partition(" (")[0]) == name)
        for mixer in () if name == FLOOR and it.name in LOCAL else own:
            others = [it.cell(other if other in it.scores else None) for other in (ATTENTION, FLOOR)]
            title = f"[{it.name}]({normpath(f'../domains/{it.page}')})"
            lines.append((title, it.what(), f"`{mixer}`", it.cell(mixer), *others, it.speed(mixer)))
    head = ("domain", "metric", "as", "here", "attention", "control", "training, over attention's speed")
    return table(head, lines) if lines else ""


TABLES: dict[str, Callable[[], str]] = {
    "domains": quality, "domains-speed": speed, "domains-verdicts": verdicts,
}  # fmt: skip
