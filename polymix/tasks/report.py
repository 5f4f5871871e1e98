"""What a training run leaves: metrics.jsonl, results.json, report.md and the curves."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from polymix._io import RESULTS, reason_of, write_whole
from polymix.errors import ResultsError
from polymix.measure.machine import manifest

SCHEMA = "polymix.train/1"
Row = Mapping[str, Any]


class Journal:
    """metrics.jsonl, a row for each measurement. Rows after step `done`, of a run that was stopped, are removed."""

    def __init__(self, path: Path, done: int, say: Callable[[str], None], writes: bool) -> None:
        self.path, self.say, self.writes = path, say, writes
        if writes:
            kept = [row for row in self.rows() if row["step"] <= done]
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, "".join(json.dumps(row) + "\n" for row in kept))

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
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            self.say("  ".join(f"{key} {_short(value)}" for key, value in row.items() if key != "samples"))


def measured(rows: Sequence[Row]) -> tuple[list[str], list[Row]]:
    """The names of what was measured on held-out data, the headline first, and the rows that have it."""
    kept = [row for row in rows if "loss" not in row and len(row) > 1]
    return list(dict.fromkeys(key for row in kept for key in row if key not in ("step", "samples"))), kept


def write_results(out: Path, content: Mapping[str, Any], rows: Sequence[Row], finished: bool) -> Path:
    """results.json: settings, machine, parameters, and every row that was measured on held-out data."""
    names, kept = measured(rows)
    machine = manifest(content["settings"]["device"], torch.get_num_threads())
    metrics = {name: _finite(kept[-1].get(name)) for name in names}
    evaluations = [{key: _finite(value) for key, value in row.items()} for row in kept]
    whole = {"schema": SCHEMA, "finished": finished, **content, "machine": machine, "metrics": metrics,
             "evaluations": evaluations}  # fmt: skip
    write_whole(out / RESULTS, json.dumps(whole, indent=1, allow_nan=False) + "\n")
    return out / RESULTS


def write_report(
    out: Path, content: Mapping[str, Any], rows: Sequence[Row], pictures: Sequence[Path], about: Row
) -> Path:
    """report.md: the task, the measurements by step, the pictures, the last samples, and how to use the model."""
    names, kept = measured(rows)
    speeds = sorted((row[key], key) for row in rows for key in row if key.endswith("_per_second"))
    settings = content["settings"]
    lines = [f"# {content['task'].capitalize()}, {content['parameters']:,} parameters", ""]
    lines += [about["describe"], ""] if about.get("describe") else []
    lines += [
        f"{settings['steps']:,} steps of {settings['batch_size']} samples, {settings['precision']}.", "",
        "| step | " + " | ".join(name.replace("_", " ") for name in names) + " |", "|---:" * (len(names) + 1) + "|",
        *(f"| {row['step']:,} | " + " | ".join(_cell(row.get(name)) for name in names) + " |" for row in kept), "",
    ]  # fmt: skip
    if speeds:
        speed, key = speeds[len(speeds) // 2]
        lines += [f"{speed:,} {key.removesuffix('_per_second')} per second in training (median).", ""]
    for picture in (draw_curves(out, rows), *pictures):
        lines += [f"![{picture.stem.replace('-', ' ')}]({picture.name})", ""]
    for text in kept[-1].get("samples", ()) if kept else ():
        lines += ["```text", text.replace("```", "` ` `"), "```", ""]
    lines += ["```python", *about["usage"], "```", ""] if about.get("usage") else []
    write_whole(out / "report.md", "\n".join(lines))
    return out / "report.md"


def draw_curves(out: Path, rows: Sequence[Row]) -> Path:
    """curves.png: the training loss and the headline measurement by step."""
    from matplotlib.figure import Figure

    names, kept = measured(rows)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    curves = [("loss", [row for row in rows if "loss" in row]), *((name, kept) for name in names[:1])]
    for axes, (name, its) in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves, strict=True):
        its = [row for row in its if _finite(row.get(name)) is not None]
        axes.plot([row["step"] for row in its], [row[name] for row in its], marker="o" if len(its) < 40 else None)
        title = "training loss" if name == "loss" else f"{name.replace('_', ' ')} on held-out data"
        axes.set(xlabel="step", title=title)
        axes.grid(color="#e4e4e4")
        axes.spines[["top", "right"]].set_visible(False)
    path = out / "curves.png"
    write_whole(path, lambda part: figure.savefig(part, dpi=130, format="png"))
    return path


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _short(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _cell(value: Any) -> str:
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
