"""The tables of measured results, from benchmarks/results."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
STUDIES = ("degree-study", "degree-study-roomy")
PLUS_MINUS = "\u00a0±\u00a0"  # a cell of a table does not break there


def table(head: Iterable[Any], rows: Iterable[Iterable[Any]]) -> str:
    """A table in Markdown."""
    lines = [list(head)]
    lines += [["---"] * len(lines[0]), *(list(row) for row in rows)]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def load(name: str) -> dict[str, Any]:
    return dict(json.loads((RESULTS / name).read_text(encoding="utf-8")))


def where(machine: dict[str, Any]) -> str:
    threads = machine["threads"]
    return f"{machine['cpu']}, {threads} thread{'s' * (threads != 1)}, torch {machine['torch']}"


def over_seeds(values: Collection[float], written: Callable[[float], str] = "{:.3f}".format) -> str:
    """The mean, and ± half of the range where there are several."""
    return written(fmean(values)) + spread(values, written)


def spread(values: Collection[float], written: Callable[[float], str]) -> str:
    """± half of their range, to stand behind their mean; nothing for a single one."""
    return f"{PLUS_MINUS}{written((max(values) - min(values)) / 2)}" if len(values) > 1 else ""


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


# Speed and memory


def bench() -> str:
    """What `polymix bench` measured, every column."""
    from polymix.workflows.bench.tables import markdown

    return sentence(markdown(load("bench/results.json")))


def readme_bench(name: str = "bench") -> str:
    """Each mixer's time at 4,096 tokens, and its speedup over attention at every number of tokens."""
    content, groups = load(f"{name}/results.json"), {}
    for row in content["rows"]:
        if row["pass"] == "forward":
            groups.setdefault(tuple(row[key] for key in ("dtype", "threads", "dim", "batch")), []).append(row)
    return "\n\n".join(_speedups(rows, content["machine"]) for rows in groups.values())


def _speedups(rows: list[dict[str, Any]], machine: dict[str, Any], tokens: int = 4096) -> str:
    counts = sorted({row["tokens"] for row in rows})
    at = tokens if tokens in counts else counts[-1]
    by_mixer: dict[str, dict[int, dict[str, Any]]] = {}
    for row in rows:
        name = row["mixer"] if row["impl"] == "auto" else f"{row['mixer']}, {row['impl']}"
        by_mixer.setdefault(name, {})[row["tokens"]] = row
    lines = []
    for name, by_count in by_mixer.items():
        row = by_count.get(at)
        ratios = [by_count.get(count, {}).get("attention_ratio") for count in counts]
        cells = ["–" if ratio is None else f"{ratio:.2f} ×" if ratio < 10 else f"{ratio:.3g} ×" for ratio in ratios]
        lines.append((name, "–" if row is None or row["stopped"] else f"{1e3 * row['seconds']:.3g}", *cells))
    first = rows[0]
    threads = f"{first['threads']} thread{'s' * (first['threads'] != 1)}"
    size = f"{first['dim']} channels, batch {first['batch']}"
    head = ("mixer", f"ms at {at:,} tokens", *(f"speedup at {count:,}" for count in counts))
    return f"{machine['gpu'] or machine['cpu']}, {threads}, {first['dtype']}, {size}:\n\n{table(head, lines)}"


def blocks(along: str, other: str, fixed: int) -> str:
    """Milliseconds and MiB of each layer by its tokens or channels (`along`), where the other is `fixed`."""
    rows = [row for row in load("bench-blocks/results.json")["rows"] if row[other] == fixed]
    cells = {(row["mixer"], row[along]): f"{1e3 * row['seconds']:.3g}, {row['peak_bytes'] / 2**20:.1f}" for row in rows}
    sizes = sorted({size for _, size in cells})
    lines = [(f"`{mixer}`", *(cells[mixer, size] for size in sizes)) for mixer in dict.fromkeys(m for m, _ in cells)]
    what = {"tokens": "tokens", "dim": "channels"}[along]
    return table(("ms, MiB", *(f"{size:,} {what}" for size in sizes)), lines)


def castling() -> str:
    """What a training step takes: time and memory."""
    content = load("bench-castling/results.json")
    lines = [(f"`{row['mixer']}`", f"{1e3 * row['seconds']:.3g}", f"{row['peak_bytes'] / 2**20:.1f}")
             for row in content["rows"]]  # fmt: skip
    return table(("mixer", "ms", "MiB"), lines)


def scenes(folder: str, headline: bool) -> str:
    """The answer of `polymix compare` on its default data, and the accuracies: mean, and half the range over seeds."""
    content, accuracies = load(f"{folder}/results.json"), {}
    for row in content["rows"]:
        accuracies.setdefault(row["mixer"], []).append(100 * row["metrics"]["accuracy"])
    seeds = content["settings"]["seeds"]
    lines = [(f"`{mixer}`", over_seeds(values, "{:.1f}".format)) for mixer, values in accuracies.items()]
    head = ("mixer", f"accuracy, %, and half the range over {seeds} seeds" if seeds > 1 else "accuracy, %")
    answer = f" {content['answer']['headline']}" if headline else ""
    return f"{where(content['machine'])}.{answer}\n\n{table(head, lines)}"


def is_bf16(row: dict[str, Any]) -> bool:
    """Whether a target is of the group bf16, which has tables of its own."""
    return row["what"].startswith("float32 / ") or (row["what"].endswith("floors") and ", bfloat16, " in row["what"])


def targets() -> str:
    content, lines = load("targets.json"), []
    for row in content["rows"]:
        if is_bf16(row):
            continue
        goal, verdict = f"{row['sign']} {row['target']:.3g}", "met" if row["met"] else "**not met**"
        lines.append((row["what"], f"{row['value']:.3g}", goal, verdict, row["detail"]))
    head = ("measurement", "measured", "target", "", "from")
    return f"{where(content['machine'])}, {content['machine']['cpu_capability']}.\n\n{table(head, lines)}"


def whole_models() -> str:
    """Times with attention and with each mixer, plain, optimized and compiled, and attention's over the mixer's."""
    content, lines = load("whole-models.json"), []
    for attention, row in ((rows[0], row) for rows in content["pieces"].values() for row in rows[1:]):
        times = [f"{1e3 * row[key]:.0f}" for key in ("attention", "plain", "optimized")]
        gains = [row["attention"] / row["plain"], row["attention"] / row["optimized"],
                 row["attention_optimized"] / row["optimized"]]  # fmt: skip
        compiled = ["–", "–"]
        if "compiled" in row:
            compiled = [f"{1e3 * row['compiled']:.0f}", f"{attention['compiled'] / row['compiled']:.2f} ×"]
        gained = [f"{gain:.2f} ×" for gain in gains]
        lines.append((row["model"], row["input"], row["mixer"], *times, compiled[0], *gained, compiled[1]))
    head = ("model", "input", "mixer", "attention, ms", "mixer, ms", "optimized, ms", "compiled, ms", "speedup",
            "speedup, optimized", "speedup, both optimized", "speedup, both compiled")  # fmt: skip
    setting = f"{where(content['machine'])}; float32, forward, batch 1 unless the input says another."
    return f"{setting}\n\n{table(head, lines)}\n\n`python benchmarks/whole_models.py OUT.json`"


def whole_model_parts() -> str:
    """The floor of each optimized model, and the share of each kind of operation in its time."""
    content, lines = load("whole-models.json"), []
    for row in (row for rows in content["pieces"].values() for row in rows):
        whole = sum(row["parts"].values())
        shares = [f"{100 * seconds / whole:.0f} %" for seconds in row["parts"].values()]
        times = f"{1e3 * row['floor']:.0f}", f"{row['optimized'] / row['floor']:.2f}"
        lines.append((row["model"], row["input"], row["mixer"], *times, *shares))
    head = ("model", "input", "mixer", "floor, ms", "optimized ÷ floor", "products", "attention", "C kernels", "norms",
            "activations", "other passes", "Python")  # fmt: skip
    return table(head, lines)


FLOORS, GAIN = {"pom": 1.3, "qt": 1.4}, 1.5  # aimed at in language models: floors at most, attention over ours at least


def language_models() -> str:
    """Optimized GPT-2 with mixers against its floor and against optimized attention, and what was aimed at."""
    contents, lines = [load("whole-models.json"), load("language-models.json")], []
    for threads, row in _language_rows(*contents):
        if row["mixer"] not in FLOORS:
            continue
        ours, most = row["optimized"], FLOORS[row["mixer"]]
        floors, gain = ours / row["floor"], row["attention_optimized"] / ours
        verdicts = ["met" if met else "**not met**" for met in (floors <= most, gain >= GAIN)]
        lines.append((row["mixer"], row["input"], f"{threads}, {row['clock']}", f"{1e3 * ours:.0f}",
                      f"{floors:.2f} (≤ {most}), {verdicts[0]}", f"{gain:.2f} × (≥ {GAIN}), {verdicts[1]}",
                      f"{gain * floors:.2f} ×"))  # fmt: skip
    head = ("mixer", "input", "threads, clock", "optimized, ms", "over the floor (aim)",
            "attention's time, optimized, over ours (aim)", "and over the floor")  # fmt: skip
    machine = contents[0]["machine"]
    setting = f"{machine['cpu']}, torch {machine['torch']}, AVX-512; GPT-2, batch 1, float32."
    command = "`python benchmarks/whole_models.py OUT.json --no-compiled --only gpt2-4096-pom,…`"
    return f"{setting}\n\n{table(head, lines)}\n\n{command}, with `--threads 1 --clock processor` for one thread."


def prefill_logits() -> str:
    """Tokens a second of GPT-2's prompt: with the logits of its last token, and with all."""
    rates: dict[str, dict[str, float]] = {}
    content = load("whole-models.json")
    for _, row in _language_rows(content):
        rates.setdefault(row["mixer"], {}).setdefault(row["input"], row["tokens"] / row["optimized"])
    last, whole = "4,096 tokens", "4,096 tokens, all logits"
    lines = [(mixer, f"{its[last]:,.0f}", f"{its[whole]:,.0f}") for mixer, its in rates.items() if whole in its]
    setting = f"{where(content['machine'])}; GPT-2, {last}, under `polymix.optimize`, float32."
    command = "`python benchmarks/whole_models.py OUT.json --only gpt2-4096-pom,gpt2-4096-pom-logits`"
    return f"{table(('mixer', 'last token, tokens/s', 'all logits, tokens/s'), lines)}\n\n{setting} {command}"


def _language_rows(*contents: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of GPT-2, with the threads of their machine."""
    for content in contents:
        for rows in content["pieces"].values():
            yield from ((content["machine"]["threads"], row) for row in rows if row["model"] == "gpt2")


def overhead() -> str:
    """Microseconds of Python in a call: before its first kernel, and a whole call on few tokens."""
    content = load("overhead.json")
    lines = [(f"`{row['mixer']}`", f"{row['first_kernel_us']:.0f}", f"{row['call_16_tokens_us']:.0f}")
             for row in content["rows"]]  # fmt: skip
    head = ("mixer", "to the first kernel, 196 tokens, µs", "a whole call with 16 tokens, µs")
    command = "`python benchmarks/overhead.py OUT.json --threads 1 --clock processor`"
    return f"{table(head, lines)}\n\n{where(content['machine'])}; {command}"


def compiled() -> str:
    """Milliseconds of each mixer: compiled from plain PyTorch, with C kernels as nodes, and not compiled."""
    content, lines = load("compiled.json"), []
    ways = "compiled eager", "kernels as nodes", "plain call"
    for row in content["rows"]:
        gain = row["ms"]["compiled eager"] / row["ms"]["kernels as nodes"]
        what = "training step" if row["training"] else "forward"
        times = (f"{row['ms'][way]:.2f}" for way in ways)
        lines.append((row["mixer"], what, f"{row['tokens']:,} × {row['batch']}", *times, f"{gain:.2f} ×"))
    head = ("mixer", "", "tokens × batch", "compiled PyTorch, ms", "kernels as nodes, ms", "not compiled, ms", "gain")
    setting = f"{where(content['machine'])}; 192 channels, float32."
    return f"{setting}\n\n{table(head, lines)}\n\n`python benchmarks/compiled.py OUT.json`"


# Conversion


def recovery() -> str:
    content = load("recovery.json")
    stages = ("before", "converted", "imitated", "distilled", "scratch")
    lines = [(row["mixer"], *(f"{row[stage]:.1%}" for stage in stages)) for row in content["rows"]]
    epochs = content["epochs"]
    setting = (
        f"Epochs: {epochs['teacher']} to train the model with attention, then {epochs['imitate']} of imitation and "
        f"{epochs['fine-tune']} of fine-tuning. The models from scratch are trained for the sum of the last two. "
        "One seed. `python benchmarks/recovery.py OUT.json`"
    )
    head = ("mixer", "attention", "converted", "after imitation", "after fine-tuning", "from scratch")
    return f"{table(head, lines)}\n\n{setting}"


def timm_models() -> str:
    """The sizes of the models by name, with a paper's figures beside ours where it prints them for the pair."""
    content, lines = load("tasks/classify/timm-models.json"), []
    for row in content["rows"]:
        printed = row["printed"] or {}
        paper = [printed.get(key, "–") for key in ("parameters", "multiply_adds")]
        operations = "–" if row["multiply_adds"] is None else f"{row['multiply_adds']:.2f}"
        lines.append((f"`{row['name']}`", f"{row['parameters']:.2f}", paper[0], operations, paper[1]))
    head = ("model", "parameters, M", "paper", "multiply-adds, G", "paper")
    command = "python benchmarks/timm_models.py benchmarks/results/tasks/classify/timm-models.json"
    return f"{table(head, lines)}\n\ntimm {content['timm']}. `{command}`"


def hosts() -> str:
    lines, content = [], load("hosts.json")
    for row in content["rows"]:
        if row["refused"]:
            lines.append((row["host"], row["mixer"], f"error: {row['refused']}", "", "", ""))
            continue
        published = row["printed"]
        paper = ""
        if published is not None:
            size = "" if published["parameters"] is None else f"{published['parameters']} M, "
            paper = f"{size}{published['multiply_adds']} G of the {published['what']} ({published['source']})"
        counts = ("–" if row[key] is None else f"{row[key]:.2f}" for key in ("multiply_adds", "layer_multiply_adds"))
        lines.append((row["host"], row["mixer"], f"{row['parameters']:.2f}", *counts, paper))
    head = ("model", "mixer", "parameters, M", "multiply-adds, G", "of the layers, G", "in the paper")
    notes = "\n".join(f"- **{host}.** {note}" for host, note in content["notes"].items())
    return f"{table(head, lines)}\n\n{notes}\n\n`python benchmarks/hosts.py OUT.json`"


# Table 1


def exact() -> str:
    rows = load("table-1.json")["exact"]
    cells = [(row["mechanism"], row["degree"], row["chains"], f"{row['error']:.1e}") for row in rows]
    return table(("mechanism", "degree", "chains", "relative error"), cells)


def approximate(part: str, down: str, across: str, label: str, heading: str) -> str:
    """Errors by two variables, one down and one across."""
    errors = {(row[down], row[across]): f"{row['error']:.1e}" for row in load("table-1.json")[part]}
    columns = list(dict.fromkeys(column for _, column in errors))
    lines = [
        (f"{line:g}", *(errors[line, column] for column in columns)) for line in dict.fromkeys(d for d, _ in errors)
    ]
    return table((label, *(heading.format(column) for column in columns)), lines)


# QT and the degree study


def qt_error() -> str:
    rows = load("qt-error.json")["rows"]
    orders = ("order_0", "order_1", "order_2")
    lines = [
        (f"{row['spread']:g}", f"{row['largest']:.1f}", *(f"{row[order]:.2g}" for order in orders)) for row in rows
    ]
    head = ("standard deviation of s", "largest s", *(order.replace("_", " ") for order in orders))
    return table(head, lines)


def study(folder: str) -> dict[str, Any]:
    return load(f"{folder}/results.json")


def study_setting(folder: str) -> str:
    content = study(folder)
    host, recipe, seeds = content["host"], content["recipe"], len({row["seed"] for row in content["rows"]})
    if "num_layers" in host:
        model = (
            f"Steps of {recipe['batch_size']} × {recipe['context']} tokens of {recipe['vocab']:,}, "
            f"layers: {host['num_layers']}, channels: {host['hidden_size']}, hidden units of an MLP: "
            f"{host['intermediate_size']}, "
        )
    else:
        side = host["image_size"] // host["patch_size"]
        model = (
            f"{side * side} tokens of {host['patch_size']} × {host['patch_size']} pixels, blocks: {host['depth']}, "
            f"channels: {host['dim']}, hidden units of an MLP: {int(host['dim'] * host['mlp_ratio'])}, "
        )
    counted = f" By the tokens' frequencies alone: {content['frequencies']:.3f}." if "frequencies" in content else ""
    return f"{model}epochs: {recipe['epochs']}, seeds: {seeds}, runs: {len(content['rows'])}.{counted}"


def by_degree(folder: str, cell: Callable[[list[dict[str, Any]]], str]) -> str:
    """A row for each basis and normalisation, a column for each degree. At degree 1 all bases are the first."""
    rows = study(folder)["rows"]
    degrees, bases = sorted({row["degree"] for row in rows}), list(dict.fromkeys(row["basis"] for row in rows))
    lines = []
    for basis in bases:
        for normalize in (None, "rms"):
            keys = [(degree, normalize, basis if degree > 1 else bases[0]) for degree in degrees]
            runs = ([row for row in rows if (row["degree"], row["normalize"], row["basis"]) == key] for key in keys)
            lines.append((basis, normalize or "as it is", *map(cell, runs)))
    return table(("basis", "Y", *degrees), lines)


def accuracy(folder: str) -> str:
    """Mean over seeds, in per cent."""
    return by_degree(folder, lambda runs: f"{100 * fmean(run['accuracy'] for run in runs):.1f}")


def growth(when: str, figure: str, folder: str) -> str:
    """Geometric mean over seeds of a figure."""
    return by_degree(folder, lambda runs: mean([run[when][figure] for run in runs]))


def by_precision(folder: str) -> str:
    """A row for each basis and degree, with a cell for each precision."""
    rows = study(folder)["rows"]
    score, unit, form = ("loss", 1, "{:.3f}") if "loss" in rows[0] else ("accuracy", 100, "{:.1f}")

    def cell(its: list[dict[str, Any]]) -> str:
        diverged = sum(row[score] is None for row in its)
        if diverged or not its:
            return f"{diverged} of {len(its)} diverged" if its else "–"
        largest = max(row["trained"]["largest"] for row in its)
        return f"{over_seeds([unit * row[score] for row in its], form.format)} ({largest:.0f})"

    precisions = list(dict.fromkeys(row["precision"] for row in rows))
    lines = []
    for basis, degree in sorted({(row["basis"], row["degree"]) for row in rows}, key=lambda pair: pair[::-1]):
        mine = [row for row in rows if (row["basis"], row["degree"]) == (basis, degree)]
        cells = [cell([row for row in mine if row["precision"] == precision]) for precision in precisions]
        lines.append((degree, basis, *cells))
    return f"{study_setting(folder)}\n\n{table(('degree', 'basis', *precisions), lines)}"


def mean(values: list[float | None]) -> str:
    logs = [math.log(value) for value in values if value is not None and 0 < value < math.inf]
    if len(logs) < len(values) or not values:
        return "not finite" if values else "–"
    centre = math.exp(fmean(logs))
    return f"{centre:.2g}" if centre < 100 else f"{centre:,.0f}"


TABLES: dict[str, Callable[[], str]] = {
    "bench": bench,
    "bench-padre": partial(readme_bench, "bench-padre"),
    "bench-castling": castling,
    "bench-channels": partial(blocks, "dim", "tokens", 1024),
    "bench-positions": partial(blocks, "tokens", "dim", 64),
    "readme-bench": readme_bench,
    "scenes": partial(scenes, "compare-scenes", True),
    "padre-parts": partial(scenes, "compare-padre", False),
    "heads": partial(scenes, "compare-heads", False),
    "targets": targets,
    "whole-models": whole_models,
    "prefill-logits": prefill_logits,
    "overhead": overhead,
    "whole-model-parts": whole_model_parts,
    "language-models": language_models,
    "compiled": compiled,
    "recovery": recovery,
    "hosts": hosts,
    "timm-models": timm_models,
    "table-1-exact": exact,
    "table-1-softmax": partial(approximate, "softmax", "reach", "order", "largest logit", "order {}"),
    "table-1-mamba": partial(approximate, "mamba", "largest", "held", "largest Δ", "Δ {}"),
    "qt-error": qt_error,
    "degree-study-deep": partial(by_precision, "degree-study-deep"),
    "degree-study-text": partial(by_precision, "degree-study-text"),
    "degree-study-text-clipped": partial(by_precision, "degree-study-text-clipped"),
}
for folder in STUDIES:
    TABLES |= {
        f"{folder}-host": partial(study_setting, folder), f"{folder}-accuracy": partial(accuracy, folder),
        f"{folder}-gradient": partial(growth, "at_init", "gradient", folder),
        f"{folder}-largest": partial(growth, "trained", "largest", folder),
    }  # fmt: skip
