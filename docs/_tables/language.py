"""The tables of language models: presets, losses, lengths, speed and recall, from benchmarks/results."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import fmean
from typing import Any

from .figures import load, over_seeds, table, where


def presets() -> str:
    from polymix.models.language import PRESETS, parameters, preset

    lines = []
    for name, (family, options, published) in PRESETS.items():
        config = preset(name)
        millions = f"{parameters(config) / 1e6:.1f} M"
        mixers = ", ".join(f"`{mixer}`" for mixer in options["mixers"])
        paper = published.split(" (")[0]
        lines.append((f"`{name}`", family.model_type, mixers, config.intermediate_size, millions, paper))
    return table(("name", "type", "mixers", "feed-forward", "parameters", "in the paper"), lines)


def language_rows() -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The rows of language.json by kind and model, one for each seed."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in load("language.json")["rows"]:
        rows.setdefault((row["kind"], row["model"]), []).append(row)
    return rows


def language() -> str:
    content, rows, lines = load("language.json"), language_rows(), []
    for (kind, model), trained in rows.items():
        if kind != "train":
            continue
        timed = rows.get(("time", model), [{}])[0]
        cache_bytes = timed.get("cache_bytes_100000")
        lines.append((
            model, f"{trained[0]['parameters'] / 1e6:.2f} M", over_seeds([row["loss"] for row in trained]),
            f"{fmean(row['bits_per_byte'] for row in trained):.3f}",
            *(f"{timed[key]:,.{digits}f}" if key in timed else "–" for key, digits in (
                ("tokens_per_second", 0), ("decode_ms_1000", 2), ("decode_ms_100000", 2), ("training_mib", 0))),
            "–" if cache_bytes is None else f"{cache_bytes / 1024:,.0f}",
        ))  # fmt: skip
    lines.sort(key=lambda line: float(line[3]))
    setting = (
        f"{content['steps']} steps of {content['batch']} × {content['context']} tokens, vocabulary of "
        f"{content['vocab']:,}; ±: half of the range over at most {max(map(len, rows.values()))} seeds; "
        f"{where(content['machine'])}, float32. `python benchmarks/language.py OUT.json`"
    )
    head = ("mixers", "parameters", "held-out loss", "bits per byte", "training, tokens/s",
            "ms per token after 1,000", "after 100,000", "training, MiB", "cache after 100,000, KiB")  # fmt: skip
    return f"{table(head, lines)}\n\n{setting}"


def counts(prefix: str, row: dict[str, Any]) -> list[int]:
    """The numbers of tokens at which a row has a figure."""
    return [int(key.removeprefix(prefix)) for key in row if key.startswith(prefix)]


def decoding() -> str:
    rows = [row for (kind, _), rows in language_rows().items() for row in rows if kind == "decode"]
    before, lines = counts("decode_ms_", rows[0]), []
    for row in rows:
        for label, key, scale in (("ms per token", "decode_ms", 1.0), ("KiB of cache", "cache_bytes", 1 / 1024)):
            cells = [row[f"{key}_{tokens}"] * scale for tokens in before]
            lines.append((row["model"], label, *(f"{cell:,.0f}" if cell >= 100 else f"{cell:.2f}" for cell in cells)))
    return table(("mixers", "", *(f"after {tokens:,}" for tokens in before)), lines)


def lengths() -> str:
    models = {model: rows for (kind, model), rows in language_rows().items() if kind == "length"}
    contexts = counts("loss_", next(iter(models.values()))[0])
    lines = [
        (model, *(over_seeds([row[f"loss_{n}"] for row in rows]) for n in contexts)) for model, rows in models.items()
    ]
    return table(("mixers", *(f"{n:,} tokens" for n in contexts)), lines)


def contexts() -> str:
    """`pom` of several degrees, each trained at every context on as many tokens, and measured there."""
    rows = language_rows()
    trained, lines = load("language.json")["context"], []
    for model in (model for kind, model in rows if kind == "contexts"):
        losses = {trained: over_seeds([row["loss"] for row in rows["train", model]])}
        others = rows["contexts", model]
        losses |= {n: over_seeds([row[f"loss_{n}"] for row in others]) for n in counts("loss_", others[0])}
        lines.append((model, *(losses[n] for n in sorted(losses))))
    return table(("mixers", *(f"{n:,} tokens" for n in sorted(losses))), lines)


def language_speed() -> str:
    """Prefill, decoding and training of the papers' models; – for cells that were left out or not measured."""
    content = load("language.json")["speed"]
    figures = {(row["kind"], row["model"], row["dtype"], row["batch"], row["context"]): row for row in content["rows"]}
    lines = []
    for model, dtype, batch in dict.fromkeys(key[1:4] for key in figures if key[0] == "decode"):
        cases = [figures.get(("decode", model, dtype, batch, n), {}) for n in (1024, 4096, 16384, 32768)]
        keys = (("prefill_tokens_per_second", 0), ("decode_ms", 1), ("over_read", 2))
        cells = [" / ".join(f"{row[key]:,.{digits}f}" if key in row else "–" for row in cases) for key, digits in keys]
        lines.append((f"`{model}`", dtype, batch, *cells))
    head = ("model", "dtype", "batch", "prefill, tokens/s, at 1k / 4k / 16k / 32k", "ms per step", "over reading")
    trained = [row for row in content["rows"] if "training_tokens_per_second" in row]
    rows = [(f"`{row['model']}`", row["context"], f"{row['training_tokens_per_second']:,.0f}") for row in trained]
    setting = f"{where(content['machine'])}. `python benchmarks/language.py OUT.json --only speed`"
    training = table(("model", "tokens", "training, tokens/s"), rows)
    return "\n\n".join(part for part in (table(head, lines), training if rows else "", setting) if part)


def recall(task: str) -> str:
    models: dict[str, list[dict[str, Any]]] = {}
    for row in load("recall.json")["rows"]:
        if row["task"] == task:
            models.setdefault(row["model"], []).extend([row] if row["best"] else [])
    lines = []
    for model, rows in models.items():
        first = rows[0]
        state = [f"{few:,}" if few == many else f"{few:,} … {many:,}"
                for few, many in zip(first["state"][0], first["state"][-1], strict=True)]  # fmt: skip
        accuracies = [row["accuracy"] for row in rows]
        cells = ["diverged"] * len(first["sizes"]) if None in accuracies else [
            over_seeds(column, "{:.0%}".format) for column in zip(*accuracies, strict=True)]  # fmt: skip
        rates = " ".join(f"{rate:g}" for rate in dict.fromkeys(row["learning_rate"] for row in rows))
        lines.append((model, f"{first['parameters']:,}", " + ".join(state), *cells, rates))
    unit = "pairs" if task == "recall" else "tokens"
    sizes = next(rows[0]["sizes"] for rows in models.values())
    head = ("model", "parameters", "numbers kept, by layer", *(f"{n} {unit}" for n in sizes), "learning rate")
    return table(head, lines)


def recall_setting() -> str:
    content = load("recall.json")
    recipe, host = content["recipe"], content["host"]
    rates = (f"{rate:g}" for rate in recipe["learning_rate"])
    return (
        f"Width {host['hidden_size']}, {host['num_heads']} heads, vocabulary of {host['vocab_size']}, up to "
        f"{recipe['steps']:,} steps of {recipe['tokens']:,} tokens, the better of the learning rates "
        f"{' and '.join(rates)} over all seeds; ±: half the range over the seeds, without it: one seed. "
        f"{where(content['machine'])}, float32. "
        "`python benchmarks/recall.py benchmarks/results/recall.json --plot docs/images/recall.png`"
    )


TABLES: dict[str, Callable[[], str]] = {
    "presets": presets,
    "language": language,
    "language-decoding": decoding,
    "language-lengths": lengths,
    "language-contexts": contexts,
    "language-speed": language_speed,
    "recall": partial(recall, "recall"),
    "recall-copying": partial(recall, "copying"),
    "recall-setting": recall_setting,
}
