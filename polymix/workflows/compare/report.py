"""report.html of a comparison, and its pictures: accuracy, latency and memory."""

from __future__ import annotations

import math
import shlex
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from polymix.files import write_whole
from polymix.mixers.registry import ATTENTION, FLOOR
from polymix.numbers import fixed, metric, plural
from polymix.pages import embedded, markdown, plots, render, table_line
from polymix.pages.plots import (
    LIGHT,
    PHONE_WIDTH,
    Picture,
    legend_below,
    legend_columns,
    plain_log,
    publish,
    token_axis,
)
from polymix.train.data.idx import FASHION
from polymix.workflows.again import repeated_options
from polymix.workflows.compare.settings import CLASSIFY, Settings
from polymix.workflows.compare.tables import headings, reference_tokens, rows
from polymix.workflows.compare.verdict import (
    headline,
    labels,
    latencies,
    noise,
    scores,
    slope,
    spelled,
    timed,
)

_MIN_POINTS = 4  # lengths that a slope is fitted to, at the least


def write_report(content: dict[str, Any], folder: Path) -> Path:
    """Draw the pictures of a finished comparison and write report.html and report.md into `folder`."""
    kinds = {ATTENTION: "attention", FLOOR: "floor"}
    drawn = list(content["pictures"].values())
    plots_of_it = pictures(content)
    html = render(
        "workflows/compare/report.html.j2",
        **{key: content[key] for key in ("answer", "control", "data", "host", "settings", "machine", "refused")},
        title=title(content),
        headings=headings(content),
        rows=[{"kind": kinds.get(cells[0], ""), "cells": cells} for cells in rows(content)],
        pictures=publish(plots_of_it, folder),
        stopped=[row for row in content["sweep"] if row["stopped"]],
        samples=samples(content),
        confusions=[it for label in judged(content) if (it := confusion(content, label))],
        predictions=dict(zip(content["pictures"], embedded([folder / name for name in drawn]).values(), strict=True)),
        next_commands=next_commands(content, folder),
        plan=plan_sentence(content),
    )
    path = folder / "report.html"
    write_whole(path, html)
    write_whole(folder / "report.md", _markdown(content, [*(f"{it.name}.png" for it in plots_of_it), *drawn]))
    return path


def title(content: dict[str, Any]) -> str:
    """The headline, or what was compared."""
    return content["answer"]["headline"] if content["answer"] else f"Mixers on {content['settings']['task']}"


def plan_sentence(content: dict[str, Any]) -> str:
    """Which blocks have the mixer, where a plan leaves others their attention."""
    plan = content["host"]["recipe"].get("plan")
    return f"Plan {plan}: not every block has the mixer; the others keep attention." if plan else ""


def _markdown(content: dict[str, Any], drawn: list[str]) -> str:
    """The report without its page: sentences, the table, and the names of the pictures."""
    head = headings(content)
    lines = [f"# {markdown(title(content))}", ""]
    lines += [f"- {markdown(sentence)}" for sentence in content["answer"]["sentences"]] if content["answer"] else []
    lines += ["", table_line(head), "|---" * len(head) + "|", *map(table_line, rows(content)), ""]
    for sentence in filter(None, (content["control"], plan_sentence(content))):
        lines += [markdown(sentence), ""]
    lines += [markdown(f"Left out: {row['mixer']}. {row['reason']}") for row in content["refused"]]
    return "\n".join([*lines, *(f"![{name}]({name})" for name in drawn)]) + "\n"


def judged(content: dict[str, Any]) -> list[str]:
    """Attention, and the mixer of the verdict or else the most accurate one."""
    if not content["rows"]:
        return []
    sign = 1 if headline(content).more else -1
    score = {label: sign * its.mean for label, its in scores(content).items() if label not in (ATTENTION, FLOOR)}
    named = (content["answer"] or {}).get("verdict", {}).get("mixer")
    best = named if named in score else max(score, key=score.__getitem__, default=None)
    return [label for label in (ATTENTION, best) if label in scores(content)]


def samples(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Some test images with their class, and what each mixer took them for in its first run, where that was wrong."""
    if content["data"] is None:
        return []
    classes, images = content["data"]["classes"], content["data"]["samples"]
    first = [row for row in content["answers"] if row["seed"] == 0 and row["samples"]]
    return [
        {
            "image": sample["image"],
            "truth": classes[sample["class"]],
            "runs": len(first),
            "wrong": [
                f"{row['mixer']}: {classes[row['samples'][place]]}"
                for row in first
                if row["samples"][place] != sample["class"]
            ],
        }
        for place, sample in enumerate(images)
    ]


def confusion(content: dict[str, Any], label: str) -> dict[str, Any] | None:
    """How many test images of each class (rows) the mixer took for each class, over all seeds, and the worst pairs."""
    matrices = [row["confusion"] for row in content["answers"] if row["mixer"] == label and row["confusion"]]
    if not matrices:
        return None
    classes = content["data"]["classes"]
    counts = [[sum(run[i][j] for run in matrices) for j in range(len(classes))] for i in range(len(classes))]
    most = max(max(row) for row in counts) or 1
    wrong = sorted(
        ((counts[i][j], i, j) for i in range(len(classes)) for j in range(len(classes)) if i != j), reverse=True
    )
    return {
        "mixer": label,
        "classes": classes,
        "cells": [[{"count": n, "share": round(40 * n / most)} for n in row] for row in counts],
        "worst": [f"{classes[i]} was taken for {classes[j]} ({plural(n, 'time')})" for n, i, j in wrong[:3] if n],
    }


def next_commands(content: dict[str, Any], folder: Path) -> list[tuple[str, str]]:
    """What to run next, and why."""
    settings, verdict = content["settings"], (content["answer"] or {}).get("verdict", {})
    classify = settings["task"] == CLASSIFY
    mixer = verdict.get("mixer")
    commands = []
    if settings["quick"]:
        out = shlex.quote(f"{folder.name}-full")
        commands.append(("Measure properly, with more seeds, epochs and lengths:", f"{_command(settings)} --out {out}"))
    elif verdict.get("action") == "open":
        out = shlex.quote(f"{folder.name}-again")
        again = _command(settings, "seeds", "epochs", "tokens", "max_seconds", "max_gib")
        commands.append(("Measure again on an idle machine:", f"{again} --out {out}"))
    if classify and settings["data"] in (None, "digits", FASHION):
        commands.append(("Compare on your own images, one folder per class:", "polymix compare --data FOLDER"))
    if content["answer"] is None:
        out = shlex.quote(f"{folder.name}-times")
        again = f"{_command(settings, 'seeds', 'epochs')} --tokens 64,256,1024,4096 --out {out}"
        commands.append(("Time the mixers over numbers of tokens too, and get a verdict:", again))
    if verdict.get("action") == "replace" and mixer:
        pattern = content["host"]["recipe"].get("plan")
        plan = f"{shlex.quote(pattern)} --mixer {shlex.quote(mixer)}" if pattern else shlex.quote(mixer)
        data = f" --data {shlex.quote(settings['data'])}" if classify and settings["data"] else ""
        commands.append(
            (f"Put {mixer} into a model that you have:", f"polymix convert --model timm/NAME --plan {plan}{data}")
        )
    commands.append(("Ask for the shapes of your own model:", "polymix recommend --shape 4096x192:heads=3"))
    return commands


def _command(settings: dict[str, Any], *others: str) -> str:
    """`polymix compare` with the options that say what is compared, and others by name."""
    names = ("task", "data", "layout", "preset", "mixers", "image_size", "patch_size", "device", "dtype", *others)
    asked = repeated_options(Settings, settings, *names)
    return f"polymix compare{asked}" + "".join(f" --set {shlex.quote(option)}" for option in settings["options"])


def looks(content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Colour and marker by mixer: attention is black, the floor grey, the others are always in the same order."""
    table = plots.looks(label for label in labels(content) if label not in (ATTENTION, FLOOR))
    table[ATTENTION] = {"color": LIGHT["attention"], "marker": "o", "linewidth": 2.4}
    table[FLOOR] = {"color": LIGHT["floor"], "marker": ".", "linestyle": "--"}
    return table


def pareto(points: dict[str, tuple[float, float]]) -> list[str]:
    """Names on the Pareto front of (latency, accuracy), fastest first: no other is both faster and as accurate."""
    front: list[str] = []
    best = -math.inf
    for name, (_, accuracy) in sorted(points.items(), key=lambda item: (item[1][0], -item[1][1])):
        if accuracy > best:
            front.append(name)
            best = accuracy
    return front


def accuracy_against_latency(content: dict[str, Any], narrow: bool = False) -> Figure:
    """A point for each mixer, with the range over seeds if there are more than one, and the Pareto front."""
    figure = Figure(figsize=(PHONE_WIDTH, 4.6) if narrow else (7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    scope, look, score = timed(content), looks(content), scores(content)
    (name, more, unit), n, table = headline(content), reference_tokens(content, scope), latencies(content, scope)
    scale, several = 100 if unit == "%" else 1, content["settings"]["seeds"] > 1
    points = {m: (table[m][n], scale * s.mean) for m, s in score.items() if m in table and n in table[m]}
    front = pareto({m: (x, y if more else -y) for m, (x, y) in points.items()})
    if len(front) > 1:
        steps: dict[str, Any] = {"drawstyle": "steps-post", "color": LIGHT["front"], "zorder": 1}
        axes.plot([points[m][0] for m in front], [points[m][1] for m in front], label="Pareto front", **steps)
    for mixer, (x, y) in points.items():
        spread = [[y - scale * score[mixer].low], [scale * score[mixer].high - y]] if several else None
        its = {key: value for key, value in look[mixer].items() if key in ("color", "marker")}
        axes.errorbar(x, y, yerr=spread, capsize=3, linestyle="none", markersize=7, label=mixer, **its)
    axes.set_xscale("log")
    plain_log(axes.xaxis)
    what = "the whole model" if scope == "host" else "the mixer alone"
    axes.set_xlabel(f"latency at {n:,} tokens, ms" if narrow else f"latency of {what} at {n:,} tokens, ms")
    share = 100 * content["data"]["majority"]["share"] if content["data"] is not None else -math.inf
    if points and share > axes.get_ylim()[0]:
        axes.axhline(share, color=LIGHT["muted"], linewidth=1, linestyle=":", label="largest class")
    low = axes.get_ylim()[0]
    starts = f"\naxis from {low:.0f} %, not 0" if unit and low > 1 else ""
    test = "test " if unit else ""
    bar = " (bar: range over seeds)" if several and not narrow else ""
    axes.set_ylabel(f"{test}{spelled(name)}{', ' * bool(unit)}{unit}{bar}{starts}")
    if narrow:
        legend_below(figure, axes)
    else:
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def slopes(content: dict[str, Any], scope: str, what: str) -> dict[str, float]:
    """The slope of each mixer that was measured at enough lengths to fit one; none in a quick look."""
    fits = {}
    for mixer in labels(content):
        points = _points(content, mixer, scope, what)
        fit = slope(points)
        if fit is not None and len(points) >= _MIN_POINTS and not content["settings"]["quick"]:
            fits[mixer] = fit
    return fits


def _points(content: dict[str, Any], mixer: str, scope: str, what: str) -> dict[int, float]:
    rows = (row for row in content["sweep"] if row["scope"] == scope and row["mixer"] == mixer and row[what])
    return {row["tokens"]: row[what] for row in rows}


def over_tokens(content: dict[str, Any], axes: Axes, scope: str, what: str, narrow: bool = False) -> None:
    """Latency in ms, or peak_bytes in MiB, against tokens, log-log. The legend has each fitted slope."""
    look, scale, fits = looks(content), 1.0 if what == "latency" else 2.0**-20, slopes(content, scope, what)
    for mixer in labels(content):
        points = _points(content, mixer, scope, what)
        if not points:
            continue
        counts = sorted(points)
        label = f"{mixer}  N^{fixed(fits[mixer], 2)}" if mixer in fits else mixer
        axes.plot(counts, [scale * points[n] for n in counts], markersize=5, label=label, **look[mixer])
    token_axis(axes, [row["tokens"] for row in content["sweep"] if row["scope"] == scope], narrow=narrow)
    axes.set_yscale("log")
    plain_log(axes.yaxis)
    axes.set_ylabel("latency, ms" if what == "latency" else "peak memory of one call, MiB")
    what = f"mixer alone, {content['settings']['dim']} channels" if scope == "alone" else "whole model"
    axes.set_title(f"{what}, batch 1", fontsize=10)
    if narrow:
        axes.legend(
            fontsize=8,
            loc="upper center",
            bbox_to_anchor=(0.5, -0.28),
            ncols=legend_columns(labels(content)),
            columnspacing=1,
        )
    else:
        axes.legend(fontsize=7.5)


def both_scopes(content: dict[str, Any], what: str, narrow: bool) -> Figure:
    """The mixers alone and the whole model, side by side, or one above the other on a phone."""
    scopes = [scope for scope in ("alone", "host") if any(row["scope"] == scope for row in content["sweep"])]
    size = (PHONE_WIDTH, 4.7 * len(scopes)) if narrow else (5.5 * len(scopes), 4.6)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(*((len(scopes), 1) if narrow else (1, len(scopes))), squeeze=False)
    for axes, scope in zip(grid.flat, scopes, strict=True):
        over_tokens(content, axes, scope, what, narrow)
    return figure


def pictures(content: dict[str, Any]) -> list[Picture]:
    """accuracy, latency and memory, where mixers were timed."""
    if not content["sweep"]:
        return []
    fitted = "N^x is the slope fitted to the upper half of the lengths (at least three): 1 is linear, 2 quadratic."
    if not (slopes(content, "alone", "latency") or slopes(content, "host", "latency")):
        fitted = f"Too few lengths to fit slopes: that needs {_MIN_POINTS} or more, and no --quick."
    (name, _, unit), chance = headline(content), noise(content)
    points = f"{fixed(chance, 1, 100)} points" if unit == "%" else metric(chance, unit)
    first, margin = f"{spelled(name).capitalize()} against latency", f"Differences below {points} can be chance."
    held = "The most memory that one call holds at once beyond the model and its input, including its output."
    return [
        Picture("accuracy", first, partial(accuracy_against_latency, content), margin),
        Picture("latency", "Latency against tokens", lambda narrow: both_scopes(content, "latency", narrow), fitted),
        Picture(
            "memory", "Peak memory against tokens", lambda narrow: both_scopes(content, "peak_bytes", narrow), held
        ),
    ]
