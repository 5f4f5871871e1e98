"""The rows of results as text: for the terminal, the report and the README."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
VIEW = ("pass", "dtype", "threads", "dim", "batch")
# what is said -> its heading in the terminal, where 80 characters must do (None: no room there)
HEADINGS: dict[str, str | None] = {
    "mixer": "mixer", "tokens": "tokens", "ms": "ms", "±%": "±%", "÷ floor": "÷\nfloor", "attn ÷ it": "attn\n÷ it",
    "% FLOP/s": "%\nFLOP/s", "% bytes/s": "%\nB/s", "peak MiB": "peak\nMiB", "resident MiB": None,
}  # fmt: skip
STEP: dict[str, str | None] = {name: name for name in ("mixer", "tokens", "ms", "±%", "state KiB", "peak MiB")}


def label(row: Row) -> str:
    """Who was measured: the mixer, and its implementation where one was asked for."""
    return str(row["mixer"]) if row["impl"] == "auto" else f"{row['mixer']}, {row['impl']}"


def views(content: Row) -> Iterator[tuple[str, list[Row]]]:
    """(title, rows) for each pass, type, number of threads, width and batch, in the order of measuring."""
    grouped: dict[tuple[Any, ...], list[Row]] = {}
    for row in content["rows"]:
        grouped.setdefault(tuple(row[name] for name in VIEW), []).append(row)
    for (pass_, dtype, threads, dim, batch), rows in grouped.items():
        plural = "" if threads == 1 else "s"
        yield f"{pass_}, {dtype}, {threads} thread{plural}, {dim} channels, batch {batch}", rows


def tabled(rows: Sequence[Row], *, narrow: bool = False) -> tuple[list[str], list[list[str]]]:
    """Headings that mean something for the rows' pass, and a line of text for each; `narrow` fits a terminal."""
    known = STEP if rows[0]["pass"] == "step" else HEADINGS
    shown = [name for name, short in known.items() if short or not narrow]
    return [(known[name] or name) if narrow else name for name in shown], [cells(row, shown) for row in rows]


def cells(row: Row, headings: Sequence[str]) -> list[str]:
    """The text of a row under some of the headings."""
    if row["stopped"]:
        return [label(row), f"{row['tokens']:,}", "stopped", *("–" for _ in headings[3:])]
    spread = 50 * (row["high"] - row["low"]) / row["seconds"]
    text = {
        "mixer": label(row),
        "tokens": f"{row['tokens']:,}",
        "ms": f"{1e3 * row['seconds']:.3g}",
        "±%": f"{spread:.0f}",
        "÷ floor": _number(row["floor_ratio"], 1, 2),
        "attn ÷ it": _number(row["attention_ratio"], 1, 2),
        "% FLOP/s": _number(row["flop_share"], 100, 0),
        "% bytes/s": _number(row["byte_share"], 100, 0),
        "peak MiB": _number(row["peak_bytes"], 2**-20, 1),
        "resident MiB": _number(row["resident_bytes"], 2**-20, 1),
        "state KiB": _number(row["state_bytes"], 2**-10, 1),
    }
    return [text[heading] for heading in headings]


def _number(value: float | None, scale: float, digits: int) -> str:
    return "–" if value is None else f"{scale * value:.{digits}f}"


def machine(content: Row) -> str:
    """What it was measured on, in a line."""
    its = content["machine"]
    return f"{its['gpu'] or its['cpu']} ({its['cpu_capability']}, {its['cores']} cores), torch {its['torch']}"


def markdown(content: Row, tokens: int = 4096) -> str:
    """The README's tables: one for each type, number of threads, width and batch, at `tokens` or the most measured.

    "÷ floor" is the forward's time over that of its own products run bare, and the training step's over three of them.
    """
    grouped: dict[tuple[Any, ...], list[Row]] = {}
    for row in content["rows"]:
        if row["pass"] != "step":
            grouped.setdefault(tuple(row[name] for name in VIEW[1:]), []).append(row)
    return "\n\n".join(_markdown(its, rows, tokens, machine(content)) for its, rows in grouped.items())


def _markdown(its: tuple[Any, ...], rows: Sequence[Row], tokens: int, where: str) -> str:
    dtype, threads, dim, batch = its
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
            line = [name, texts[2], texts[3], *(_number(ratio, 1, 2) for ratio in ratios)]
            lines.append("| " + " | ".join([*line, _number(training, 1, 2), texts[4]]) + " |")
    plural = "" if threads == 1 else "s"
    return "\n".join([f"{dtype}, {threads} thread{plural}, {dim} channels, batch {batch}; {where}:", "", *lines])
