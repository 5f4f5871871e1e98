"""The tables of the export pages: what was exported, what Qualcomm's compiler takes, and how fast runtimes are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from figures import load, table, where


def onnx() -> str:
    content, lines = load("onnx.json"), []
    for row in content["rows"]:
        options = ", ".join(f"{key}={tuple(value) if isinstance(value, list) else value}"
                            for key, value in row["options"].items())  # fmt: skip
        cells = {each["mode"]: "yes" if each["works"] else "refused" for each in row["modes"]}
        free = "yes" if any("tokens" in each["free"] for each in row["modes"]) else "no"
        errors = [each["error"] for each in row["modes"] if each["error"] is not None]
        difference = f"{max(errors):.0e}" if errors else "–"
        modes = (cells.get(mode, "–") for mode in ("self", "causal", "cross", "mask"))
        lines.append((f"`{row['mixer']}`", f"`{options}`" if options else "", *modes, free, difference))
    head = ("mixer", "options", "self", "causal", "cross", "mask", "any number of tokens",
            "largest relative difference")  # fmt: skip
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    return f"{table(head, lines)}\n\n{versions}. `python benchmarks/onnx_export.py OUT.json`"


def chips() -> str:
    from polymix.export.hexagon import CHIPS

    lines = ((f"`{name}`", f"`{chip.model}`", f"`{chip.number}`", f"V{chip.architecture}", f"{chip.memory} MiB")
             for name, chip in CHIPS.items())  # fmt: skip
    return table(("name", "model", "number", "processor", "its memory"), lines)


def hexagon() -> str:
    content = load("export/hexagon.json")
    rows = {(row["mixer"], row["tokens"]): row for row in content["rows"]}
    sizes = sorted({tokens for _, tokens in rows})
    lines = []
    for mixer in dict.fromkeys(mixer for mixer, _ in rows):
        cells = (_cell(rows.get((mixer, tokens))) for tokens in sizes)
        lines.append((f"`{mixer.split('=')[0].split(':')[0] if '{0}' in mixer else mixer}`", *cells))
    head = ("mixer", *(f"{tokens:,} tokens" for tokens in sizes))
    return (
        f"{table(head, lines)}\n\nBinary, time to compile, largest tensor; {content['dim']} channels, a8w8, for "
        f"`{content['chip']}`. Each case had {content['limit']} s on one thread. "
        "`python benchmarks/hexagon.py benchmarks/results/export/hexagon.json`"
    )


def quantised_accuracy() -> str:
    """The accuracy in PyTorch and of quantised files, and whether the aim is met."""
    content, lines = load("export/accuracy.json"), []
    for row in content["rows"]:
        name = (row["host"], f"`{row['mixer']}`", f"`{row['target']}`")
        if "failed" in row:
            lines.append((*name, "–", "–", "–", row["failed"]))
            continue
        lost = {scheme: 100 * (row["float"] - row[scheme]) for scheme in AIMS}
        missed = [scheme for scheme, limit in AIMS.items() if lost[scheme] > limit]
        accuracies = (f"{100 * row[key]:.1f} %" for key in ("float", *AIMS))
        lines.append((*name, *accuracies, f"**missed in {', '.join(missed)}**" if missed else "met"))
    head = ("model", "mixer", "target", "PyTorch", *AIMS, "aim")
    return f"{table(head, lines)}\n\n`python benchmarks/quantised_accuracy.py benchmarks/results/export/accuracy.json`"


AIMS = {"a8w8": 1.0, "a16w8": 0.3}  # points of accuracy that may be lost


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    if not row["works"]:
        return f"**{row['reason']}**"
    size, largest = row["bytes"] / 1024, row["largest_activation"] / 2**20
    return f"{size:,.0f} KiB, {row['compile_seconds']:.1f} s, {largest:,.1f} MiB"


def runtimes() -> str:
    """A row for each mixer at each number of tokens, a column for each runtime."""
    content = load("export/runtimes.json")
    rows = {(row["tokens"], row["mixer"], row["runtime"]): row for row in content["rows"]}
    names = list(dict.fromkeys(row["runtime"] for row in content["rows"]))
    lines = []
    for tokens, mixer in dict.fromkeys((tokens, mixer) for tokens, mixer, _ in sorted(rows, key=lambda key: key[0])):
        cells = (_runtime(rows.get((tokens, mixer, name)), rows.get((tokens, "softmax", name))) for name in names)
        lines.append((f"{tokens:,}", f"`{mixer}`", *cells))
    versions = {row["runtime"]: row["version"] for row in content["rows"] if "version" in row}
    used = ", ".join(f"{name} {number}" for name, number in versions.items())
    return (
        f"{table(('tokens', 'mixer', *names), lines)}\n\n{content['dim']} channels, one sequence, float32; "
        f"{where(content['machine'])}; {used}. `python benchmarks/runtimes.py benchmarks/results/export/runtimes.json`"
    )


def _runtime(row: dict[str, Any] | None, attention: dict[str, Any] | None) -> str:
    """Milliseconds, times as fast as PyTorch, times as fast as attention in the same runtime, error."""
    if row is None:
        return "–"
    if "reason" in row:
        return "refused"
    error = f"error {row['error']:.0e}"
    if row["ms"] is None:
        return f"not timed; {error}"
    said = [f"{row['ms']:.3g} ms", f"{row['pytorch_ms'] / row['ms']:.2g} × PyTorch"]
    if row["mixer"] != "softmax" and attention and attention.get("ms") is not None:
        said.append(f"{attention['ms'] / row['ms']:.2g} × attention")
    return f"{', '.join(said)}; {error}"


TABLES: dict[str, Callable[[], str]] = {
    "onnx": onnx, "chips": chips, "hexagon": hexagon, "quantised-accuracy": quantised_accuracy,
    "runtimes": runtimes,
}  # fmt: skip
