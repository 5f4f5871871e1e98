"""The table of a comparison, as the terminal and the report show it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

from polymix.mixers.registry import ATTENTION
from polymix.numbers import DASH, figure, fixed, metric, percent, plural, two_figures
from polymix.train.report import in_the_paper
from polymix.train.rows import UP
from polymix.workflows.compare.verdict import crossover, gain, latencies, spelled

TABLE_TOKENS = 4096  # tokens of the columns of times, if attention was measured there


class Column(NamedTuple):
    """A column: its heading in the report, in a terminal of 80 characters (None: no room), and its cell of a mixer."""

    heading: str
    short: str | None
    cell: Callable[[str], str]


def reference_tokens(content: dict[str, Any], scope: str = "host") -> int:
    """The token count that the table shows: 4,096 if attention was measured there, else its largest."""
    counts = latencies(content, scope)[ATTENTION]
    return TABLE_TOKENS if TABLE_TOKENS in counts else max(counts, default=0)


def columns(content: dict[str, Any]) -> list[Column]:
    """What was trained, and where it was measured what was timed."""
    return [*_trained(content), *(_timed(content) if content["sweep"] else [])]


def _trained(content: dict[str, Any]) -> list[Column]:
    by_mixer = {label: [row for row in content["rows"] if row["mixer"] == label] for label in _labels(content)}
    runs = [row for mine in by_mixer.values() for row in mine]
    names = list(dict.fromkeys(name for row in runs for name in row["metrics"]))
    directions = {name: way for row in runs for name, way in row["directions"].items()}
    units = {name: unit for row in runs for name, unit in row["units"].items()}
    unit = runs[0]["unit"] if runs else "samples"
    several = max((len(mine) for mine in by_mixer.values()), default=1) > 1
    swept, flops = bool(content["sweep"]), {row["label"]: row["flops"] for row in content["mixers"]}

    def value(label: str, key: str) -> float | None:
        return _median([row[key] for row in by_mixer[label]])

    def paper(label: str) -> str:
        its = by_mixer[label][:1]
        return in_the_paper(its[0]) if its and its[0]["paper"] else DASH

    def peak(label: str) -> str:
        held = value(label, "peak_bytes")
        return DASH if held is None else figure(held / 2**20)

    def parameters(label: str) -> str:
        return f"{by_mixer[label][0]['parameters']:,}" if by_mixer[label] else DASH

    table = [Column("mixer", "mixer", str)]
    for place, name in enumerate(names):
        heading = f"{spelled(name)} {'↑' if directions[name] == UP else '↓'}"
        spread = " (± half the range over seeds)" if several and not place else ""
        cell = lambda label, name=name: _spread([row["metrics"].get(name) for row in by_mixer[label]], units[name])  # noqa: E731
        table.append(Column(heading + spread, heading if not (place and swept) else None, cell))
    table += [
        Column("parameters of the model", "params", parameters),
        Column("MFLOP of a sample", None, lambda label: fixed(flops.get(label), 2, 1e-6)),
        Column(f"{unit}/s training", "train,\n/s", lambda label: figure(value(label, "training_per_second"))),
        Column(f"{unit}/s inference", None, lambda label: figure(value(label, "inference_per_second"))),
        Column("peak MiB of a step", None if swept else "step,\nMiB", peak),
        Column("in the paper", None, paper),
    ]
    return [column for column in table if _has_values(column, by_mixer)]


def _timed(content: dict[str, Any]) -> list[Column]:
    n, m = reference_tokens(content, "alone"), reference_tokens(content)
    alone, host = latencies(content, "alone"), latencies(content, "host")
    at_n = {row["mixer"]: row for row in content["sweep"] if row["scope"] == "alone" and row["tokens"] == n}

    def of_floor(label: str) -> str:
        row = at_n.get(label, {})
        return fixed(row["latency"] / row["floor"] if row.get("latency") and row.get("floor") else None, 2)

    def latency(label: str) -> str:
        value = at_n.get(label, {}).get("latency")
        return ("stopped" if label in at_n else DASH) if value is None else fixed(value, 2)

    table = [
        Column(f"alone at {n:,} tokens, ms", f"ms at\n{n:,}", latency),
        Column("attention ÷ it", "attn\n÷ it", lambda label: fixed(gain(alone, label, n), 2)),
        Column("it ÷ its floor", "÷\nfloor", of_floor),
        Column("peak memory alone, MiB", None,
               lambda label: fixed(at_n.get(label, {}).get("peak_bytes") or None, 1, 2**-20)),
        Column(f"whole model at {m:,} tokens, attention ÷ it", None, lambda label: fixed(gain(host, label, m), 2)),
        Column("faster than attention alone from, tokens", "faster\nfrom",
               lambda label: DASH if label == ATTENTION else _from(crossover(alone, label), alone, label)),
    ]  # fmt: skip
    return [column for column in table if _has_values(column, _labels(content))]


def _labels(content: dict[str, Any]) -> list[str]:
    return [row["label"] for row in content["mixers"]]


def _has_values(column: Column, labels: Any) -> bool:
    return any(column.cell(label) != DASH for label in labels)


def headings(content: dict[str, Any]) -> list[str]:
    """The headings of the report."""
    return [column.heading for column in columns(content)]


def rows(content: dict[str, Any]) -> list[list[str]]:
    """One row of text for each mixer, in the order of the headings."""
    table = columns(content)
    return [[column.cell(label) for column in table] for label in _labels(content)]


def terminal_table(content: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of the columns that fit a terminal of 80 characters."""
    table = [column for column in columns(content) if column.short is not None]
    return [str(column.short) for column in table], [
        [column.cell(label) for column in table] for label in _labels(content)
    ]


def data_line(data: dict[str, Any]) -> str:
    """The images and their classes, and what always answering with the largest class would reach."""
    names = ", ".join(data["classes"][:12]) + " …" * (len(data["classes"]) > 12)
    samples = f"{data['train']:,} training and {plural(data['test'], 'test sample')}"
    line = f"Data: {data['name']}, {samples}, {plural(len(data['classes']), 'class', 'classes')}: {names}."
    name, share = data["majority"]["name"], percent(data["majority"]["share"])
    return f"{line} The largest class, {name}, has {share} of the test samples."


def _spread(values: Sequence[float | None], unit: str) -> str:
    """The mean over the seeds and half their range. unit: of the metric."""
    numbers = [value for value in values if value is not None]
    if not values:
        return DASH
    if len(numbers) < len(values):
        return "diverged"
    half = (max(numbers) - min(numbers)) / 2
    if unit == "%":
        return fixed(fmean(numbers), 1, 100) + (f" ±{fixed(half, 1, 100)} %" if len(numbers) > 1 else " %")
    return metric(fmean(numbers), unit) + (f" ±{figure(half)}" if len(numbers) > 1 else "")


def _median(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return median(numbers) if numbers else None


def _from(at: float | None, alone: dict[str, dict[int, float]], label: str) -> str:
    measured = alone[label]
    if not measured:
        return DASH
    if at is None:
        faster = any((gain(alone, label, n) or 0) > 1 for n in measured)
        return f"not at {max(measured):,}" if faster else "never"
    return two_figures(at) if at > min(measured) else f"≤ {two_figures(at)}"
