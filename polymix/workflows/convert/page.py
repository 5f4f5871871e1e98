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
from polymix.convert.replacement import unit_of
from polymix.convert.trained import is_plan_file
from polymix.extras import URL
from polymix.files import write_whole
from polymix.numbers import DASH, accuracy_interval, arrow, between, figure, fixed, machine_line, metric, spanned
from polymix.pages import render
from polymix.pages.plots import publish
from polymix.results import RESULTS
from polymix.workflows.again import repeated_options
from polymix.workflows.convert.plots import pictures
from polymix.workflows.convert.settings import Settings

# Options of the command that decide what the converted model is.
_DECIDE = (
    "mixer", "weights", "classes", "image_size", "tokens", "context", "init", "windows", "positions", "match",
    "multi_scale", "drop", "keep_host",
)  # fmt: skip
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
        "held_out": (content.get("data") or {}).get("test"), "sources": card, "origins": origins(content),
    }  # fmt: skip
    after = next_commands(content, folder)
    page = render("convert/report.html.j2", **named, pictures=shown, next_commands=after)
    files = [f"{name}.png" for name in shown]
    card_text = render("convert/card.md.j2", **named, url=URL, metadata=metadata(content, card), pictures=files)
    write_whole(folder / "README.md", card_text)
    write_whole(folder / "report.html", page)
    write_whole(folder / RESULTS, json.dumps(content, indent=1, allow_nan=False) + "\n")
    return folder / "report.html"


def rows(content: Mapping[str, Any]) -> list[list[str]]:
    """Rows of the table: the model, then the layers, with error, parameters, FLOPs, time, speedup and memory.

    Equal layers that follow each other share a row, since they were measured once.
    """
    lines = [["the whole model", "", "", DASH, change(content["conversion"]["parameters"]), *_costs(content["model"])]]
    for cells, group in groupby(content["conversion"]["layers"], lambda layer: _cells(layer, content)):
        its = list(group)
        error = between([layer["error"] for layer in its if layer["error"] is not None])
        lines.append([spanned([layer["name"] or "(the model)" for layer in its]), *cells[:2], error, *cells[2:]])
    return lines


def origins(content: Mapping[str, Any]) -> list[tuple[list[str], list[str]]]:
    """Where mixers have their weights from, in phrases: once for all layers of which they are true, by name."""
    alike: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for layer in content["conversion"]["layers"]:
        if layer["now"] is None:
            continue
        phrases = [f"{key} ← {' · '.join(sources) or 'zero'}" for key, sources in layer["inherited"].items()]
        phrases += [f"new: {', '.join(layer['fresh'])}"] if layer["fresh"] else []
        for reason in dict.fromkeys(layer["dropped"].values()):
            keys = [key for key, why in layer["dropped"].items() if why == reason]
            phrases.append(f"dropped: {', '.join(keys)} ({reason})")
        alike.setdefault(tuple(phrases), []).append(layer)
    rows = []
    for shared, layers in alike.items():
        factors = [layer["scale"] for layer in layers if layer["scale"] is not None]
        scaled = [f"output multiplied by {between(factors)}"] if factors else []
        rows.append(([layer["name"] or "(the model)" for layer in layers], [*shared, *scaled]))
    return rows


def _cells(layer: Mapping[str, Any], content: Mapping[str, Any]) -> list[str]:
    """What a row says of a layer besides its name and its error."""
    now = "kept" if layer["now"] is None else layer["now"]
    return [layer["was"], now, change(layer["parameters"]), *_costs(content["layers"].get(layer["name"]))]


def _costs(cost: Mapping[str, Any] | None) -> list[str]:
    if cost is None:
        return [DASH] * 4
    times = change([cost["before"]["ms"], cost["after"]["ms"]])
    gain = DASH if cost["gain"] is None else f"{fixed(cost['gain'], 2)} ×"
    return [change(cost["flops"], 1e6), times, gain, change(cost["memory_bytes"], 2**20)]


def change(pair: Any, unit: float = 1) -> str:
    """A value before and after, or once where it stayed."""
    values = [value if value is None or unit == 1 else value / unit for value in pair]
    return figure(values[0]) if figure(values[0]) == figure(values[1]) else arrow(values)


def accuracy(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The results by stage, in order, then those under other names; accuracies with their 95 % interval."""
    results, kind = content["conversion"]["accuracy"], content["conversion"].get("metric", "accuracy")
    nats = {name: f" ({fixed(math.log(x), 4)} nats per token)" for name, x in results.items() if kind == "perplexity"}
    count = (content.get("data") or {}).get("test") if kind == "accuracy" else None
    cells = {name: metric(x, unit_of(kind)) + nats.get(name, "") for name, x in results.items()}
    cells |= {name: accuracy_interval(x, count) for name, x in results.items() if count}
    names = [name for name in (*_STAGES, *(set(results) - set(_STAGES))) if name in results]
    stage = content["conversion"].get("kept")
    mark = stage if stage != next((name for name in reversed(_STAGES) if name in results), None) else None
    return [(f"{name} (this model)" if name == mark else name, cells[name]) for name in names]


def next_commands(content: Mapping[str, Any], folder: Path) -> list[tuple[str, str]]:
    """What to run next, and why."""
    commands = []
    settings, generator = content.get("settings") or {}, content.get("generator", False)
    results, worse = content["conversion"]["accuracy"], content.get("worse", False)
    if settings and worse and "distilled" in results:
        from polymix.train.distill import LEARNING_RATE

        helped = content["conversion"].get("kept") == "distilled"
        rate = (settings.get("learning_rate") or LEARNING_RATE) / (1 if helped else 4)
        changes = f"--distill-epochs {max(10, 2 * settings['distill_epochs'])} --learning-rate {rate:g}"
        command = f"{_convert(settings)} --data {shlex.quote(str(settings['data']))} {changes}"
        why = (
            f"The model is worse than the original. Train for longer{'' if helped else ', at a lower rate'}, with the "
        )
        commands.append((f"{why}other options as before:", f"{command} --out {shlex.quote(folder.name)}-longer"))
    if settings and not any(stage in content["conversion"]["accuracy"] for stage in _STAGES[2:]):
        command = _convert(settings)
        command += "" if content.get("trained", True) else " --weights FILE"
        data, what = ("noise", "Train them") if generator else ("FOLDER", "Recover the accuracy on your own data")
        command += f" --data {data} --distill-epochs 10 --out {shlex.quote(folder.name)}-distilled"
        state = "trained layer by layer" if is_plan_file(settings["plan"]) else "untrained"
        commands.append((f"The mixers are {state}. {what}:", command))
    task, what = (
        ("generation", "images") if generator else ("text", "text") if content.get("language") else ("", "images")
    )
    option = f" --task {task}" if task else ""
    commands.append((f"Compare the mixers on your own {what}:", f"polymix compare{option} --data FOLDER"))
    return commands


def _convert(settings: Mapping[str, Any]) -> str:
    """The command of a conversion, with the options that decide its model, and its training aside."""
    model = f"polymix convert --model {shlex.quote(str(settings['model']))} --plan {shlex.quote(settings['plan'])}"
    return model + repeated_options(Settings, settings, *_DECIDE)


def mixers(content: Mapping[str, Any]) -> dict[str, int]:
    """The number of layers with each mixer, and with "attention" where it was kept."""
    names = [layer["now"] or "attention" for layer in content["conversion"]["layers"]]
    return {name: names.count(name) for name in dict.fromkeys(names)}


def metadata(content: Mapping[str, Any], card: Mapping[str, Any]) -> list[str]:
    """Lines of YAML for the head of the card. Values are written as JSON, which YAML includes."""
    names = [name for name in mixers(content) if name != "attention"]
    own: dict[str, Any] = {"library_name": "polymix", "tags": ["polymix", "linear-attention", *names]}
    return [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in {**own, **card}.items()]
