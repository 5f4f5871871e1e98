"""Load what `polymix train` saved, and measure it on other data."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from polymix._io import RESULTS, Results, check_folder, one_line, write_whole
from polymix.errors import DataError, OptionError, ResultsError
from polymix.tasks.initial import WEIGHTS
from polymix.tasks.learner import resting
from polymix.tasks.processes import Process
from polymix.tasks.recipe import TaskRecipe, recipe_of
from polymix.tasks.report import SCHEMA
from polymix.tasks.runner import Task, check_recipe, silent

PREDICTIONS = "predictions.json"


class TrainResults(Results):
    """results.json of `polymix train`."""

    schema, command = SCHEMA, "polymix train"


@dataclass(frozen=True)
class SavedRun:
    """A finished run of one of polymix's own tasks: its recipe, and what results.json keeps of its data."""

    folder: Path
    task: Task
    recipe: TaskRecipe
    summary: Mapping[str, Any]

    @staticmethod
    def of(folder: str | Path) -> SavedRun:
        """The run in a folder. Raises ResultsError: it is not finished, or its results.json cannot be read."""
        folder = Path(folder)
        content = TrainResults.load(folder / RESULTS)
        if content.get("task") == "images" and "rows" not in content:  # from before images were called classify
            content["task"] = "classify"
        if not content.get("finished"):
            cure = "Continue it with polymix train … --resume."
            raise ResultsError("folder", f"{folder}, whose training is not finished", "a finished training", cure)
        try:
            recipe = recipe_of(str(content["task"]), content["settings"], folder / RESULTS)
        except (KeyError, AttributeError, TypeError) as error:
            got = f"{folder / RESULTS}, which cannot be read ({one_line(error)})"
            raise ResultsError("folder", got, f"{RESULTS} of polymix train", "") from error
        return SavedRun(folder, Task.of(recipe), recipe, content.get("data") or {})

    def changed(self, words: Sequence[str]) -> SavedRun:
        """This run with other options for its use, such as ["beam=50"].

        Raises OptionError for one that the model was trained with, or a value out of range.
        """
        for word in words:
            name = word.partition("=")[0]
            if name not in self.recipe.after_training:
                usable = ", ".join(self.recipe.after_training) or "none for this task"
                raise OptionError("--set", word, f"an option of the model's use: {usable}", "Leave it out.")
        recipe = self.recipe.changed(words) if words else self.recipe
        check_recipe(recipe)
        return replace(self, recipe=recipe)

    def predict(
        self, files: Sequence[str | Path], out: str | Path, *, device: str = "cpu", say: Callable[[str], None] = silent
    ) -> list[dict[str, Any]]:
        """What the model says of each file. `out` gets annotated pictures and predictions.json with the same rows.

        Raises:
            OptionError: the task cannot predict files. DataError: a file does not exist or cannot be read.
        """
        if self.task.value("metrics", "predict", None) is None:
            got = f"a model of the task {self.task.name}"
            raise OptionError("folder", got, "a model of a task that can predict files", "Load it from Python.")
        paths = [Path(name) for name in files]
        for path in paths:
            if not path.exists():
                raise DataError("files", f"{path}, which does not exist", "existing files", "Check the path.")
        folder = check_folder(out, "out")
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory() as scratch:
            data = self._data(Path(scratch))
            model = self._filled(data).to(device)
            with resting(model):
                process = Process(torch.device(device))
                rows = self.task.metrics.predict(model, data, self.recipe, paths, folder, process)
        content = {"schema": "polymix.predict/1", "task": self.task.name, "model": str(self.folder), "results": rows}
        write_whole(folder / PREDICTIONS, json.dumps(content, indent=1, allow_nan=False) + "\n")
        say(f"{len(rows)} predictions: {folder / PREDICTIONS}")
        return list(rows)

    def _data(self, scratch: Path) -> Any:
        """Data with what `build` and `predict` need: from results.json, or else loaded anew."""
        data = self.task.call("data", "from_summary", self.recipe, self.summary)
        return self.task.data.load(self.recipe, scratch, silent) if data is None else data

    def load(self) -> nn.Module:
        """The trained model, in evaluation mode, on the CPU."""
        with TemporaryDirectory() as scratch:
            return self._filled(self._data(Path(scratch)))

    def measure(
        self, data: str | None = None, *, whole: bool = False, limit: int | None = None, batch: int | None = None,
        device: str = "cpu", say: Callable[[str], None] = silent, layout: str | None = None,
        prepare: Callable[[nn.Module], nn.Module] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """The task's measurements of the model.

        Args:
            data: as --data of the training; None: the training's own, of which the held-out part is measured.
            whole: measure all of the data, not its held-out part.
            limit: samples to measure at most.
            batch: samples at once; None: as in the training.
            layout: of `data`; None: the training's, or recognised by its files.
            prepare: changes the model before it is measured, or returns another.
        Returns:
            "metrics", numbers by name, and what else the task's `details` returns.
        """
        changes: dict[str, Any] = {} if batch is None else {"batch_size": batch, "accumulate": 1}
        recipe = replace(self.recipe, **changes, data=self.recipe.data if data is None else data)
        if layout is not None:
            recipe = replace(recipe, layout=layout)
            check_recipe(recipe)
        process = Process(torch.device(device))
        chosen = self.task.call("data", "for_evaluation", recipe, self.summary, whole, limit, say)
        if chosen is None and (whole or limit is not None):
            option = "--split" if whole else "--limit"
            got = f"{'all' if whole else limit} for the task {self.task.name}"
            raise OptionError(option, got, "no such option for this task", "Leave it out.")
        with TemporaryDirectory() as scratch:
            chosen = self.task.data.load(recipe, Path(scratch), say) if chosen is None else chosen
            model = self._filled(chosen).to(device)
            model = model if prepare is None else prepare(model)
            with resting(model):
                found = self.task.call("metrics", "details", model, chosen, recipe, process)
                return found or {"metrics": self.task.metrics.measure(model, chosen, recipe, process)}

    def _filled(self, data: Any) -> nn.Module:
        path = self.folder / WEIGHTS
        model: nn.Module = self.task.model.build(self.recipe, data)
        try:
            model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        except Exception as error:  # whatever torch.load raises on a damaged file
            got = f"{path}, which cannot be read ({one_line(error)[:200]})"
            raise ResultsError("folder", got, "the weights of this run", "Train it again.") from error
        return model.eval()


def is_run(folder: Path) -> bool:
    """Whether `polymix train` wrote this folder, by the schema in its results.json."""
    try:
        content = json.loads((folder / RESULTS).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.get("schema") == SCHEMA
