"""What is printed at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpu_steps.bench import Row
from gpu_steps.mixers import PAPER

Content = dict[str, Any]


def report(content: Content) -> str:
    """Every step's table, the verdicts counted, and what is missing."""
    steps = content["steps"]
    parts = [_machine(content), _tests(steps["tests"]), _ceilings(steps["ceilings"]), *_ops(steps["ops"])]
    parts += [*_mixers(steps["paper"]), _paper(steps["paper"]), *_mixers(steps["mixers"]), *_others(steps["others"])]
    parts += [*_models(steps["models"]), *_mixers(steps["compiled"])]
    verdicts = [row["verdict"] for step in ("ops", "others") for row in steps[step] if row.get("verdict")]
    parts.append(f"Targets: {verdicts.count('PASS')} PASS, {verdicts.count('FAIL')} FAIL.")
    parts += [f"{name} did not run: {why}" for name, why in content.get("errors", {}).items()]
    parts += [f"Not compared with {line}." for line in content["missing"]]
    if not content["finished"]:
        parts.append("Not finished: the same command goes on from here.")
    if content["machine"]["dry_run"]:
        parts.append("A dry run under Triton's interpreter: no time and no verdict above means anything.")
    return "\n\n".join(part for part in parts if part)


def table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    widths = [max(len(line[i]) for line in (headings, *rows)) for i in range(len(headings))]
    lines = []
    for first, *rest in (headings, *rows):
        figures = [text.rjust(width) for text, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *figures]).rstrip())
    return "\n".join([title, *lines])


def _machine(content: Content) -> str:
    its = content["machine"]
    return f"{its['gpu'] or its['cpu']}, torch {its['torch']}, triton {its['triton']}, TF32 off"


def _tests(rows: Sequence[Row]) -> str:
    files = [[row["what"], "FAILS" if row["failed"] else row["said"]] for row in rows if "said" in row]
    checks = [row for row in rows if "said" not in row]
    failed = [f"{row['what']} {row['dtype']} {row['pass']}: {row['failed']}" for row in checks if row["failed"]]
    line = f"Mixers by kernels against eager float64: {len(checks) - len(failed)} of {len(checks)} agree."
    return "\n".join([table("Tests", ("file", ""), files), line if checks else "", *failed]).strip()


def _ceilings(rows: Sequence[Row]) -> str:
    units = {"bytes_per_second": "TB/s", "flops_per_second": "TFLOP/s"}
    shown = [f"{row['what']} {row[by] / 1e12:.3g} {unit}" for row in rows for by, unit in units.items() if by in row]
    return f"Ceilings: {', '.join(shown)}" if shown else ""


def _by(rows: Sequence[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def _spread(title: str, rows: Sequence[Row], names: Sequence[str], cell: Any) -> str:
    """One line for every value of `names`, one column for every count of tokens."""
    counts = sorted({row["tokens"] for row in rows})
    lines = []
    for who, its in _by(rows, *names).items():
        at = {row["tokens"]: cell(row) for row in its}
        lines.append([" ".join(map(str, who)), *(at.get(n, "") for n in counts)])
    text = table(title, ("", *(f"{n:,}" for n in counts)), lines)
    stopped = {(" ".join(str(row[name]) for name in names), row["stopped"]): None for row in rows if row["stopped"]}
    return "\n".join([text, *(f"  – {who}: {why[:120]}" for who, why in stopped)])


def _ops(rows: Sequence[Row]) -> list[str]:
    def cell(row: Row) -> str:
        if row["stopped"]:
            return "–"
        share = row["byte_share"] if row["bound"] == "memory" else row["flop_share"]
        unit = "" if row["bound"] == "memory" else "f"
        return f"{1e6 * row['seconds']:.1f} µs {100 * share:.0f}%{unit} {row['verdict'] or '    '}"

    failed = [f"{row['op']} {row['dtype']}: {row['failed']}" for row in rows if row.get("failed")]
    title = "Ops, {}, {}, batch {}: time, % of the copy's bytes/s (f: bound by arithmetic, % of the products' FLOP/s)"
    tables = [
        _spread(title.format(*its), part, ("op",), cell)
        for its, part in _by([row for row in rows if "batch" in row], "dtype", "pass", "batch").items()
    ]
    return [*(["Ops that compute wrong, not timed\n" + "\n".join(failed)] if failed else []), *tables]


def _mixers(rows: Sequence[Row]) -> list[str]:
    def cell(row: Row) -> str:
        if row["stopped"]:
            return "–"
        ratio = "" if row["ratio"] is None else f" ×{row['ratio']:.2f} ({row['wall_ratio']:.2f})"
        return f"{1e3 * row['seconds']:.3f} ms{ratio}"

    title = "Mixers, D = {}, {}, {}: time, × as fast as attention's best backend (back to back)"
    return [
        _spread(title.format(*its), part, ("mixer", "impl"), cell)
        for its, part in _by(rows, "dim", "dtype", "pass").items()
    ]


def _models(rows: Sequence[Row]) -> list[str]:
    lines = []
    for row in rows:
        time = f"{1e3 * row['seconds']:.3f} ms" if row["seconds"] else f"– {str(row['stopped'])[:80]}"
        ratio = "" if row["ratio"] is None else f"×{row['ratio']:.2f}"
        lines.append([f"{row['host']} {row['dtype']} batch {row['batch']} {row['mixer']}", time, ratio])
    return [table("Whole models: time, × as fast as with attention", ("", "", ""), lines)]


def paper_ratios(rows: Sequence[Row]) -> tuple[float | None, float | None]:
    """padre-2 at its best, forward or folded: over unfused float32 attention, and bf16 over the best fused bf16."""
    ours = [row for row in rows if row["mixer"] == "padre-2" and row["seconds"]]
    unfused = [row["unfused_ratio"] for row in ours if row["dtype"] == "float32" and row["unfused_ratio"]]
    fused = [row["ratio"] for row in ours if row["dtype"] == "bfloat16" and row["ratio"]]
    return max(unfused, default=None), max(fused, default=None)


def _paper(rows: Sequence[Row]) -> str:
    unfused, fused = paper_ratios(rows)
    if unfused is None:
        return ""
    verdict = "PASS" if unfused >= PAPER else "FAIL"
    honest = "not measured" if fused is None else f"{fused:.2f}"
    return (
        f"The paper's setting, padre-2 over unfused float32 attention: {unfused:.1f} (target {PAPER}: {verdict}).\n"
        f"In bf16 over attention's best backend: {honest}."
    )


def _others(rows: Sequence[Row]) -> list[str]:
    def cell(row: Row) -> str:
        if row["stopped"]:
            return "–"
        return f"{1e6 * row['seconds']:.1f} µs ×{row['ratio']:.2f} {row['verdict'] or ''}".rstrip()

    title = "Others' kernels, {}, {}, batch {}: our time, × as fast as they are"
    return [
        _spread(title.format(*its), part, ("what",), cell) for its, part in _by(rows, "dtype", "pass", "batch").items()
    ]
