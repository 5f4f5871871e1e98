"""The tables of results that a page asks for by <!-- generated: NAME -->, from benchmarks/results: a hook of MkDocs."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # a hook is no package

import language_figures
from tables import RESULTS, table


def exact() -> str:
    rows = json.loads((RESULTS / "table-1.json").read_text())["exact"]
    cells = [(row["mechanism"], row["degree"], row["chains"], f"{row['error']:.1e}") for row in rows]
    return table(("mechanism", "degree", "chains", "relative error"), cells)


def approximate(part: str, down: str, across: str, label: str, heading: str) -> str:
    """Errors by two things that they depend on, one down and one across."""
    rows = json.loads((RESULTS / "table-1.json").read_text())[part]
    errors = {(row[down], row[across]): f"{row['error']:.1e}" for row in rows}
    columns = list(dict.fromkeys(there for _, there in errors))
    lines = [(f"{here:g}", *(errors[here, there] for there in columns)) for here in dict.fromkeys(d for d, _ in errors)]
    return table((label, *(heading.format(there) for there in columns)), lines)


@cache
def recipe() -> Any:
    """recipes/degree_study.py as a module."""
    spec = importlib.util.spec_from_file_location("degree_study", RESULTS.parents[1] / "recipes" / "degree_study.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def study(folder: str) -> dict[str, Any]:
    return dict(json.loads((RESULTS / folder / "results.json").read_text()))


def host(folder: str) -> str:
    found = study(folder)
    its, seeds = found["host"], len({row["seed"] for row in found["rows"]})
    side = its["image_size"] // its["patch_size"]
    return (
        f"{side * side} tokens of {its['patch_size']} × {its['patch_size']} pixels, blocks: {its['depth']}, channels: "
        f"{its['dim']}, hidden units of an MLP: {int(its['dim'] * its['mlp_ratio'])}, epochs: "
        f"{found['recipe']['epochs']}, seeds: {seeds}, runs: {len(found['rows'])}."
    )


def accuracy(folder: str) -> str:
    return str(recipe().table(study(folder)["rows"]))


def growth(when: str, what: str, folder: str) -> str:
    """Geometric mean over seeds of a figure of growth, laid out as the recipe's own table."""
    rows = study(folder)["rows"]
    degrees = sorted({row["degree"] for row in rows})
    lines = []
    for basis in recipe().BASES:
        for normalize in (None, "rms"):
            cells = []
            for degree in degrees:
                which = (degree, normalize, basis if degree > 1 else recipe().BASES[0])
                its = [row[when][what] for row in rows if (row["degree"], row["normalize"], row["basis"]) == which]
                cells.append(mean(its))
            lines.append((basis, normalize or "as it is", *cells))
    return table(("basis", "Y", *degrees), lines)


def mean(values: list[float | None]) -> str:
    good = [math.log(value) for value in values if value is not None and 0 < value < math.inf]
    if len(good) < len(values) or not values:
        return "not finite" if values else "–"
    centre = math.exp(sum(good) / len(good))
    return f"{centre:.2g}" if centre < 100 else f"{centre:,.0f}"


def plot(folder: str) -> str:
    there = (RESULTS / folder / "degree.png").exists()
    return f"![Accuracy, gradients and outputs by degree](images/{folder}.png)" if there else ""


def targets() -> str:
    content = json.loads((RESULTS / "targets.json").read_text())
    lines = []
    for row in content["rows"]:
        goal, verdict = f"{row['sign']} {row['target']:.3g}", "met" if row["met"] else "**not met**"
        lines.append((row["what"], f"{row['value']:.3g}", goal, verdict, row["detail"]))
    its = content["machine"]
    said = f"{its['cpu']} ({its['cpu_capability']}), {its['threads']} threads, torch {its['torch']}."
    return said + "\n\n" + table(("what", "measured", "target", "", "from"), lines)


def recovery() -> str:
    content = json.loads((RESULTS / "recovery.json").read_text())
    stages = ("before", "converted", "imitated", "distilled", "scratch")
    lines = [(row["mixer"], *(f"{row[stage]:.1%}" for stage in stages)) for row in content["rows"]]
    epochs = content["epochs"]
    told = (f"Epochs: {epochs['teacher']} for attention, then {epochs['imitate']} of imitation and "
            f"{epochs['fine-tune']} of fine-tuning; from scratch as many as both."
            f" `python benchmarks/recovery.py OUT.json`")  # fmt: skip
    headings = ("mixer", "attention", "converted", "after imitation", "after fine-tuning", "from scratch")
    return table(headings, lines) + "\n\n" + told


def hosts() -> str:
    lines = []
    for row in json.loads((RESULTS / "hosts.json").read_text())["rows"]:
        if row["refused"]:
            lines.append((row["host"], row["mixer"], f"refused: {row['refused']}", "", "", ""))
            continue
        flops, layers = row["multiply_adds"], row["layer_multiply_adds"]
        printed = row["printed"]
        said = "" if printed is None else (
            f"{printed['parameters']} M, {printed['multiply_adds']} G of the {printed['what']} ({printed['source']})"
        )  # fmt: skip
        lines.append((row["host"], row["mixer"], f"{row['parameters']:.2f}", "–" if flops is None else f"{flops:.2f}",
                      "–" if layers is None else f"{layers:.2f}", said))  # fmt: skip
    headings = ("host", "mixer", "parameters, M", "multiply-adds, G", "of the layers, G", "printed")
    return table(headings, lines) + "\n\n`python benchmarks/hosts.py OUT.json`"


def whole_models() -> str:
    content = json.loads((RESULTS / "whole-models.json").read_text())
    lines = []
    for row in content["rows"]:
        ratio = row["before"] / row["after"] if row["before"] and row["after"] else None
        cells = [f"{1e3 * row[key]:.0f}" if row[key] else "–" for key in ("before", "after")]
        lines.append((row["model"], row["input"], f"{row['tokens']:,}", row["mixer"], *cells,
                      "–" if ratio is None else f"{ratio:.2f} ×"))  # fmt: skip
    its = content["machine"]
    said = f"{its['cpu']}, {its['threads']} threads, torch {its['torch']}; batch 1, float32, forward."
    headings = ("model", "input", "tokens", "mixer", "attention, ms", "mixer, ms", "gain")
    return said + "\n\n" + table(headings, lines) + "\n\n`python benchmarks/whole_models.py OUT.json`"


TABLES: dict[str, Callable[[], str]] = {
    **language_figures.TABLES,
    "recovery": recovery,
    "hosts": hosts,
    "whole-models": whole_models,
    "targets": targets,
    "table-1-exact": exact,
    "table-1-softmax": partial(approximate, "softmax", "reach", "order", "largest logit", "order {}"),
    "table-1-mamba": partial(approximate, "mamba", "largest", "held", "largest Δ", "Δ {}"),
}
STUDIES = ("degree-study", "degree-study-roomy")
for folder in STUDIES:
    TABLES |= {
        f"{folder}-host": partial(host, folder), f"{folder}-accuracy": partial(accuracy, folder),
        f"{folder}-gradient": partial(growth, "at_init", "gradient", folder),
        f"{folder}-largest": partial(growth, "trained", "largest", folder), f"{folder}-plot": partial(plot, folder),
    }  # fmt: skip


def on_files(files: Any, config: Any) -> None:
    from mkdocs.structure.files import File

    for folder in STUDIES:
        picture = RESULTS / folder / "degree.png"
        if picture.exists():
            files.append(File.generated(config, f"images/{folder}.png", abs_src_path=str(picture)))


def on_page_markdown(markdown: str, **_: Any) -> str:
    return re.sub(r"<!-- generated: ([\w-]+) -->", lambda found: TABLES.get(found[1], lambda: found[0])(), markdown)
