"""The tables of GPUs, measured and modelled, and of the processor beside the H200, which has AMX."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from .figures import ROOT, is_bf16, load, table, where

sys.path.append(str(ROOT / "benchmarks"))
from gpu_steps.digests import digests

FILE, BEFORE = "gpu-nvidia-h200-quick.json", "gpu-nvidia-h200-before.json"
Row = dict[str, Any]


def _rows(step: str, file: str = FILE, **where: Any) -> list[Row]:
    return [row for row in load(file)["steps"][step] if all(row.get(key) == value for key, value in where.items())]


def _setting(*, commands: bool) -> str:
    machine = load(FILE)["machine"]
    its = f"{machine['gpu']}, PyTorch {machine['torch']}, Triton {machine['triton']}"
    return f"{its}; `python benchmarks/gpu.py --quick`." if commands else f"{its}."


def _cell(row: Row | None) -> str:
    """Attention's time over the mixer's on the card, and as a user waits for both."""
    if row is None or row["ratio"] is None:
        return "–"
    return f"{_short(row['ratio'])} × ({_short(row['wall_ratio'])} ×)"


def _short(ratio: float) -> str:
    return f"{ratio:.2g}" if ratio < 10 else f"{ratio:.0f}"


def mixers() -> str:
    """Each mixer's best implementation against attention's best, by type, pass and tokens."""
    where = [(dtype, pass_) for dtype in ("bfloat16", "float32") for pass_ in ("forward", "training")]
    tokens = sorted({row["tokens"] for row in _rows("mixers")})
    head = ("mixer", *(f"{dtype}, {pass_}, {n:,}" for dtype, pass_ in where for n in tokens))
    lines = []
    for name in dict.fromkeys(row["mixer"] for row in _rows("mixers") if row["mixer"] != "softmax"):
        cells = []
        for dtype, pass_ in where:
            for n in tokens:
                its = _rows("mixers", mixer=name, dtype=dtype, tokens=n, **{"pass": pass_})
                timed = [row for row in its if row["seconds"]]
                cells.append(_cell(min(timed, key=lambda row: row["seconds"], default=None)))
        lines.append((name, *cells))
    dim = _rows("mixers")[0]["dim"]
    return f"{table(head, lines)}\n\n{dim} channels, batch 1; {_setting(commands=True)}"


def models() -> str:
    """Whole models, as they come from `convert`: the time with attention over that with the mixer."""
    mixers = [name for name in dict.fromkeys(row["mixer"] for row in _rows("models")) if name != "attention"]
    lines = []
    for host, dtype, batch in dict.fromkeys((row["host"], row["dtype"], row["batch"]) for row in _rows("models")):
        its = {row["mixer"]: row for row in _rows("models", host=host, dtype=dtype, batch=batch)}
        ratios = (its.get(name, {}).get("ratio") for name in mixers)
        shown = ("–" if ratio is None else f"{ratio:.2f} ×" for ratio in ratios)
        lines.append((host, dtype, str(batch), f"{1e3 * its['attention']['seconds']:.2f}", *shown))
    head = ("model", "dtype", "batch", "ms with attention", *mixers)
    return f"{table(head, lines)}\n\n{_setting(commands=False)}"


def others() -> str:
    """Other people's kernels for the same sums: their time over ours."""
    rows = [row for row in _rows("others", BEFORE, batch=1) if row["ratio"]]
    tokens = sorted({row["tokens"] for row in rows})
    lines = []
    for key in dict.fromkeys((row["what"], row["dtype"], row["pass"]) for row in rows):
        its = {row["tokens"]: row["ratio"] for row in rows if (row["what"], row["dtype"], row["pass"]) == key}
        lines.append((*key, *(f"{_short(its[n])} ×" if n in its else "–" for n in tokens)))
    head = ("kernels", "dtype", "pass", *(f"{n:,} tokens" for n in tokens))
    return f"{table(head, lines)}\n\n{_setting(commands=False)}"


def amx() -> str:
    """bfloat16 on a processor with AMX: over bare products, and against float32."""
    content = load("targets-amx.json")
    machine = content["machine"]
    its = f"Intel Xeon with AMX, {machine['threads']} threads, 192 channels, batch 1, torch {machine['torch']}"
    return f"{_bf16(content)}\n\n{its}; `python benchmarks/targets.py OUT.json --only bf16 --threads 2`."


def bf16() -> str:
    """The same on the processor of the other targets."""
    content = load("targets.json")
    return f"{_bf16(content)}\n\n{where(content['machine'])}, 192 channels, batch 1; part of the targets below."


def _bf16(content: dict[str, Any]) -> str:
    cells: dict[tuple[str, str], dict[tuple[str, bool], float]] = {}
    for row in filter(is_bf16, content["rows"]):
        name, pass_, _, tokens = row["what"].removeprefix("float32 / ").split(" / ")[0].split(", ", 3)
        over = row["what"].startswith("float32")
        cells.setdefault((name, tokens.removeprefix("N = ")), {})[pass_, over] = row["value"]
    head = ("mixer", "tokens", "forward, in floors", "training, in 3 floors", "forward, float32 / bf16",
            "training, float32 / bf16")  # fmt: skip
    order = (("forward", False), ("step", False), ("forward", True), ("step", True))
    return table(head, [(*key, *(f"{its[one]:.2f}" for one in order)) for key, its in cells.items()])


def model() -> str:
    """What each op moves and computes, counted in compiled kernels, and what bounds it on each card."""
    content = load("gpu-model.json")
    cards = tuple(content["cards"])
    lines = []
    for key in dict.fromkeys((row["op"], row["dtype"], row["pass"]) for row in content["rows"]):
        its = {row["card"]: row for row in content["rows"] if (row["op"], row["dtype"], row["pass"]) == key}
        row, kernels = its["H100"], its["H100"]["kernels"]
        counts = [kernel["counts"] for kernel in kernels]
        moved = row["bytes_between"] + sum(one["read"] + one["written"] for one in counts)
        products = (row["flops_between"] + sum(sum(one["products"].values()) for one in counts)) / 1e9
        lines.append((
            *key, str(len(counts)), f"{moved / 1e6:.1f}", f"{products:.2f}" if products else "–",
            f"{sum(one['others'] for one in counts) / 1e9:.2f}",
            *(f"{1e6 * its[card]['bound_seconds']:.1f}" for card in cards),
            f"{max(kernel['registers'] for kernel in kernels)}",
            f"{max(kernel['shared'] for kernel in kernels) / 1024:.0f}",
            f"{min(kernel['occupancy'] for kernel in kernels):.0%}",
        ))  # fmt: skip
    head = ("op", "dtype", "pass", "launches", "MB", "GFLOP in products", "GFLOP beside them",
            *(f"bound, {card}, µs" for card in cards), "registers", "KB shared", "warps")  # fmt: skip
    spills = {
        f"`{kernel['kernel']}` ({row['card']}): {kernel['spills']}"
        for row in content["rows"] for kernel in row["kernels"] if kernel["spills"]
    }  # fmt: skip
    spilled = f"Loads and stores of spilled registers: {', '.join(sorted(spills))}" if spills else "Nothing is spilled"
    peaks = "; ".join(
        f"{card} {its['bytes_per_second'] / 1e12:g} TB/s, "
        f"{', '.join(f'{name} {flops / 1e12:g}' for name, flops in its['flops'].items())} TFLOP/s ({its['source']})"
        for card, its in content["cards"].items()
    )
    return (
        f"{table(head, lines)}\n\n4,096 tokens, 192 channels, 3 heads, batch 1; counts, registers, shared memory and "
        f"resident warps as compiled for an H100. {spilled}. Peaks: {peaks}. "
        "`python benchmarks/gpu_model.py OUT.json`"
    )


def ran() -> str:
    """Which operators' kernels ran on a GPU as they are now."""
    before, now = load(FILE)["kernels"], digests()
    states = {
        "as they are": [name for name in now if before.get(name) == now[name]],
        "in an earlier form": [name for name in now if name in before and before[name] != now[name]],
        "never": [name for name in now if name not in before],
    }
    lines = [(state, ", ".join(f"`{name}`" for name in names) or "–") for state, names in states.items()]
    return f"{table(('passed their tests on an NVIDIA H200', 'kernels of the operators'), lines)}"


TABLES: dict[str, Callable[[], str]] = {
    "gpu-mixers": mixers, "gpu-models": models, "gpu-others": others, "gpu-model": model, "gpu-ran": ran, "amx": amx,
    "bf16": bf16,
}  # fmt: skip
