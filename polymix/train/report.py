"""What a training run leaves: metrics.jsonl, results.json, the report as a page and as Markdown, and the curves."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from polymix.errors import ResultsError, reason_of
from polymix.files import read_json, write_whole, writing
from polymix.measure.machine import manifest
from polymix.numbers import DASH, figure, machine_line, metric, plural
from polymix.pages import embedded, fenced, markdown, render, table_line
from polymix.results import RESULTS, schema_name
from polymix.train.evaluation import VALIDATION
from polymix.train.rows import UP, TrainContent, check_rows, floor_sentence
from polymix.train.task import Metric, Task, unit_of

TURN = "Turn a test scan: a page of its own"
SCHEMA = schema_name(TrainContent)
Row = Mapping[str, Any]


class Journal:
    """metrics.jsonl, a row for each measurement. Rows after step `done`, of a run that was stopped, are removed."""

    def __init__(
        self, path: Path, done: int, say: Callable[[str], None], writes: bool, metrics: Sequence[Metric] = ()
    ) -> None:
        self.path, self.say, self.writes, self.metrics = path, say, writes, metrics
        if writes:
            earlier = [row for row in self.rows() if row["step"] <= done]
            path.parent.mkdir(parents=True, exist_ok=True)
            if earlier or path.exists():
                write_whole(path, "".join(json.dumps(row) + "\n" for row in earlier))

    def rows(self) -> list[dict[str, Any]]:
        """All rows. An incomplete last line is left out."""
        try:
            lines = self.path.read_text("utf-8").splitlines(keepends=True) if self.path.exists() else []
            rows = [json.loads(line) for line in lines if line.endswith("\n")]
            if not all(isinstance(row, dict) and type(row.get("step")) is int for row in rows):
                raise ValueError("a line without a step")
        except (OSError, ValueError, RecursionError) as error:
            got = f"{self.path}, a file that cannot be read ({reason_of(error)})"
            cure = "Delete it to continue without the earlier measurements."
            raise ResultsError("resume", got, "a metrics.jsonl of polymix train", cure) from error
        return rows

    def latest(self) -> dict[str, Any]:
        """The last value of each measurement."""
        return {key: value for row in self.rows() for key, value in row.items()}

    def __call__(self, row: Row) -> None:
        if self.writes:
            size = self.path.stat().st_size if self.path.exists() else 0
            try:
                with writing(self.path), self.path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            except OSError:
                os.truncate(self.path, size)  # a row stands whole or not at all
                raise
            units = {key: unit_of(self.metrics, key.removeprefix(VALIDATION)) for key in row if key != "samples"}
            self.say("  ".join(f"{key} {metric(row[key], unit)}" for key, unit in units.items()))


def measured(rows: Sequence[Row]) -> tuple[list[str], list[Row]]:
    """The names of what was measured on held-out data, the headline first, and the rows that have it."""
    evaluated = [row for row in rows if "loss" not in row and len(row) > 1]
    names = dict.fromkeys(key for row in evaluated for key in row if key not in ("step", "samples", "kept_step"))
    return sorted(names, key=lambda name: name.startswith(VALIDATION)), evaluated


def metric_of(task: Task[Any, Any], name: str) -> Metric:
    """The declared metric of a name in the journal, which may be that of a validation."""
    return task.better(name.removeprefix(VALIDATION))


def write_results(out: Path, content: Mapping[str, Any], rows: Sequence[Row], finished: bool) -> Path:
    """results.json: settings, machine, parameters, and every row that was measured on held-out data."""
    names, evaluated = measured(rows)
    machine = manifest(content["settings"]["device"], torch.get_num_threads())
    metrics = {name: finite(evaluated[-1].get(name)) for name in names}
    evaluations = [{key: finite(value) for key, value in row.items()} for row in evaluated]
    whole = {"schema": SCHEMA, "finished": finished, **content, "machine": machine, "metrics": metrics,
             "evaluations": evaluations}  # fmt: skip
    write_whole(out / RESULTS, json.dumps(whole, indent=1, allow_nan=False) + "\n")
    return out / RESULTS


def finished_rows(out: Path) -> list[dict[str, Any]]:
    """The rows of a results.json: that of a model once it is trained, then also its control's; none before."""
    try:
        content = read_json(out / RESULTS, ResultsError, "out", f"{RESULTS} of polymix train", finite=True)
        return check_rows(content, str(out / RESULTS)) if content.get("rows") else []
    except (ResultsError, AttributeError):
        return []


def add_control(out: Path, below: Path) -> str:
    """Add the control's row to a run's results.json and to its report. Returns the sentence that compares them."""
    content = json.loads((out / RESULTS).read_text("utf-8"))
    rows = [*content["rows"][:1], *finished_rows(below)]
    content |= {"finished": True, "rows": rows, "control": floor_sentence(rows)}
    write_whole(out / RESULTS, json.dumps(content, indent=1, allow_nan=False) + "\n")
    journal = Journal(out / "metrics.jsonl", 0, lambda text: None, writes=False)
    write_report(out, content, journal.rows())
    return str(content["control"])


def write_report(out: Path, content: Mapping[str, Any], rows: Sequence[Row]) -> Path:
    """report.html and report.md: the task, the measurements by step, the pictures, the last samples, and what is next.

    Args:
        content: as in results.json. "about" has "describe", a sentence; "usage", lines of Python; "next", pairs of a
            reason and a command. "pictures" are names of files in `out`; pages among them are linked.
    Returns:
        the path of the page.
    """
    about: Row = content.get("about") or {}
    drawn = [out / name for name in content.get("pictures", ())]
    pictures, pages = ([path for path in drawn if (path.suffix == ".html") == is_page] for is_page in (False, True))
    from polymix.pages.plots import Picture, publish

    names, evaluated = measured(rows)
    units = content["rows"][0]["units"] if content.get("rows") else {}
    speeds = [(row[key], key) for row in rows for key in row if key.endswith("_per_second")]
    settings = content["settings"]
    name = content["rows"][0]["mixer"] if content.get("rows") else settings.get("mixer")
    mixer = "" if name in (None, "", "model") else f" with {name}"  # "model": its config has its own
    title = f"{content['task'].capitalize()}{mixer}, {plural(content['parameters'], 'parameter')}"
    training = f"{plural(settings['steps'], 'step')} of {plural(settings['batch_size'], 'sample')}, "
    training += f"{settings['precision']}."
    if speeds:
        speed, key = figure(statistics.median(speed for speed, _ in speeds)), speeds[0][1]
        training += f" {speed} {_unit(key.removesuffix('_per_second'))} per second in training (median)."
    curves = Picture("curves", "Training loss and the headline by step", lambda narrow: curve(rows, units, narrow))
    shown = publish([curves], out)
    headings = ["step", *(name.replace("_", " ") for name in names)]
    cells = [[f"{row['step']:,}", *(metric(row.get(name), units.get(name, "")) for name in names)]
             for row in evaluated]  # fmt: skip
    samples = list(evaluated[-1].get("samples", ())) if evaluated else []
    page = render(
        "train/report.html.j2", title=title, training=training, describe=about.get("describe"), headings=headings,
        rows=cells, curves=shown["curves"], pictures={path.stem: url for path, url in zip(
            pictures, embedded(pictures).values(), strict=True)}, pages=[path.name for path in pages], samples=samples,
        usage=about.get("usage") or [],
        next_commands=about.get("next") or [], turn=TURN,
        mixers=table(content.get("rows", ())), control=content.get("control"),
        machine=machine_line(manifest(settings["device"], torch.get_num_threads())),
    )  # fmt: skip
    write_whole(out / "report.html", page)
    described = [markdown(about["describe"]), ""] if about.get("describe") else []
    lines = [f"# {markdown(title)}", "", *described, training, ""]
    lines += [table_line(headings), "|---:" * len(headings) + "|", *map(table_line, cells)]
    lines += [""]
    head, *body = table(content.get("rows", ())) or [[]]
    if body:
        lines += [table_line(head), "|---" * len(head) + "|", *map(table_line, body), ""]
    lines += [markdown(content["control"]), ""] if content.get("control") else []
    for picture in (out / "curves.png", *pictures):
        lines += [f"![{picture.stem.replace('-', ' ')}]({picture.name})", ""]
    for page in pages:
        lines += [f"[{TURN}]({page.name})", ""]
    for text in samples:
        lines += [fenced(text, "text"), ""]
    lines += [fenced("\n".join(about["usage"]), "python"), ""] if about.get("usage") else []
    write_whole(out / "report.md", "\n".join(lines))
    return out / "report.html"


def table(rows: Sequence[Row]) -> list[list[str]]:
    """The table over mixers: a line of headings, then a line for each row of results.json; empty without rows."""
    if not rows:
        return []
    names = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    unit = _unit(rows[0]["unit"])
    marks = {name: "↑" if row["directions"].get(name) == UP else "↓" for row in rows for name in row["metrics"]}
    head = ["mixer", "seed", *(f"{name.replace('_', ' ')} {marks[name]}" for name in names), "parameters",
            f"{unit}/s training", f"{unit}/s inference", "peak MiB of a step"]  # fmt: skip
    papers = any(row["paper"] for row in rows)
    lines = [head + ["in the paper"] * papers]
    for row in rows:
        values = [metric(row["metrics"].get(name), row["units"].get(name, "")) for name in names]
        speeds = [figure(row[key]) for key in ("training_per_second", "inference_per_second")]
        peak = DASH if row["peak_bytes"] is None else figure(row["peak_bytes"] / 2**20)
        paper = in_the_paper(row) if row["paper"] else DASH
        lines.append([row["mixer"], str(row["seed"]), *values, f"{row['parameters']:,}", *speeds, peak]
                     + [paper] * papers)  # fmt: skip
    return lines


def _unit(name: str) -> str:
    """The unit of a speed as it is written."""
    return name.replace("km2", "km²")


def in_the_paper(row: Row) -> str:
    """The paper's figures of a row, in the form of ours, and where they stand."""
    figures, units = row["paper"], row["units"]
    named = [f"{key.replace('_', ' ')} {metric(value, units.get(key, '')) if isinstance(value, float) else value}"
             for key, value in figures.items() if key != "source"]  # fmt: skip
    return ", ".join(named) + (f" ({figures['source']})" if "source" in figures else "")


def curve(rows: Sequence[Row], units: Mapping[str, str], narrow: bool) -> Any:
    """The training loss, and by step what chooses the weights, or the headline. units: of metrics, by name."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, MaxNLocator

    from polymix.pages.plots import COLOURS, PHONE_WIDTH

    names, evaluated = measured(rows)
    chosen = [name for name in names if name.startswith(VALIDATION)]  # the headline, or what a task is `chosen_by`
    headline = [name for name in chosen if name == f"{VALIDATION}{names[0]}"] or chosen[:1] or names[:1]
    curves = [("loss", [row for row in rows if "loss" in row]), *((name, evaluated) for name in headline)]
    figure = Figure(figsize=(PHONE_WIDTH, 2.9 * len(curves)) if narrow else (9, 3.6), layout="constrained")
    grid = figure.subplots(*((len(curves), 1) if narrow else (1, len(curves))), squeeze=False)
    for axes, (name, its) in zip(grid.flat, curves, strict=True):
        its = [row for row in its if finite(row.get(name)) is not None]
        unit = units.get(name, "")
        values = [100 * row[name] if unit == "%" else row[name] for row in its]
        steps = [row["step"] for row in its]
        axes.plot(steps, values, marker="o" if len(its) < 40 else None, color=COLOURS[0])
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True) if len(steps) > 1 else FixedLocator(steps))
        if len(set(values)) == 1 and values[0]:  # or the axis would be a few hundredths around it
            axes.set_ylim(*sorted((0.0, 2.0 * values[0])))
        title = "training loss" if name == "loss" else f"{name.replace('_', ' ')} on held-out data"
        axes.set(xlabel="step", title=f"{title}, {unit}" if unit else title)
    return figure


def finite(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
