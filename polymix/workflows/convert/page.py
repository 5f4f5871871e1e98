"""The files of a conversion: report.html, results.json, and README.md, the model card."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polymix
from polymix._io import RESULTS, write_whole
from polymix.numbers import NONE, accuracy_interval, figure, fixed, percent, plural
from polymix.pages import embedded, render
from polymix.workflows.convert.plots import draw

_STAGES = ("before", "converted", "imitated", "distilled", "trained")


def write(content: Mapping[str, Any], folder: Path, title: str, card: Mapping[str, Any]) -> Path:
    """Write the three files and the pictures into `folder`, results.json last; return the page's path.

    content: what results.json holds. card: metadata for the head of the model card; it replaces ours of the same name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pictures = embedded(draw(content, folder))
    named = {
        "title": title, "content": content, "rows": rows(content), "machine": machine(content),
        "accuracy": accuracy(content), "mixers": mixers(content), "version": polymix.__version__,
        "notes": content.get("notes", []), "code": content.get("code"), "language": content.get("language", False),
        "metric": content["conversion"].get("metric", "accuracy"), "usage": content.get("usage"),
        "held_out": (content.get("data") or {}).get("test"), "sources": card, "figure": figure,
    }  # fmt: skip
    page = render("convert/report.html.j2", **named, pictures=pictures)
    card_text = render("convert/card.md.j2", **named, metadata=metadata(content, card), pictures=list(pictures))
    write_whole(folder / "README.md", card_text)
    write_whole(folder / "report.html", page)
    write_whole(folder / RESULTS, json.dumps(content, indent=1, allow_nan=False) + "\n")
    return folder / "report.html"


def rows(content: Mapping[str, Any]) -> list[list[str]]:
    """Rows of the table: the model, then each layer, with error, parameters, FLOPs, time, speedup and memory."""
    whole = {
        "name": "the whole model",
        "was": "",
        "now": "",
        "error": None,
        "parameters": content["conversion"]["parameters"],
    }
    found = [_row(whole, content["model"])]
    for layer in content["conversion"]["layers"]:
        found.append(_row(layer, content["layers"].get(layer["name"])))
    return found


def _row(layer: Mapping[str, Any], cost: Mapping[str, Any] | None) -> list[str]:
    kept = layer["now"] is None
    start = [layer["name"] or "(the model)", layer["was"], "kept" if kept else layer["now"]]
    error = figure(layer["error"])
    return [*start, error, change(layer["parameters"]), *(
        (NONE,) * 4 if cost is None else (
            change(cost["flops"], 1e6), change([cost["before"]["ms"], cost["after"]["ms"]]),
            NONE if cost["gain"] is None else f"{fixed(cost['gain'], 2)} ×", change(cost["memory_bytes"], 2**20),
        )
    )]  # fmt: skip


def change(pair: Any, unit: float = 1) -> str:
    before, after = (figure(None if value is None else value / unit) for value in pair)
    return before if before == after else f"{before} → {after}"


def machine(content: Mapping[str, Any]) -> str:
    its = content["machine"]
    return f"{its['gpu'] or its['cpu']}, {plural(its['threads'], 'thread')}, torch {its['torch']}, {its['system']}"


def accuracy(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The results by stage, in order, then those under other names; accuracies with their 95 % interval."""
    given, metric = content["conversion"]["accuracy"], content["conversion"].get("metric", "accuracy")
    count = (content.get("data") or {}).get("test")

    def told(value: float) -> str:
        if metric == "perplexity":
            return f"{figure(value)} ({fixed(math.log(value), 4)} nats per token)"
        if metric != "accuracy":
            return figure(value)
        return accuracy_interval(value, count) if count else percent(value)

    return [(name, told(given[name])) for name in (*_STAGES, *(set(given) - set(_STAGES))) if name in given]


def mixers(content: Mapping[str, Any]) -> dict[str, int]:
    """The number of layers with each mixer, and with "attention" where it was kept."""
    names = [layer["now"] or "attention" for layer in content["conversion"]["layers"]]
    return {name: names.count(name) for name in dict.fromkeys(names)}


def metadata(content: Mapping[str, Any], card: Mapping[str, Any]) -> list[str]:
    """Lines of YAML for the head of the card. Values are written as JSON, which YAML includes."""
    names = [name for name in mixers(content) if name != "attention"]
    own: dict[str, Any] = {"library_name": "polymix", "tags": ["polymix", "linear-attention", *names]}
    return [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in {**own, **card}.items()]
