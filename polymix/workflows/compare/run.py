"""`polymix compare`: train the same model with every mixer, time every mixer over token counts, and judge."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from polymix import results as base
from polymix.devices import check_device
from polymix.errors import CapabilityError, DivergedError, OptionError
from polymix.files import output_folder, write_whole
from polymix.measure.harness import Budget
from polymix.measure.machine import manifest
from polymix.measure.sweep import Maker, alone, sweep
from polymix.mixers import MixerConfig
from polymix.mixers.registry import ATTENTION
from polymix.pages import data_url
from polymix.results import RESULTS, Progress
from polymix.train.data.splits import spread
from polymix.train.evaluation import evaluating
from polymix.train.place import Place
from polymix.train.recipe import CONTROL, Recipe
from polymix.train.report import finished_rows
from polymix.train.resume import LAST_CHECKPOINT
from polymix.train.rows import check_rows, floor_sentence, make_row
from polymix.train.run import check_recipe, train
from polymix.train.task import Data, Task
from polymix.workflows.compare.content import Content
from polymix.workflows.compare.settings import Asked, Settings, named_as_flags
from polymix.workflows.compare.verdict import answer

SAMPLES = 12  # test pictures that the report shows
MAX_CONFUSED_CLASSES = 20  # of a table of confusions
REQUIRED = (ATTENTION, CONTROL)  # without which nothing is compared
Say = Callable[[str], None]


class Results(base.Results):
    """The results of one comparison in one folder."""

    kind: ClassVar[Any] = Content
    command: ClassVar[str] = "polymix compare"


def compare(
    settings: Settings, folder: Path, progress: Progress, *, resume: bool = False, say: Say = lambda text: None
) -> Results:
    """Run (or resume) a comparison and save its results, with the verdict, in `folder`.

    Each mixer is trained with each seed by `polymix.train.run.train` in folder/runs; every mixer of a seed sees the
    data in the same order. Mistakes in the settings or the data are found before anything is trained. A mixer that the
    host cannot take is left out, and the results say why; attention and linear_floor are in every comparison. Each
    finished run and token count is saved before the next begins; `resume` keeps these, and continues an unfinished run.

    Raises:
        OptionError, DataError, ResultsError: the settings or the data are wrong, or the folder has other results.
    """
    asked = settings.check()
    check_device(settings.device, "--device")
    with output_folder(folder):
        with named_as_flags():
            comparison = _Comparison(settings, asked, folder, progress, say)
            comparison.leave_out()
            torch.set_num_threads(settings.threads)
            machine = manifest(settings.device, settings.threads)
            if not (folder / RESULTS).exists():
                _ = comparison.recipe  # raises what is wrong with the data, or for them, before anything is written
            results = Results.open(folder, settings.to_dict(), machine, resume=resume)
            comparison.describe(results)
            comparison.train(results)
        if asked.tokens:
            comparison.sweep(results)
            results.set(answer=answer(results.content))
        results.set(control=floor_sentence(results.content["rows"]), finished=True)
    return results


@dataclass
class _Comparison:
    """A comparison as it goes on. refused: reasons by label. data: of the seed that is trained."""

    settings: Settings
    asked: Asked
    folder: Path
    progress: Progress
    say: Say
    refused: dict[str, str] = field(default_factory=dict)
    data: tuple[int, Data] | None = None

    def leave_out(self) -> None:
        """Note mixers that the host cannot take. Raises where that is attention or the control, which all need."""
        for label in self.asked.labels:
            try:
                check_recipe(self.asked.recipe_of(label))
            except (CapabilityError, OptionError) as error:
                if label in REQUIRED:
                    raise
                self.refused[label] = str(error)

    @property
    def labels(self) -> list[str]:
        """Of the mixers that are trained."""
        return [label for label in self.asked.labels if label not in self.refused]

    def task(self, label: str, seed: int = 0) -> Task[Any, Any]:
        """The task of one run."""
        return check_recipe(self.asked.recipe_of(label, seed), self.say)

    def data_of(self, seed: int) -> Data:
        """The data of a seed, which are the same for every mixer."""
        if self.data is None or self.data[0] != seed:
            self.data = seed, self.task(self.labels[0], seed).load(self.folder / "data")
        return self.data[1]

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe of all runs, with the steps that its epochs take on the data."""
        return self.asked.recipe.for_data(self.task(self.labels[0]).epoch(self.data_of(0), 1))

    def describe(self, results: Results) -> None:
        """Save what is compared, once."""
        if results.content["host"] is not None:
            return
        task, data = self.task(self.labels[0]), self.data_of(0)
        grid = task.grid()
        with torch.device("meta"):
            name = task.host_name(task.build(data)) if grid is not None else ""
        host = {"name": name, "describe": task.describe(data), "tokens": None if grid is None else grid[0] * grid[1],
                "recipe": self.recipe.to_dict()}  # fmt: skip
        mixers = [{"label": label, "config": self._config(label), "flops": self._flops(label)} for label in self.labels]
        results.set(host=host, mixers=mixers, refused=self._reasons())

    def _reasons(self) -> list[dict[str, str]]:
        return [{"mixer": label, "reason": reason} for label, reason in self.refused.items()]

    def _config(self, label: str) -> dict[str, Any]:
        return self.asked.configs[label].to_dict() if label in self.asked.configs else {}

    def _flops(self, label: str) -> int | None:
        """FLOPs of the whole model on one input, where the task builds it for any grid."""
        task = self.task(label)
        grid = task.grid()
        if grid is None:
            return None
        model, x = task.at_grid(self.data_of(0), grid, device="meta")
        # The counter does not know every fused attention kernel, so count attention's two products on the plain path.
        with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            model(x)
        return int(counter.get_total_flops())

    # Training

    def train(self, results: Results) -> None:
        """Train what is not yet in the results."""
        done = {(row["mixer"], row["seed"]) for row in results.content["rows"]}
        for seed in range(self.settings.runs):
            for label in self.labels:
                recipe = self.asked.recipe_of(label, seed)
                if (label, seed) not in done:
                    self._train(results, label, recipe)

    def _train(self, results: Results, label: str, recipe: Recipe) -> None:
        """One run: its row, what it answers, and with the first seed its picture."""
        seed, data = recipe.seed, self.data_of(recipe.seed)
        run = self.folder / "runs" / f"{re.sub(r'[^A-Za-z0-9_.=-]', '-', label)}-{seed}"
        task = self.task(label, seed)
        steps = recipe.for_data(task.epoch(data, 1)).steps
        advance = self.progress.start(f"Training {label}, seed {seed}", steps)
        try:
            train(recipe, run, resume=(run / LAST_CHECKPOINT).exists(), data=data, on_step=advance)
        except CapabilityError as error:
            if label in REQUIRED:
                raise
            self.refused[label] = str(error)
            results.set(refused=self._reasons())
            return
        except DivergedError:
            results.add("rows", [{**_diverged(task, data, steps), "mixer": label}])
            return
        if task.answers:
            self._answers(results, label, task, data, run)
        elif seed == 0:
            self._picture(results, label, run)
        rows = [{**row, "mixer": label} for row in finished_rows(run)[:1]]  # a plan is the same for all
        results.add("rows", check_rows({"rows": rows}, str(run)))
        if not results.content["host"]["name"]:
            results.set(host={**results.content["host"], "name": rows[0]["host"]})

    def _answers(self, results: Results, label: str, task: Task[Any, Any], data: Data, run: Path) -> None:
        """Keep what a run answers: for some samples, and how often it takes each class (rows) for each (columns)."""
        place = Place(task.recipe)
        model = task.restore(data, run).to(place.device)
        with place.autocast(), evaluating(model):
            details = task.details(model, data, place.process)
        labels, predictions = (torch.tensor(details[name]) for name in ("labels", "predictions"))
        if results.content["data"] is None:
            results.set(data=_described(task, data, labels))
        samples = results.content["data"]["samples"]
        places = spread(len(labels), SAMPLES)
        same = [int(labels[at]) for at in places] == [sample["class"] for sample in samples]
        classes = len(results.content["data"]["classes"])
        row = {
            "mixer": label, "seed": task.recipe.seed,
            "samples": [int(predictions[at]) for at in places] if same and task.recipe.seed == 0 else [],
            "confusion": _confusion(labels, predictions, classes) if classes <= MAX_CONFUSED_CLASSES else None,
        }  # fmt: skip
        run_of = (label, task.recipe.seed)
        before = [its for its in results.content["answers"] if (its["mixer"], its["seed"]) != run_of]
        results.set(answers=[*before, row])

    def _picture(self, results: Results, label: str, run: Path) -> None:
        """Keep the first picture that the task drew, predictions beside the truth, beside the results."""
        drawn = json.loads((run / RESULTS).read_text("utf-8")).get("pictures", [])
        for name in [name for name in drawn if name.endswith(".png")][:1]:
            write_whole(self.folder / f"{run.name}.png", (run / name).read_bytes())
            results.set(pictures={**results.content["pictures"], label: f"{run.name}.png"})

    # Time

    def sweep(self, results: Results) -> None:
        """Time the mixers alone, and the whole model where the task builds it for any grid."""
        settings, configs = self.settings, {label: self.asked.configs[label] for label in self.labels
                                            if label in self.asked.configs}  # fmt: skip
        dtype = getattr(torch, settings.dtype)
        mixer_alone = alone(settings.dim, settings.heads, settings.device, dtype)
        self._sweep(results, configs, mixer_alone, "alone", self.asked.tokens)
        tokens = results.content["host"]["tokens"]
        if tokens is None:
            return
        tasks, options = {label: self.task(label) for label in configs}, {"device": settings.device, "dtype": dtype}
        data = self.data_of(0)

        def whole(config: MixerConfig, grid: tuple[int, int]) -> tuple[nn.Module, Tensor, dict[str, Any]]:
            task = tasks[next(label for label, its in configs.items() if its is config)]
            return *task.at_grid(data, grid, **options), {}

        self._sweep(results, configs, whole, "host", tuple(sorted({*self.asked.tokens, tokens})))

    def _sweep(
        self, results: Results, configs: Mapping[str, MixerConfig], make: Maker, scope: Literal["alone", "host"],
        tokens: tuple[int, ...],
    ) -> None:  # fmt: skip
        done = {(row["mixer"], row["tokens"]): row["stopped"] for row in results.content["sweep"]
                if row["scope"] == scope}  # fmt: skip
        what = "the mixers alone" if scope == "alone" else "the whole model"
        advance = self.progress.start(f"Measuring {what}", len(tokens))
        budget = Budget(seconds=self.settings.max_seconds, bytes=int(self.settings.max_gib * 2**30))
        torch.manual_seed(0)
        measured = sweep(
            configs, list(tokens), make, scope=scope, budget=budget, device=self.settings.device, done=done
        )
        for step, rows in enumerate(measured, start=1):
            results.add("sweep", [row.to_dict() for row in rows])
            advance(step)
        advance(len(tokens))


def _diverged(task: Task[Any, Any], data: Data, steps: int) -> dict[str, Any]:
    """The row of a run whose loss became NaN or infinite."""
    headline = task.metrics[0]
    speed = {"unit": task.unit, "training_per_second": None, "inference_per_second": None, "peak_bytes": None}
    row = make_row(task, task.build(data), {headline.name: None}, {headline.name: headline}, speed)
    return {**row, "steps": steps}


def _described(task: Task[Any, Any], data: Data, labels: Tensor) -> dict[str, Any]:
    """The data of a task that answers with classes, by the labels of the test samples."""
    summary = data.summary()
    about: dict[str, Any] = {"name": task.recipe.source or "the task's own", "skipped": []}
    about |= {"train": len(data.train), "test": len(labels)}
    about |= {name: summary[name] for name in (*about, "classes", "channels", "image_size") if name in summary}
    counts = torch.bincount(labels, minlength=len(summary["classes"]))
    majority = {"name": summary["classes"][int(counts.argmax())], "share": (counts.max() / counts.sum()).item()}
    samples = [{"class": int(labels[at]), "image": data_url(png)} for at in spread(len(labels), SAMPLES)
               if (png := data.thumbnail(at)) is not None]  # fmt: skip
    return {**about, "majority": majority, "samples": samples}


def _confusion(labels: Tensor, predictions: Tensor, classes: int) -> list[list[int]]:
    counts: list[list[int]] = (
        torch.bincount(labels * classes + predictions, minlength=classes**2).reshape(classes, classes).tolist()
    )
    return counts
