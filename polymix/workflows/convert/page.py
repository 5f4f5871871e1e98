"""The files of a conversion: report.html, results.json, and README.md, the model card."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polymix
from polymix._io import RESULTS, write_whole
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
        "metric": content["conversion"].get("metric", "accuracy"),
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
    error = "–" if layer["error"] is None else f"{layer['error']:.3g}"
    return [*start, error, change(layer["parameters"], 1, ",.0f"), *(
        ("–",) * 4 if cost is None else (
            change(cost["flops"], 1e6), change([cost["before"]["ms"], cost["after"]["ms"]]),
            "–" if cost["gain"] is None else f"{cost['gain']:.2f} ×", change(cost["memory_bytes"], 2**20),
        )
    )]  # fmt: skip


def change(pair: Any, unit: float = 1, form: str = ",.3g") -> str:
    before, after = ("–" if value is None else format(value / unit, form) for value in pair)
    return before if before == after else f"{before} → {after}"


def machine(content: Mapping[str, Any]) -> str:
    its = content["machine"]
    return f"{its['gpu'] or its['cpu']}, {its['threads']} threads, torch {its['torch']}, {its['system']}"


def accuracy(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The results by stage, in order, then those under other names."""
    given, nats = content["conversion"]["accuracy"], content["conversion"].get("metric") == "perplexity"
    told = {name: f"{x:.4g}" + (f" ({math.log(x):.4f} nats per token)" if nats else "") for name, x in given.items()}
    return [(name, told[name]) for name in (*_STAGES, *(set(given) - set(_STAGES))) if name in given]


def mixers(content: Mapping[str, Any]) -> dict[str, int]:
    """The number of layers with each mixer, and with "attention" where it was kept."""
    names = [layer["now"] or "attention" for layer in content["conversion"]["layers"]]
    return {name: names.count(name) for name in dict.fromkeys(names)}


def metadata(content: Mapping[str, Any], card: Mapping[str, Any]) -> list[str]:
    """Lines of YAML for the head of the card. Values are written as JSON, which YAML includes."""
    names = [name for name in mixers(content) if name != "attention"]
    own: dict[str, Any] = {"library_name": "polymix", "tags": ["polymix", "linear-attention", *names]}
    return [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in {**own, **card}.items()]
