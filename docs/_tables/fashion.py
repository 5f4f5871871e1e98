"""The tables of Fashion-MNIST, from benchmarks/results."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from polymix.numbers import plural
from polymix.workflows.compare.tables import reference_tokens
from polymix.workflows.compare.verdict import gain, latencies, scores

from .figures import PLUS_MINUS, RESULTS, load, table, where

FILE, LAYERS, FLOOR = "pretrained/fashion-mnist.json", 12, "linear_floor"
WIDE = "pretrained/fashion-mnist-192.json"  # of a teacher of DeiT-Tiny's width, if there is one
LARGE = "pretrained/fashion-mnist-224.json"  # of the same teacher for enlarged pictures
Rows = dict[tuple[str, int], dict[str, Any]]  # by plan and steps


def mixers(file: str = FILE) -> str:
    """Each mixer in every layer, and in half of them: as converted, and after the usual number of steps."""
    if not (RESULTS / file).exists():
        return "Not measured yet."
    content, rows = _rows(file)
    machine = content["machine"]
    whose = f"the processor's: {where(machine)}" if machine["gpu"] is None else f"of {machine['gpu']}"
    usual = _usual(rows)
    teacher, count = content["teacher"], content["test"]
    lines = [("the teacher", "–", _share(teacher["accuracy"], count), "–", "–")]
    for plan in _plans(rows):
        after, before = rows.get((plan, usual)), rows[plan, 0]
        mixer, space, layers = plan.partition(" ")
        if after is not None and (plan in _alone(rows) or plan.endswith(f" in {LAYERS // 2} of {LAYERS}")):
            lines.append((f"`{mixer}`{space}{layers}",
                          _share(before["accuracy"], count), _share(after["accuracy"], count),
                          f"{100 * after['same_answer']:.1f}", f"{after['seconds']:.0f}"))  # fmt: skip
    head = ("mixer", "as converted, %", f"after {usual} steps, %", "the teacher's answer, %", "seconds")
    setting = (
        f"Accuracy on {count:,} test pictures with its 95 % interval. The teacher has {teacher['parameters']:,} "
        f"parameters and was trained in {teacher['seconds']:,} s{_tuning(teacher)}. "
        f"Steps of {content['batch']} pictures; seconds are {whose}, beside other work."
    )
    return f"{setting}\n\n{table(head, lines)}"


def _tuning(teacher: dict[str, Any]) -> str:
    """How a teacher that started from another one's weights was tuned."""
    if "tuning" not in teacher:
        return ""
    size, patch = (teacher["recipe"][name] for name in ("image_size", "patch_size"))
    seconds, tokens = teacher["tuning"]["seconds"], (size // patch) ** 2
    return f", and tuned for {size} × {size} pixels in {tokens} tokens for {seconds:,} s"


def shares() -> str:
    """Accuracy by the number of layers with a mixer, after the usual number of steps."""
    content, rows = _rows()
    usual, count = _usual(rows), content["test"]
    counts = sorted({_layers(plan) for plan, _ in rows})
    lines = []
    for mixer in _alone(rows):
        found = {_layers(plan): rows[plan, usual] for plan, steps in rows
                 if plan.partition(" ")[0] == mixer and steps == usual}  # fmt: skip
        if len(found) > 1:
            lines.append((f"`{mixer}`", *(_share(found[n]["accuracy"], count) if n in found else "–" for n in counts)))
    return table(("mixer", *(f"in {n} of {LAYERS} layers" for n in counts)), lines)


def lengths() -> str:
    """Accuracy by the steps of distillation, in every layer."""
    content, rows = _rows()
    count = content["test"]
    steps = sorted({steps for _, steps in rows})
    lines = []
    for mixer in _alone(rows):
        found = {n: rows[mixer, n] for n in steps if (mixer, n) in rows}
        if len(found) > 2:
            cells = [_share(found[n]["accuracy"], count) if n in found else "–" for n in steps]
            times = [f" in {found[n]['seconds']:.0f} s" if found.get(n, {}).get("seconds") else "" for n in steps]
            lines.append((f"`{mixer}`", *map("".join, zip(cells, times, strict=True))))
    return table(("mixer", *("as converted" if not n else f"{n} steps" for n in steps)), lines)


def _rows(file: str = FILE) -> tuple[dict[str, Any], Rows]:
    content = load(file)
    return content, {(row["plan"], row["steps"]): row for row in content["rows"]}


def _plans(rows: Rows) -> list[str]:
    return list(dict.fromkeys(plan for plan, _ in rows))


def _alone(rows: Rows) -> list[str]:
    """The mixers that every layer got."""
    return [plan for plan in _plans(rows) if " " not in plan]


def _usual(rows: Rows) -> int:
    """The number of steps that every mixer had."""
    return next(steps for plan, steps in reversed(rows) if plan == FLOOR and steps)


def _layers(plan: str) -> int:
    return int(plan.split()[-3]) if " " in plan else LAYERS


def _share(p: float, count: int) -> str:
    """A share in per cent with the 95 % interval of a binomial."""
    return f"{100 * p:.1f}{PLUS_MINUS}{196 * math.sqrt(p * (1 - p) / count):.1f}"


def compared() -> str:
    """What `polymix compare` finds: accuracy after a short training, and the gain in time."""
    content = load("compare-fashion/results.json")
    recipe, count, seeds = content["host"]["recipe"], content["data"]["test"], content["settings"]["seeds"]
    alone, host = (latencies(content, scope) for scope in ("alone", "host"))
    tokens, lines = reference_tokens(content), []
    for mixer, score in scores(content).items():
        half = [f"{50 * score.range:.1f}"] if seeds > 1 else []
        size = next(row["parameters"] for row in content["rows"] if row["mixer"] == mixer)
        gains = (gain(times, mixer, tokens) for times in (alone, host))
        cells = ("–" if value is None else f"{value:.3g} ×" for value in gains)
        lines.append((f"`{mixer}`", _share(score.mean, count), *half, f"{size:,}", *cells))
    head = ("mixer", "accuracy, %, with its 95 % interval", *(["half the range over seeds"] if seeds > 1 else []),
            "parameters", f"speedup alone at {tokens:,} tokens", f"of the whole model at {tokens:,}")  # fmt: skip
    setting = (
        f"{content['data']['train']:,} training and {count:,} test pictures of 28 × 28 pixels in "
        f"{content['host']['tokens']} tokens, {recipe['steps']:,} steps of {recipe['batch_size']}, "
        f"{plural(seeds, 'seed')}; {where(content['machine'])}."
    )
    return f"{setting}\n\n{table(head, lines)}"


TABLES: dict[str, Callable[[], str]] = {
    "compare-fashion": compared, "fashion": mixers, "fashion-wide": partial(mixers, WIDE),
    "fashion-large": partial(mixers, LARGE), "fashion-layers": shares, "fashion-steps": lengths,
}  # fmt: skip
