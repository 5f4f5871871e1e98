"""The tables of the export pages: what was exported, what Qualcomm's compiler takes, and how fast runtimes are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from .figures import load, table, where


def onnx() -> str:
    content, lines = load("onnx.json"), []
    for row in content["rows"]:
        options = ", ".join(f"{key}={tuple(value) if isinstance(value, list) else value}"
                            for key, value in row["options"].items())  # fmt: skip
        cells = {each["mode"]: "yes" if each["works"] else "refused" for each in row["modes"]}
        free = "yes" if any("tokens" in each["free"] for each in row["modes"]) else "no"
        errors = [each["error"] for each in row["modes"] if each["error"] is not None]
        difference = f"{max(errors):.0e}" if errors else "–"
        modes = (cells.get(mode, "–") for mode in ("self", "causal", "cross", "mask", "step"))
        lines.append((f"`{row['mixer']}`", f"`{options}`" if options else "", *modes, free, difference))
    head = ("mixer", "options", "self", "causal", "cross", "mask", "prefill, step", "any number of tokens",
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
        lines.append((f"`{mixer.replace(':grid={0}x{1}', '')}`", *cells))
    head = ("mixer", *(f"{tokens:,} tokens" for tokens in sizes))
    return (
        f"{table(head, lines)}\n\nSize of the binary, time to compile, largest tensor, and what is moved to the "
        f"phone's memory while it runs; {content['dim']} channels, a8w8, for "
        f"`{content['chip']}`. Times are rough: other work ran on the machine. "
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


def quantised_mixers(target: str) -> str:
    """The error of each mixer, alone and with a limit, in the emulator for the target qnn."""
    content = load("export/mixers.json")
    lines: dict[str, list[str]] = {}
    key = "_emulated" if target == "qnn" else ""
    for row in content["rows"]:
        if row["target"] == target:
            limited = f"{row[f'limited{key}']:.3f}" if f"limited{key}" in row else "refused"
            wide = row["in_16_bits"]
            more = f", {wide} tensor{'s' * (wide > 1)}" if wide else ""
            lines.setdefault(row["mixer"], []).extend((f"{row[f'error{key}']:.3f}", f"{limited}{more}"))
    head = ("mixer", "a8w8", "`--max-error 0.05`", "a16w8", "`--max-error 0.01`")
    rows = ((f"`{name.replace(':grid=16x16', '')}`", *cells) for name, cells in lines.items())
    return f"{table(head, rows)}\n\n`python benchmarks/quantised_mixers.py benchmarks/results/export/mixers.json`"


def libraries() -> str:
    """Models of each library, with their own attention and converted: the error of the ONNX file, or its refusal."""
    content = load("export/libraries.json")
    mixers = list(dict.fromkeys(row["mixer"] for row in content["rows"]))
    cells = {(row["model"], row["mixer"]): row for row in content["rows"]}
    lines = []
    for library, model in dict.fromkeys((row["library"], row["model"]) for row in content["rows"]):
        rows = (cells.get((model, mixer), {}) for mixer in mixers)
        lines.append((library, model, *(_library(row) for row in rows)))
    head = ("library", "model", *("its own attention" if name == "keep" else f"`{name}`" for name in mixers))
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    return f"{table(head, lines)}\n\n{versions}. `python benchmarks/onnx_libraries.py OUT.json`"


def _library(row: dict[str, Any]) -> str:
    return "–" if not row else f"{row['error']:.0e}" if row["works"] else f"refused: {row['reason']}"


AIMS = {"a8w8": 1.0, "a16w8": 0.3}  # points of accuracy that may be lost


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    if not row["works"]:
        return f"**{row['reason']}**"
    size, largest = row["bytes"] / 1024, row["largest_activation"] / 2**20
    spilled = row["memory"]["spilled"] / 2**20
    return f"{size:,.0f} KiB, {row['compile_seconds']:.1f} s, {largest:,.1f} MiB, {spilled:,.1f} MiB"


def runtimes() -> str:
    """A row for each mixer at each number of tokens, a column for each runtime."""
    content = load("export/runtimes.json")
    rows = {(row["tokens"], row["mixer"], row["runtime"]): row for row in content["rows"]}
    names = list(dict.fromkeys(row["runtime"] for row in content["rows"]))
    lines = []
    for tokens, mixer in dict.fromkeys((tokens, mixer) for tokens, mixer, _ in sorted(rows, key=lambda key: key[0])):
        cells = (_runtime(rows.get((tokens, mixer, name)), rows.get((tokens, "softmax", name))) for name in names)
        lines.append((f"{tokens:,}", f"`{mixer}`", *cells))
    versions = {row["runtime"].split(",")[0]: row["version"] for row in content["rows"] if "version" in row}
    used = ", ".join(f"{name} {number}" for name, number in versions.items())
    return (
        f"{table(('tokens', 'mixer', *names), lines)}\n\n{content['dim']} channels, one sequence, float32 "
        f"(8 bits: a8w8); {where(content['machine'])}; {used}. "
        "`python benchmarks/runtimes.py benchmarks/results/export/runtimes.json`"
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
    parts = [f"{row['ms']:.3g} ms", f"{row['pytorch_ms'] / row['ms']:.2g} × PyTorch"]
    if row["mixer"] != "softmax" and attention and attention.get("ms") is not None:
        parts.append(f"{attention['ms'] / row['ms']:.2g} × attention")
    return f"{', '.join(parts)}; {error}"


TABLES: dict[str, Callable[[], str]] = {
    "onnx": onnx, "chips": chips, "hexagon": hexagon, "quantised-accuracy": quantised_accuracy,
    "runtimes": runtimes, "quantised-mixers": partial(quantised_mixers, "int8"),
    "emulated-mixers": partial(quantised_mixers, "qnn"), "onnx-libraries": libraries,
}  # fmt: skip
