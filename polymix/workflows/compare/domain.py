"""`polymix compare --task DOMAIN`: train every mixer on a domain by one recipe, over seeds; a table and a page."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from polymix import _io
from polymix._io import check_folder, write_whole
from polymix.errors import CapabilityError, OptionError, check_int
from polymix.measure.machine import manifest
from polymix.mixers.spec import parse_mixers
from polymix.numbers import NONE, figure, machine_line, metric
from polymix.pages import embedded, render
from polymix.tasks.recipe import CONTROL, TaskRecipe
from polymix.tasks.report import finished_rows
from polymix.tasks.rows import COLUMNS, UP, check_rows, floor_sentence
from polymix.tasks.runner import check_recipe, chosen_recipe, train

MIXERS = "softmax,pom,padre-2,qt,linear_floor"
Say = Callable[[str], None]


class DomainResults(_io.Results):
    """The rows of one comparison on a domain."""

    schema: ClassVar[str] = "polymix.compare-task/1"
    command: ClassVar[str] = "polymix compare --task"
    parts: ClassVar[Mapping[str, Any]] = {"rows": [], "refused": [], "control": None, "pictures": {}}
    rows: ClassVar[Mapping[str, Any]] = {"rows": COLUMNS}


@dataclass(frozen=True)
class DomainSettings:
    """What is compared, and on what. A comparison can only be resumed with the same settings.

    Args:
        task: a domain or a recipe's file. data, layout, preset, options: as for `polymix train`.
        mixers: separated by commas. Attention and linear_floor are added if they are missing.
        seeds: runs of each mixer. threads: of PyTorch.
    """

    task: str
    data: str | None = None
    layout: str | None = None
    preset: str | None = None
    options: Sequence[str] = ()
    mixers: str = MIXERS
    seeds: int = 2
    threads: int = 2

    def recipes(self) -> dict[str, TaskRecipe]:
        """The recipe of each mixer, by label. Raises what is wrong with the settings, before anything is trained."""
        check_int("--seeds", self.seeds, 1)
        if any(word.partition("=")[0] in ("mixer", "seed", "control") for word in self.options):
            got = f"--set {next(iter(self.options))}"
            raise OptionError("--set", got, "other options than mixer, seed and control", "Use --mixers and --seeds.")
        recipe = chosen_recipe(self.task, options=self.options, data=self.data, layout=self.layout, preset=self.preset)
        words = [word.strip() for word in self.mixers.split(",")]
        bare = [word for word in dict.fromkeys(words) if word == recipe.without_mixer]
        labels = [*bare, *parse_mixers(",".join(word for word in words if word not in bare) or CONTROL)]
        labels += [] if CONTROL in labels else [CONTROL]
        return {label: replace(recipe.with_mixer(label), control=False) for label in labels}

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "options": list(self.options)}


def compare_domain(
    settings: DomainSettings, folder: Path, say: Say = lambda text: None, *, resume: bool = False
) -> DomainResults:
    """Train each mixer with each seed, in folder/runs, and write results.json, report.html and report.md.

    A mixer that the host cannot take is left out, linear_floor too; the results say why. Finished runs are kept by
    `resume`, unfinished ones continue.

    Raises:
        OptionError, DataError, ResultsError: the settings or the data are wrong, or the folder has other results.
    """
    recipes = settings.recipes()
    check_folder(folder)
    refused: dict[str, str] = {}
    for label, recipe in recipes.items():
        try:
            check_recipe(recipe)
        except (CapabilityError, OptionError) as error:
            # A language model cannot be built of linear_floor, which keeps no state: the table says so.
            if label == "softmax" or (label == CONTROL and not isinstance(error, CapabilityError)):
                raise
            refused[label] = str(error)
    torch.set_num_threads(settings.threads)
    device = next(iter(recipes.values())).device
    results = DomainResults.open(folder, settings.to_dict(), manifest(device, settings.threads), resume=resume)
    done = {(row["mixer"], row["seed"]) for row in results.content["rows"]}
    for seed in range(settings.seeds):
        for label, recipe in recipes.items():
            if label in refused or (recipe.mixer_name, seed) in done:
                continue
            say(f"{label}, seed {seed}")
            run = folder / "runs" / f"{re.sub(r'[^A-Za-z0-9_.=-]', '-', label)}-{seed}"
            started = (run / "checkpoint" / "last.ckpt").exists()
            try:
                train(replace(recipe, seed=seed), run, resume=started, say=say, data_folder=folder / "data")
            except CapabilityError as error:
                refused[label] = str(error)
                continue
            results.add("rows", check_rows({"rows": finished_rows(run)[:1]}, str(run)))
            if seed == 0 and (run / "predictions.png").is_file():
                (folder / f"{run.name}.png").write_bytes((run / "predictions.png").read_bytes())
                results.set(pictures={**results.content["pictures"], label: f"{run.name}.png"})
    reasons = [{"mixer": label, "reason": reason} for label, reason in refused.items()]
    results.set(refused=reasons, control=floor_sentence(results.content["rows"]), finished=True)
    write_report(results.content, folder)
    return results


def table(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Headings, and a line for each mixer: means over the seeds, with the range where there are several."""
    if not rows:
        return [["mixer"]]
    names = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    arrows = {name: "↑" if rows[0]["directions"].get(name) == UP else "↓" for name in names}
    unit = rows[0]["unit"]
    lines = [["mixer", "seeds", *(f"{name.replace('_', ' ')} {arrows[name]}" for name in names), "parameters",
              f"{unit}/s training", f"{unit}/s inference", "peak MiB of a step", "in the paper"]]  # fmt: skip
    for mixer in dict.fromkeys(row["mixer"] for row in rows):
        mine = [row for row in rows if row["mixer"] == mixer]
        metrics = [_spread([row["metrics"].get(name) for row in mine], name) for name in names]
        speeds = [_median([row[key] for row in mine]) for key in ("training_per_second", "inference_per_second")]
        peak = _median([row["peak_bytes"] for row in mine])
        paper = ", ".join(f"{key} {value}" for key, value in (mine[0]["paper"] or {}).items()) or NONE
        lines.append([mixer, str(len(mine)), *metrics,
                      f"{mine[0]['parameters']:,}", *map(figure, speeds),
                      NONE if peak is None else figure(peak / 2**20), paper])  # fmt: skip
    return lines


def write_report(content: Mapping[str, Any], folder: Path) -> Path:
    """report.html and report.md: the table, how far the floor is, and each mixer's predictions beside the truth."""
    head, *body = table(content["rows"])
    paths = [folder / name for name in content["pictures"].values()]
    pictures = dict(zip(content["pictures"], embedded(paths).values(), strict=True))
    title = f"Mixers on {content['settings']['task']}"
    machine = machine_line(content["machine"])
    page = render("workflows/compare/domain.html.j2", title=title, headings=head, rows=body, control=content["control"],
                  refused=content["refused"], pictures=pictures, machine=machine)  # fmt: skip
    write_whole(folder / "report.html", page)
    lines = [f"# {title}", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    lines += [f"| {' | '.join(row)} |" for row in body] + ["", content["control"] or "", ""]
    lines += [f"Left out: {row['mixer']}. {row['reason']}" for row in content["refused"]]
    lines += [f"![{label}]({name})" for label, name in content["pictures"].items()]
    write_whole(folder / "report.md", "\n".join(lines) + "\n")
    return folder / "report.html"


def _spread(values: Sequence[float | None], name: str) -> str:
    numbers = [value for value in values if value is not None]
    if len(numbers) < len(values) or not numbers:
        return NONE
    mean = metric(statistics.fmean(numbers), name)
    return mean if len(numbers) == 1 else f"{mean} ({metric(min(numbers), name)} to {metric(max(numbers), name)})"


def _median(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return statistics.median(numbers) if numbers else None
