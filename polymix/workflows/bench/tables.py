"""The rows of a benchmark as text: for the terminal, the report and the docs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from polymix.numbers import DASH, figure, fixed, machine_line, plural

Row = Mapping[str, Any]
VIEW = ("pass", "dtype", "threads", "dim", "batch")
# heading -> heading in a terminal of 80 characters (None: no room for the column)
HEADINGS: dict[str, str | None] = {
    "mixer": "mixer", "tokens": "tokens", "ms": "ms", "±%": "±%", "÷ floor": "÷\nfloor", "attn ÷ it": "attn\n÷ it",
    "% FLOP/s": "%\nFLOP/s", "% bytes/s": "%\nB/s", "peak MiB": "peak\nMiB", "resident MiB": None,
}  # fmt: skip
STEP: dict[str, str | None] = {name: name for name in ("mixer", "tokens", "ms", "±%", "state KiB", "peak MiB")}


def label(row: Row) -> str:
    """The mixer, and its implementation if one was asked for."""
    return str(row["mixer"]) if row["impl"] == "auto" else f"{row['mixer']}, {row['impl']}"


def views(content: Row) -> Iterator[tuple[str, list[Row]]]:
    """(title, rows) for each pass, type, number of threads, width and batch, in the order of measuring."""
    grouped: dict[tuple[Any, ...], list[Row]] = {}
    for row in content["rows"]:
        grouped.setdefault(tuple(row[name] for name in VIEW), []).append(row)
    for (pass_, dtype, threads, dim, batch), rows in grouped.items():
        yield f"{pass_}, {dtype}, {plural(threads, 'thread')}, {dim} channels, batch {batch}", rows


def table(rows: Sequence[Row], *, narrow: bool = False) -> tuple[list[str], list[list[str]]]:
    """Headings that fit the rows' pass, and a line of text for each row. `narrow` fits a terminal."""
    known = STEP if rows[0]["pass"] == "step" else HEADINGS
    shown = [name for name, short in known.items() if short or not narrow]
    return [(known[name] or name) if narrow else name for name in shown], [cells(row, shown) for row in rows]


def cells(row: Row, headings: Sequence[str]) -> list[str]:
    """The text of a row under some of the headings."""
    if row["stopped"]:
        return [label(row), f"{row['tokens']:,}", "stopped", *(DASH for _ in headings[3:])]
    text = {
        "mixer": label(row),
        "tokens": f"{row['tokens']:,}",
        "ms": figure(1e3 * row["seconds"]),
        "±%": fixed(50 * (row["high"] - row["low"]) / row["seconds"], 0),
        "÷ floor": fixed(row["floor_ratio"], 2),
        "attn ÷ it": fixed(row["attention_ratio"], 2),
        "% FLOP/s": fixed(row["flop_share"], 0, 100),
        "% bytes/s": fixed(row["byte_share"], 0, 100),
        "peak MiB": fixed(row["peak_bytes"], 1, 2**-20),
        "resident MiB": fixed(row["resident_bytes"], 1, 2**-20),
        "state KiB": fixed(row["state_bytes"], 1, 2**-10),
    }
    return [text[heading] for heading in headings]


def not_measured(content: Row) -> list[str]:
    """A line for each mixer and pass that was stopped, with the token counts and the reason."""
    counts: dict[tuple[str, ...], list[str]] = {}
    for row in content["rows"]:
        if row["stopped"]:
            counts.setdefault((label(row), row["pass"], row["dtype"], row["stopped"]), []).append(f"{row['tokens']:,}")
    return [
        f"{who}, {pass_}, {', '.join(dict.fromkeys(tokens))} tokens, {dtype}: {reason}"
        for (who, pass_, dtype, reason), tokens in counts.items()
    ]


def markdown(content: Row, tokens: int = 4096) -> str:
    """The tables of the docs: one for each type, threads, width and batch, at `tokens` or the most measured.

    "÷ floor" is the forward's time over that of its own products run bare, or the training step's over three of them.
    """
    grouped: dict[tuple[Any, ...], list[Row]] = {}
    for row in content["rows"]:
        if row["pass"] != "step":
            grouped.setdefault(tuple(row[name] for name in VIEW[1:]), []).append(row)
    machine = machine_line(content["machine"])
    return "\n\n".join(_markdown(setting, rows, tokens, machine) for setting, rows in grouped.items())


def _markdown(setting: tuple[Any, ...], rows: Sequence[Row], tokens: int, machine: str) -> str:
    dtype, threads, dim, batch = setting
    counts = sorted({row["tokens"] for row in rows})
    n = tokens if tokens in counts else counts[-1]
    at = {(label(row), row["pass"], row["tokens"]): row for row in rows}
    head = ["mixer", f"ms at {n:,}", "÷ floor", *(f"attention ÷ it at {count:,}" for count in counts)]
    head += ["training, ÷ 3 floors", "peak MiB"]
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    for who in dict.fromkeys(label(row) for row in rows):
        for pass_ in ("forward", "folded"):
            row = at.get((who, pass_, n))
            if row is None or (pass_ == "folded" and (row["stopped"] or row["mixer"] == "softmax")):
                continue
            texts = cells(row, ("mixer", "tokens", "ms", "÷ floor", "peak MiB"))
            ratios = [at.get((who, pass_, count), {}).get("attention_ratio") for count in counts]
            training = at.get((who, "training", n), {}).get("floor_ratio") if pass_ == "forward" else None
            name = f"{who}, folded" if pass_ == "folded" else who
            line = [name, texts[2], texts[3], *(fixed(ratio, 2) for ratio in ratios)]
            lines.append("| " + " | ".join([*line, fixed(training, 2), texts[4]]) + " |")
    title = f"{dtype}, {plural(threads, 'thread')}, {dim} channels, batch {batch}; {machine}:"
    return "\n".join([title, "", *lines])
