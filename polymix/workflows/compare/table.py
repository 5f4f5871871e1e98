"""The rows of the table that the terminal and the report both show."""

from __future__ import annotations

from statistics import mean
from typing import Any

from polymix.workflows.compare.plots import reference_tokens
from polymix.workflows.compare.verdict import YARDSTICK, Score, count, crossover, gain, latencies, scores


def reference_alone(content: dict[str, Any]) -> int:
    """The count at which the mixers alone are tabled: 4,096 where attention was measured there, else its last."""
    counts = latencies(content, "alone")[YARDSTICK]
    return 4096 if 4096 in counts else max(counts, default=0)


# heading in the report, heading in the terminal (None: no room there)
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
    """The report's headings."""
    n, m = reference_alone(content), reference_tokens(content)
    return [text.format(n=f"{n:,}", m=f"{m:,}") for text, _ in HEADINGS.values()]


def terminal_table(content: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of the columns that 80 characters have room for."""
    n = reference_alone(content)
    shown = [(i, short.format(n=f"{n:,}")) for i, (_, short) in enumerate(HEADINGS.values()) if short is not None]
    return [text for _, text in shown], [[row[i] for i, _ in shown] for row in rows(content)]


def rows(content: dict[str, Any]) -> list[list[str]]:
    """One row of text a mixer, in the order of HEADINGS."""
    n, m = reference_alone(content), reference_tokens(content)
    found, alone, host = scores(content), latencies(content, "alone"), latencies(content, "host")
    at_n = {row["mixer"]: row for row in content["sweep"] if row["scope"] == "alone" and row["tokens"] == n}
    table = []
    for mixer in content["mixers"]:
        label = mixer["label"]
        runs = [row["seconds"] for row in content["training"] if row["mixer"] == label]
        row, at = at_n.get(label, {}), crossover(alone, label)
        latency, floor = row.get("latency"), row.get("floor")
        score = found.get(label)
        table.append([
            label,
            "diverged" if score is None else _accuracy(score),
            f"{mixer['parameters']:,}",
            f"{mixer['flops'] / 1e6:.2f}",
            f"{mean(runs):.1f}" if runs else "–",
            "stopped" if latency is None else f"{latency:.2f}",
            _ratio(gain(alone, label, n)),
            "–" if latency is None or not floor else f"{latency / floor:.2f}",
            f"{row['peak_bytes'] / 2**20:.1f}" if row.get("peak_bytes") else "–",
            _ratio(gain(host, label, m)),
            "–" if label == YARDSTICK else _from(at, alone[label]),
        ])  # fmt: skip
    return table


def _accuracy(score: Score) -> str:
    spread = f" ±{50 * (score.high - score.low):.1f}" if score.runs > 1 else ""
    return f"{100 * score.mean:.1f}{spread}"


def _from(at: float | None, measured: dict[int, float]) -> str:
    if at is None:
        return "never"
    return count(at) if at > min(measured) else f"≤ {count(at)}"


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
