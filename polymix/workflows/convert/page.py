"""The files of a conversion: report.html, results.json, and README.md, the model card."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import polymix
from polymix._io import RESULTS, write_whole
from polymix.numbers import NONE, accuracy_interval, arrow, between, figure, fixed, machine_line, metric, spanned
from polymix.pages import render
from polymix.pages.plots import publish
from polymix.workflows.convert.plots import pictures

_STAGES = ("before", "converted", "imitated", "distilled", "trained")


def write(content: Mapping[str, Any], folder: Path, title: str, card: Mapping[str, Any]) -> Path:
    """Write the three files and the pictures into `folder`, results.json last; return the page's path.

    content: what results.json holds. card: metadata for the head of the model card; it replaces ours of the same name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shown = publish(pictures(content), folder)
    named = {
        "title": title, "content": content, "rows": rows(content), "machine": machine_line(content["machine"]),
        "accuracy": accuracy(content), "mixers": mixers(content), "version": polymix.__version__,
        "notes": content.get("notes", []), "code": content.get("code"), "language": content.get("language", False),
        "metric": content["conversion"].get("metric", "accuracy"), "usage": content.get("usage"),
        "held_out": (content.get("data") or {}).get("test"), "sources": card,
    }  # fmt: skip
    after = next_commands(content, folder)
    page = render("convert/report.html.j2", **named, pictures=shown, next_commands=after)
    files = [f"{name}.png" for name in shown]
    card_text = render("convert/card.md.j2", **named, metadata=metadata(content, card), pictures=files)
    write_whole(folder / "README.md", card_text)
    write_whole(folder / "report.html", page)
    write_whole(folder / RESULTS, json.dumps(content, indent=1, allow_nan=False) + "\n")
    return folder / "report.html"


def rows(content: Mapping[str, Any]) -> list[list[str]]:
    """Rows of the table: the model, then the layers, with error, parameters, FLOPs, time, speedup and memory.

    Equal layers that follow each other share a row, since they were measured once.
    """
    found = [["the whole model", "", "", NONE, change(content["conversion"]["parameters"]), *_costs(content["model"])]]
    for cells, group in groupby(content["conversion"]["layers"], lambda layer: _cells(layer, content)):
        its = list(group)
        error = between([layer["error"] for layer in its if layer["error"] is not None])
        found.append([spanned([layer["name"] or "(the model)" for layer in its]), *cells[:2], error, *cells[2:]])
    return found


def _cells(layer: Mapping[str, Any], content: Mapping[str, Any]) -> list[str]:
    """What a row says of a layer besides its name and its error."""
    now = "kept" if layer["now"] is None else layer["now"]
    return [layer["was"], now, change(layer["parameters"]), *_costs(content["layers"].get(layer["name"]))]


def _costs(cost: Mapping[str, Any] | None) -> list[str]:
    if cost is None:
        return [NONE] * 4
    times = change([cost["before"]["ms"], cost["after"]["ms"]])
    gain = NONE if cost["gain"] is None else f"{fixed(cost['gain'], 2)} ×"
    return [change(cost["flops"], 1e6), times, gain, change(cost["memory_bytes"], 2**20)]


def change(pair: Any, unit: float = 1) -> str:
    """A value before and after, or once where it stayed."""
    values = [value if value is None or unit == 1 else value / unit for value in pair]
    return figure(values[0]) if figure(values[0]) == figure(values[1]) else arrow(values)


def accuracy(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The results by stage, in order, then those under other names; accuracies with their 95 % interval."""
    given, kind = content["conversion"]["accuracy"], content["conversion"].get("metric", "accuracy")
    nats = {name: f" ({fixed(math.log(x), 4)} nats per token)" for name, x in given.items() if kind == "perplexity"}
    count = (content.get("data") or {}).get("test") if kind == "accuracy" else None
    told = {name: metric(x, kind) + nats.get(name, "") for name, x in given.items()}
    told |= {name: accuracy_interval(x, count) for name, x in given.items() if count}
    return [(name, told[name]) for name in (*_STAGES, *(set(given) - set(_STAGES))) if name in given]


def next_commands(content: Mapping[str, Any], folder: Path) -> list[tuple[str, str]]:
    """What to run next, and why."""
    commands = []
    settings, generator = content.get("settings") or {}, content.get("generator", False)
    if settings and not any(stage in content["conversion"]["accuracy"] for stage in _STAGES[2:]):
        command = (
            f"polymix convert --model {shlex.quote(str(settings['model']))} --plan {shlex.quote(settings['plan'])}"
        )
        command += "" if content.get("trained", True) else " --weights FILE"
        data, what = ("noise", "Train them") if generator else ("FOLDER", "Recover the accuracy on your own data")
        command += f" --data {data} --distill-epochs 10 --out {shlex.quote(folder.name)}-distilled"
        commands.append((f"The mixers are untrained. {what}:", command))
    compare = "polymix compare --task images --data FOLDER" if generator else "polymix compare --data FOLDER"
    commands.append(("Compare the mixers on your own images:", compare))
    return commands


def mixers(content: Mapping[str, Any]) -> dict[str, int]:
    """The number of layers with each mixer, and with "attention" where it was kept."""
    names = [layer["now"] or "attention" for layer in content["conversion"]["layers"]]
    return {name: names.count(name) for name in dict.fromkeys(names)}


def metadata(content: Mapping[str, Any], card: Mapping[str, Any]) -> list[str]:
    """Lines of YAML for the head of the card. Values are written as JSON, which YAML includes."""
    names = [name for name in mixers(content) if name != "attention"]
    own: dict[str, Any] = {"library_name": "polymix", "tags": ["polymix", "linear-attention", *names]}
    return [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in {**own, **card}.items()]
