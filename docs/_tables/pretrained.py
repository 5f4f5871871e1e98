"""The tables of models that others have trained, from benchmarks/results/pretrained."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from .figures import load, table, where

AIMS = {"every layer": 0.95, "hybrid": 0.99}  # rank correlation, set before anything was measured
SHARE = 0.97  # of the original's accuracy, likewise
MEASURES = ("rank_correlation", "same_nearest", "of_10_nearest", "cosine")
PROBES = ("spam", "genres")
ATTENTION, ALONE = "attention", "in layer "


def _ordered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    plans = list(dict.fromkeys(row["plan"] for row in rows))
    return sorted(rows, key=lambda row: (plans.index(row["plan"]), row.get("steps", 0)))


def _plan(row: dict[str, Any]) -> str:
    return f"{row['plan']} (seed {row['seed']})" if row.get("seed") else row["plan"]


def _taken(row: dict[str, Any]) -> list[str]:
    return [str(row["steps"]), f"{row['seconds']:.0f}"] if row["steps"] else ["as converted", "–"]


def minilm() -> str:
    """Each plan as converted and after so many steps, and what was reached of the aims."""
    content = load("pretrained/minilm.json")
    rows = [row for row in content["rows"] if row.get("plan", ATTENTION) != ATTENTION and ALONE not in row["plan"]]
    lines = [(_plan(row), *_taken(row), *(f"{row[name]:.3f}" for name in MEASURES)) for row in _ordered(rows)]
    head = ("mixers", "steps", "seconds", "rank correlation", "same nearest", "of 10 nearest", "cosine")
    setting = (
        f"{content['sentences']} sentences of the Brown corpus that training never saw; steps of "
        f"{rows[0]['batch']} sentences. Seconds are the processor's, the guard included: "
        f"{where(content['machine'])}, beside other work."
    )
    return f"{table(head, lines)}\n\n{setting} {' '.join(_reached(rows))}"


def _reached(rows: list[dict[str, Any]]) -> list[str]:
    """What was aimed at, and what came of it."""
    sentences = []
    for kind, aim in AIMS.items():
        own = [row for row in rows if (" in " in row["plan"]) == (kind == "hybrid")]
        best = max(own, key=lambda row: row["rank_correlation"])
        met = "reached" if best["rank_correlation"] >= aim else "not reached"
        found = f"{best['rank_correlation']:.3f} ({best['plan']}, {best['seconds']:.0f} s)"
        sentences.append(f"Aim with {kind}: a rank correlation of {aim}; {met}: {found}.")
    return sentences


def probes() -> str:
    """The accuracies of probes, as shares of the original's, with the intervals over the tests."""
    content = load("pretrained/minilm.json")
    rows = [row for row in content["rows"] if "spam" in row]
    original = next(row for row in rows if row["plan"] == ATTENTION)
    lines = [
        (_plan(row), _taken(row)[0], *(cell for name in PROBES for cell in _probe(row[name])))
        for row in _ordered([row for row in rows if row is not original])
    ]
    head = ("mixers", "steps", "spam, accuracy", "share (95 %)", "genres, accuracy", "share (95 %)")
    counts = content["probes"]
    setting = (
        f"The original: {original['spam']['accuracy']:.1%} on {counts['spam'][1]} mails after learning from "
        f"{counts['spam'][0]}; {original['genres']['accuracy']:.1%} on {counts['genres'][1]} passages of "
        f"{counts['genres'][2]} texts after {counts['genres'][0]} passages of other texts. Aim: {SHARE} of it."
    )
    return f"{table(head, lines)}\n\n{setting}"


def times(model: str, size: str, head: str) -> str:
    """Milliseconds of a call, by what its size is called, and how much faster than the original."""
    rows = [row for row in load(f"pretrained/{model}.json")["rows"] if size in row]
    plans = list(rows[0]["milliseconds"])
    lines = []
    for row in rows:
        own = row["milliseconds"][ATTENTION]
        cells = (f"{ms:.0f}" + f" ({own / ms:.2f} ×)" * (plan != ATTENTION) for plan, ms in row["milliseconds"].items())
        lines.append((f"{row[size]:,}", *cells))
    busy = " The machine was busy, so times are too long." if any(row["busy"] for row in rows) else ""
    clocks = " or ".join(sorted({"the processor" if row["clock"] == "processor" else "the wall" for row in rows}))
    return f"{table((head, *plans), lines)}\n\nMilliseconds of {clocks}, the least of turns in one run.{busy}"


def _probe(found: dict[str, float]) -> tuple[str, str]:
    interval = f" ({found['low']:.3f} … {found['high']:.3f})" if "low" in found else ""
    return f"{found['accuracy']:.1%}", f"{found['share']:.3f}{interval}"


def masked(name: str) -> str:
    """Loss and accuracy of masked tokens before, as converted and after, by what was trained on."""
    content = load(f"pretrained/{name}.json")
    kinds = {"none": "as converted", "self": "its own texts", "random": "random tokens"}
    lines = []
    for row in _ordered(content["rows"]):
        how = kinds[row["data"]] if row.get("data") else "–"
        steps = "–" if not row.get("steps") else str(row["steps"])
        seconds = f"{row['seconds']:.0f}" if "seconds" in row else "–"
        kept = row.get("kept", "–")
        lines.append(
            (row["plan"], how, steps, seconds, kept, *(cell for at in ("self", "real") for cell in _masked(row[at])))
        )
    lines.append(("chance: frequencies alone", "–", "–", "–", "–", *(
        cell for at in ("self", "real") for cell in _masked(content["chance"][at]))))  # fmt: skip
    head = (
        "layers with qt", "trained on", "steps", "seconds", "stage kept", "own texts: loss", "accuracy",
        "real texts: loss", "accuracy",
    )  # fmt: skip
    counts = content["labels"]
    texts = content["batch"] * content["drawn"]
    trained = f"Steps of {content['batch']} of {texts:,} more; imitation alone, one seed. "
    steps = dict.fromkeys(row.get("steps", 0) for row in content["rows"])
    setting = (
        f"{counts['self']:,} masked tokens of texts that the original draws, {counts['real']:,} of {content['real']} "
        f"real ones; chance is of the frequencies in the same tokens. Texts of {content['tokens'][0]} to "
        f"{content['tokens'][1]} tokens, drawn in {content['rounds']} rounds. "
        f"{trained * any(steps)}{where(content['machine'])}. `python benchmarks/pretrained.py {name} OUT.json "
        f"--epochs 0 --steps {','.join(map(str, steps))}`; `--plans` chooses rows"
    )
    return f"{table(head, lines)}\n\n{setting}"


def _masked(found: dict[str, float]) -> tuple[str, str]:
    return f"{found['loss']:.2f}", f"{found['accuracy']:.1%}"


def whisper() -> str:
    """Words heard right with each encoder, as converted, after imitation, and after tuning; the error of its states."""
    content = load("pretrained/whisper.json")
    rows = [row for row in content["rows"] if "librivox" in row and ALONE not in row["plan"]]
    lines = []
    for row in sorted(_ordered(rows), key=lambda row: row["plan"] != ATTENTION):
        how = [str(row["steps"]), str(row["tuned"]), f"{row['seconds']:.0f}"] if row.get("steps") else ["as converted"]
        how = (["–"] if row["plan"] == ATTENTION else how) + ["–"] * (3 - len(how))
        cells = (cell for name in ("librivox", "prompts") for cell in _heard(row[name], row["plan"] == ATTENTION))
        lines.append((row["plan"], *how, *cells))
    words = {name: rows[0][name]["words"] for name in ("librivox", "prompts")}
    head = ["mixers", "imitation", "tuning", "seconds"]
    for name, title in (("librivox", "LibriVox"), ("prompts", "prompts")):
        head += [f"{title}: right of {words[name]}", "word errors", "error of states"]
    counts = content["sounds_and_seconds"]
    own = [row for row in rows if row.get("steps")]
    sizes, clocks, places = ({row[name] for row in own} for name in ("batch", "clock", "on"))
    trained = (
        f"Windows of 30 s in a step: {' or '.join(map(str, sorted(sizes)))}. Steps are first of imitation, then of "
        f"tuning, which learns the encoder's last states; one seed. Seconds of both: {' or '.join(sorted(clocks))}, "
        f"{', '.join(places)}. "
    ) * bool(own)
    setting = (
        f"{counts['librivox'][0]} recordings of LibriVox ({counts['librivox'][1]:.0f} s) and {counts['prompts'][0]} "
        f"prompts ({counts['prompts'][1]:.0f} s) that training never heard. {trained}"
        "Error of states: ‖ŷ − y‖² / ‖y − ȳ‖² where there is speech."
    )
    return f"{table(head, lines)}\n\n{setting}"


def _heard(found: dict[str, Any], original: bool) -> tuple[str, str, str]:
    return str(found["right"]), f"{found['word_errors']:.0%}", "–" if original else f"{found['error']:.3f}"


def whisper_longer() -> str:
    """Words heard right through windows of 60 s, by what the positions are."""
    rows = [row for row in load("pretrained/whisper.json")["rows"] if "longer" in row]
    names = ("continued", "repeated")
    lines = [
        (
            row["plan"],
            f"{row['prompts']['right']}",
            *(f"{row['longer'][name]['right']} ({row['longer'][name]['word_errors']:.0%})" for name in names),
        )
        for row in rows
    ]
    head = (
        "encoder", f"alone in windows of 30 s: right of {rows[0]['prompts']['words']}",
        "60 s, positions go on (word errors)", "60 s, positions begin again (word errors)",
    )  # fmt: skip
    return table(head, lines)


def classes() -> str:
    """How far the models that know classes and fingerprints agree with their originals."""
    content = load("pretrained/rxnfp-classes.json")
    names = {"bert_ft_10k_25s": "classes: the same", "bert_ft": "fingerprints: rank correlation"}
    rows = _ordered([row for row in content["rows"] if row["plan"] != ATTENTION])
    lines = [
        (names[row["model"]], row["plan"], *_taken(row), f"{row['self']:.3f}", f"{row['real']:.3f}")
        for name in names for row in rows if row["model"] == name
    ]  # fmt: skip
    counts, found = content["texts"], next(row["classes"] for row in content["rows"] if "classes" in row)
    trained = f"Steps of {content['batch']} of the texts of the table above; imitation alone, one seed. "
    setting = (
        f"{counts['self']} texts that the masked model draws, to which the original gives {found['self']} of its "
        f"50 classes, and {counts['real']} real ones ({found['real']} classes). "
        f"{trained * any(row['steps'] for row in rows)}{where(content['machine'])}"
    )
    return f"{table(('measure', 'layers with qt', 'steps', 'seconds', 'own texts', 'real texts'), lines)}\n\n{setting}"


def alone() -> str:
    """What one converted layer costs by its place, as converted."""
    lines = []
    for title, (name, value) in ALONE_MEASURES.items():
        rows = {
            row["plan"]: value(row) for row in load(f"pretrained/{name}.json")["rows"] if ALONE in row.get("plan", "")
        }
        lines += [[title, *(rows[plan] for plan in sorted(rows))]] if rows else []
    most = max(map(len, lines))
    head = ("qt in one layer, as converted", *(f"layer {at}" for at in range(1, most)))
    return table(head, (line + ["–"] * (most - len(line)) for line in lines))


def overview() -> str:
    """By model and layers with qt: the best that was reached, what it took, and how much faster a call is."""
    lines = []
    for name, (title, layers, value, size) in OVERVIEW.items():
        rows = load(f"pretrained/{name}.json")["rows"]
        timed = next((row["milliseconds"] for row in rows if size and row.get(size[0]) == size[1]), {})
        speeds = {layers[plan]: f"{timed[ATTENTION] / ms:.2f} ×" for plan, ms in timed.items() if plan in layers}
        for plan, share in layers.items():
            own = [row for row in rows if row.get("plan") == plan and "seed" in row]
            if own:
                best = max(own, key=value)
                lines.append((title, plan, share, *_taken(best), f"{value(best):.3f}", speeds.get(share, "–")))
    return table(("model and measure", "mixers", "layers", "steps", "seconds", "best", "speed"), lines)


Measure = Callable[[dict[str, Any]], Any]
ALONE_MEASURES: dict[str, tuple[str, Measure]] = {
    "MiniLM: rank correlation": ("minilm", lambda row: f"{row['rank_correlation']:.3f}"),
    "Whisper: words right of 626": ("whisper", lambda row: row["prompts"]["right"]),
    "Whisper: error of states": ("whisper", lambda row: f"{row['prompts']['error']:.3f}"),
}
OVERVIEW: dict[str, tuple[str, dict[str, str], Measure, tuple[str, int] | None]] = {  # title, layers, measure, size
    "minilm": (
        "MiniLM: rank correlation",
        {"qt in layer 4": "1 of 6", "qt in 3 of 6": "3 of 6", "qt in layers 2+4+5": "3 of 6",
         "qt in all but layer 1": "5 of 6", "qt": "6 of 6"},
        lambda row: row["rank_correlation"], ("tokens", 512),
    ),
    "whisper": (
        "Whisper: share of the prompts' words", {"qt in 2 of 4": "2 of 4", "qt": "4 of 4"},
        lambda row: row["prompts"]["right"] / row["prompts"]["words"], ("window", 30),
    ),
    "rxnfp": (
        "rxnfp: accuracy of masked tokens", {"1": "1 of 12", "every second of 12": "6 of 12", "all 12": "12 of 12"},
        lambda row: row["real"]["accuracy"], None,
    ),
    "rxnmapper": (
        "RXNMapper: accuracy of masked tokens", {"all, which share their weights": "12 of 12"},
        lambda row: row["real"]["accuracy"], None,
    ),
    "antiberty": (
        "AntiBERTy: accuracy of masked tokens", {"1": "1 of 8", "every second of 8": "4 of 8", "all 8": "8 of 8"},
        lambda row: row["real"]["accuracy"], None,
    ),
}  # fmt: skip
TABLES: dict[str, Callable[[], str]] = {
    "minilm": minilm, "minilm-probes": probes, "minilm-times": partial(times, "minilm", "tokens", "tokens"),
    "masked-rxnfp": partial(masked, "rxnfp"), "masked-rxnmapper": partial(masked, "rxnmapper"), "whisper": whisper,
    "masked-antiberty": partial(masked, "antiberty"), "rxnfp-classes": classes, "alone": alone, "overview": overview,
    "whisper-longer": whisper_longer,
    "whisper-times": partial(times, "whisper", "window", "seconds"),
}  # fmt: skip
