"""The table of a comparison, as the terminal and the report show it."""

from __future__ import annotations

from statistics import mean
from typing import Any

from polymix.mixers.registry import ATTENTION
from polymix.numbers import NONE, fixed, percent, plural, two_figures
from polymix.workflows.compare.verdict import Score, crossover, gain, latencies, scores


def reference_tokens(content: dict[str, Any], scope: str = "host") -> int:
    """The token count that the table shows: 4,096 if attention was measured there, else its largest."""
    counts = latencies(content, scope)[ATTENTION]
    return 4096 if 4096 in counts else max(counts, default=0)


# heading in the report, and in a terminal of 80 characters (None: no room for the column)
HEADINGS: dict[str, tuple[str, str | None]] = {
    "mixer": ("mixer", "mixer"),
    "accuracy": ("test accuracy, % (± half the range over seeds)", "accuracy,\n%"),
    "parameters": ("parameters of the model", "params"),
    "flops": ("MFLOP an image", None),
    "seconds": ("training, s a seed", "train,\ns"),
    "latency": ("alone at {n} tokens, ms", "ms at\n{n}"),
    "gain": ("attention ÷ it", "attn\n÷ it"),
    "floor": ("it ÷ its floor", "÷\nfloor"),
    "memory": ("peak memory alone, MiB", None),
    "whole": ("whole model at {m} tokens, attention ÷ it", None),
    "crossover": ("faster than attention alone from, tokens", "faster\nfrom"),
}


def headings(content: dict[str, Any]) -> list[str]:
    """The headings of the report."""
    n, m = reference_tokens(content, "alone"), reference_tokens(content)
    return [text.format(n=f"{n:,}", m=f"{m:,}") for text, _ in HEADINGS.values()]


def terminal_table(content: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of the columns that fit a terminal of 80 characters."""
    n = reference_tokens(content, "alone")
    shown = [(i, short.format(n=f"{n:,}")) for i, (_, short) in enumerate(HEADINGS.values()) if short is not None]
    return [text for _, text in shown], [[row[i] for i, _ in shown] for row in rows(content)]


def data_line(data: dict[str, Any]) -> str:
    """The images and their classes, and what always answering with the largest class would reach."""
    names = ", ".join(data["classes"][:12]) + " …" * (len(data["classes"]) > 12)
    images = f"{data['train']:,} training and {plural(data['test'], 'test image')}"
    line = f"Data: {data['name']}, {images}, {plural(len(data['classes']), 'class', 'classes')}: {names}."
    if data.get("majority"):
        name, share = data["majority"]["name"], percent(data["majority"]["share"])
        line += f" The largest class, {name}, has {share} of the test images."
    return line


def rows(content: dict[str, Any]) -> list[list[str]]:
    """One row of text for each mixer, in the order of HEADINGS."""
    n, m = reference_tokens(content, "alone"), reference_tokens(content)
    by_mixer, alone, host = scores(content), latencies(content, "alone"), latencies(content, "host")
    at_n = {row["mixer"]: row for row in content["sweep"] if row["scope"] == "alone" and row["tokens"] == n}
    table = []
    for mixer in content["mixers"]:
        label = mixer["label"]
        runs = [row["seconds"] for row in content["training"] if row["mixer"] == label]
        row, at = at_n.get(label, {}), crossover(alone, label)
        latency, floor = row.get("latency"), row.get("floor")
        score = by_mixer.get(label)
        table.append([
            label,
            "diverged" if score is None else _accuracy(score),
            f"{mixer['parameters']:,}",
            f"{mixer['flops'] / 1e6:.2f}",
            fixed(mean(runs) if runs else None, 1),
            "stopped" if latency is None else fixed(latency, 2),
            fixed(gain(alone, label, n), 2),
            fixed(latency / floor if latency and floor else None, 2),
            fixed(row.get("peak_bytes") or None, 1, 2**-20),
            fixed(gain(host, label, m), 2),
            NONE if label == ATTENTION else _from(at, alone, label),
        ])  # fmt: skip
    return table


def _accuracy(score: Score) -> str:
    spread = f" ±{50 * (score.high - score.low):.1f}" if score.runs > 1 else ""
    return f"{100 * score.mean:.1f}{spread}"


def _from(at: float | None, alone: dict[str, dict[int, float]], label: str) -> str:
    measured = alone[label]
    if at is None:
        faster = any((gain(alone, label, n) or 0) > 1 for n in measured)
        return f"not at {max(measured):,}" if faster else "never"
    return two_figures(at) if at > min(measured) else f"≤ {two_figures(at)}"
