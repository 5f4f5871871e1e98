"""The tables of the pages on language models."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from statistics import fmean
from typing import Any

from tables import RESULTS, table


def presets() -> str:
    from polymix.models.language import PRESETS, parameters, preset

    lines = []
    for name, (family, options, printed) in PRESETS.items():
        config = preset(name)
        millions = f"{parameters(config) / 1e6:.1f} M"
        mixers = ", ".join(f"`{mixer}`" for mixer in options["mixers"])
        lines.append((f"`{name}`", family.model_type, mixers, config.intermediate_size, millions, printed))
    return table(("name", "type", "mixers", "feed-forward", "parameters", "the paper's"), lines)


def study() -> tuple[dict[str, Any], dict[tuple[str, str], list[dict[str, Any]]]]:
    """What was measured, and its rows by kind and model, a seed each."""
    content = json.loads((RESULTS / "language.json").read_text())
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in content["rows"]:
        rows.setdefault((row["kind"], row["model"]), []).append(row)
    return content, rows


def over_seeds(rows: list[dict[str, Any]], key: str) -> str:
    """The mean, and with several the spread between the least and the most."""
    found = [row[key] for row in rows]
    return f"{fmean(found):.3f}" + (f" ({min(found):.3f} … {max(found):.3f})" if len(found) > 1 else "")


def language() -> str:
    content, rows = study()
    lines = []
    for (kind, label), trained in rows.items():
        if kind != "train":
            continue
        timed = rows.get(("time", label), [{}])[0]
        state = timed.get("cache_bytes_100000")
        lines.append((
            label, f"{trained[0]['parameters'] / 1e6:.2f} M", over_seeds(trained, "loss"),
            f"{fmean(row['bits_per_byte'] for row in trained):.3f}",
            *(f"{timed[key]:,.{digits}f}" if key in timed else "–" for key, digits in (
                ("tokens_per_second", 0), ("decode_ms_1000", 2), ("decode_ms_100000", 2), ("training_mib", 0))),
            "–" if state is None else f"{state / 1024:,.0f}",
        ))  # fmt: skip
    lines.sort(key=lambda line: float(line[3]))
    its = content["machine"]
    told = (f"{content['steps']} steps of {content['batch']} × {content['context']} tokens, {content['vocab']:,} kinds;"
            f" where a range is told, seeds: {max(map(len, rows.values()))}; {its['cpu']}, two threads for all times,"
            f" torch {its['torch']}, float32. `python benchmarks/language.py OUT.json`")  # fmt: skip
    headings = ("mixers", "parameters", "held-out loss", "bits a byte", "tokens/s in training",
                "ms a token after 1,000", "after 100,000", "MiB in training", "KiB of cache after 100,000")  # fmt: skip
    return table(headings, lines) + "\n\n" + told


def measured_at(prefix: str, rows: list[dict[str, Any]]) -> list[int]:
    """The numbers of tokens at which a figure stands in a row."""
    return [int(key.removeprefix(prefix)) for key in rows[0] if key.startswith(prefix)]


def decoding() -> str:
    rows = [row for row in study()[0]["rows"] if row["kind"] == "decode"]
    before, lines = measured_at("decode_ms_", rows), []
    for row in rows:
        for what, key, scale in (("ms a token", "decode_ms", 1.0), ("KiB of cache", "cache_bytes", 1 / 1024)):
            cells = [row[f"{key}_{tokens}"] * scale for tokens in before]
            lines.append((row["model"], what, *(f"{cell:,.0f}" if cell >= 100 else f"{cell:.2f}" for cell in cells)))
    return table(("mixers", "", *(f"after {tokens:,}" for tokens in before)), lines)


def lengths() -> str:
    its = {label: found for (kind, label), found in study()[1].items() if kind == "length"}
    contexts = measured_at("loss_", next(iter(its.values())))
    lines = [(label, *(over_seeds(found, f"loss_{n}") for n in contexts)) for label, found in its.items()]
    return table(("mixers", *(f"{n:,} tokens" for n in contexts)), lines)


def recall(task: str) -> str:
    content = json.loads((RESULTS / "recall.json").read_text())
    rows = [row for row in content["rows"] if row["best"] and row["task"] == task]
    lines = []
    for label in dict.fromkeys(row["model"] for row in content["rows"] if row["task"] == task):
        its = [row for row in rows if row["model"] == label]
        kept = [f"{few:,}" if few == many else f"{few:,} … {many:,}"
                for few, many in zip(its[0]["state"][0], its[0]["state"][-1], strict=True)]  # fmt: skip
        found = [row["accuracy"] for row in its]
        cells = ["diverged"] * len(its[0]["sizes"]) if None in found else [
            f"{fmean(those):.0%}" for those in zip(*found, strict=True)]  # fmt: skip
        rates = " ".join(f"{rate:g}" for rate in dict.fromkeys(row["learning_rate"] for row in its))
        lines.append((label, f"{its[0]['parameters']:,}", " + ".join(kept), *cells, rates))
    what = "pairs" if task == "recall" else "tokens"
    headings = ("model", "parameters", "numbers kept, layer by layer", *(f"{n} {what}" for n in rows[0]["sizes"]),
                "at rate")  # fmt: skip
    return table(headings, lines)


def recall_setting() -> str:
    content = json.loads((RESULTS / "recall.json").read_text())
    recipe, host, its = content["recipe"], content["host"], content["machine"]
    seeds = len({row["seed"] for row in content["rows"]})
    return (f"Width {host['hidden_size']}, {host['num_heads']} heads, {host['vocab_size']} kinds of tokens, up to "
            f"{recipe['steps']:,} steps of {recipe['tokens']:,} tokens, the better of the learning rates "
            f"{' and '.join(f'{rate:g}' for rate in recipe['learning_rate'])}, "
            f"seeds: {seeds}; {its['cpu']}, {its['threads']} threads, torch {its['torch']}, float32. "
            f"`python benchmarks/recall.py benchmarks/results/recall.json --plot docs/images/recall.png`")  # fmt: skip


TABLES: dict[str, Callable[[], str]] = {
    "presets": presets,
    "language": language,
    "language-decoding": decoding,
    "language-lengths": lengths,
    "recall": partial(recall, "recall"),
    "recall-copying": partial(recall, "copying"),
    "recall-setting": recall_setting,
}
