"""Load what `polymix train` saved, and measure it on other data."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypedDict

import torch
from torch import nn

from polymix.convert.saving.files import WEIGHTS as SAFE_WEIGHTS
from polymix.devices import check_all_share, processes
from polymix.errors import DataError, OptionError, PolymixError, ResultsError, one_line, reason_of
from polymix.files import output_folder, write_whole
from polymix.numbers import plural
from polymix.results import RESULTS, Results, schema_name, wrong_part
from polymix.train.evaluation import evaluating
from polymix.train.initial import WEIGHTS, check_header
from polymix.train.place import Place
from polymix.train.recipe import Recipe
from polymix.train.registry import domains, options_of, recipe_class
from polymix.train.report import SCHEMA
from polymix.train.rows import PredictContent, TrainContent
from polymix.train.run import check_recipe
from polymix.train.task import Process, Task, silent

PREDICTIONS = "predictions.json"
# Options of where and from what a model was trained, which say nothing of the machine that loads it.
PLACE: Mapping[str, Any] = {
    "init": None, "device": "cpu", "strategy": "auto", "sequence_parallel": 1, "precision": "float32", "logger": None,
}  # fmt: skip


class TrainResults(Results):
    """results.json of `polymix train`."""

    kind, command = TrainContent, "polymix train"


class _Summary(TypedDict, total=False):
    """What the data of several domains have in common."""

    name: str
    classes: list[str]


@dataclass(frozen=True)
class SavedRun:
    """A finished run of `polymix train`: its recipe, and what results.json keeps of its data."""

    folder: Path
    task: Task[Any, Any]
    summary: Mapping[str, Any]

    @property
    def recipe(self) -> Recipe:
        """The options of the training but for its place, and of the model's use."""
        recipe: Recipe = self.task.recipe
        return recipe

    @staticmethod
    def of(folder: str | Path) -> SavedRun:
        """The run in a folder; its control may still train.

        Raises ResultsError: its own training is not finished, or its results.json cannot be read.
        """
        folder = Path(folder)
        content = TrainResults.load(folder / RESULTS)
        if not (content.get("finished") or content.get("rows")):
            cure = "Continue it with polymix train … --resume."
            raise ResultsError("folder", f"{folder}, whose training is not finished", "a finished training", cure)
        try:
            if str(content["task"]) not in domains():
                got = f"{folder}, a run of the domain {content['task']}"
                cure = "Install the package that has it; a domain of a file needs an entry point for this."
                raise ResultsError("folder", got, "a run of a domain that is installed", cure)
            task = check_recipe(
                recipe_class(str(content["task"])).without_idle({**content["settings"], **PLACE}), batches=False
            )
        except (KeyError, AttributeError, TypeError) as error:
            got = f"{folder / RESULTS}, which cannot be read ({one_line(error)})"
            raise ResultsError("folder", got, f"{RESULTS} of polymix train", "") from error
        run = SavedRun(folder, task, content.get("data") or {})
        run._known()
        for name in (WEIGHTS, SAFE_WEIGHTS):
            check_header(folder / name, "folder")
        return run

    def changed(self, words: Sequence[str]) -> SavedRun:
        """This run with other options for `predict`, such as ["beam=50"].

        Raises OptionError for one that the model was trained with, or a value out of range.
        """
        options = self._options(words, (*self.recipe.after_training, *self.recipe.in_pictures))
        return replace(self, task=check_recipe(self.recipe.after(options), batches=False)) if options else self

    def _options(self, words: Sequence[str], usable: Sequence[str], **flags: Any) -> dict[str, Any]:
        """Options from words such as "beam=50", each one of `usable`, and from flags."""
        for word in words:
            if word.partition("=")[0].replace("-", "_") not in usable:
                kind = f"a model of {self.task.name}"
                allowed = f"one of the options {', '.join(usable)}" if usable else f"none, as {kind} has no such option"
                raise OptionError("--set", f"{word} for {kind}", allowed, "Leave it out.")
        return options_of(words, flags)

    def predict(
        self, files: Sequence[str | Path], out: str | Path, *, device: str = "cpu", say: Callable[[str], None] = silent,
        sequence_parallel: int = 1,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """What the model says of each file. `out` gets annotated pictures and predictions.json with the same rows.

        sequence_parallel: how many processes share each sequence: all that torchrun has started, which call this alike.
        Raises:
            OptionError: the task cannot predict files, or share sequences. DataError: a file does not exist or cannot
                be read.
        """
        if not self.task.predicts:
            got = f"a model of the task {self.task.name}"
            raise OptionError("folder", got, "a model of a task that can predict files", "Load it from Python.")
        paths = [Path(name) for name in files]
        for path in paths:
            if not path.exists():
                raise DataError("files", f"{path}, which does not exist", "a file or folder", "Check the path.")
        rank, world = processes()[0], check_all_share(sequence_parallel)
        task, say = self.task, say if rank == 0 else silent
        if world > 1:
            task = check_recipe(self.recipe.changed(device=device, sequence_parallel=world), batches=False)
        task.say = say
        with TemporaryDirectory() as scratch, output_folder(out if rank == 0 else f"{scratch}/out", "out") as folder:
            folder.mkdir(exist_ok=True)  # of a process that is not the first, whose files nobody reads
            data = self._data(Path(scratch))
            model = self._filled(data).to(device)
            Place(task.recipe).split(task, model)
            with evaluating(model):
                rows = task.predict(model, data, paths, folder, Process(torch.device(device)))
            about = {"schema": schema_name(PredictContent), "task": self.task.name, "model": str(self.folder)}
            content = {**about, "results": rows}
            write_whole(folder / PREDICTIONS, json.dumps(content, indent=1, allow_nan=False) + "\n")
        say(f"{plural(len(rows), 'prediction')}: {folder / PREDICTIONS}")
        return list(rows)

    def _data(self, scratch: Path) -> Any:
        """Data with what `build` and `predict` need: from results.json, or else loaded anew."""
        data = self._known()
        return self.task.load(scratch) if data is None else data

    def _known(self) -> Any:
        """The data as results.json describes them; None where `load` is needed. Raises ResultsError."""
        try:
            if wrong := wrong_part(self.summary, _Summary, "data"):
                raise ValueError(wrong)
            return self.task.from_summary(self.summary)
        except PolymixError:
            raise
        except Exception as error:  # whatever a missing key or another type raises
            got = f"{self.folder / RESULTS}, whose data cannot be used ({one_line(error)[:200]})"
            raise ResultsError("folder", got, f"{RESULTS} of polymix train", "Train it again.") from error

    def load(self) -> nn.Module:
        """The trained model, in evaluation mode, on the CPU."""
        with TemporaryDirectory() as scratch:
            return self._filled(self._data(Path(scratch)))

    def measure(
        self, data: str | None = None, *, whole: bool = False, limit: int | None = None, batch: int | None = None,
        device: str = "cpu", say: Callable[[str], None] = silent, layout: str | None = None,
        prepare: Callable[[nn.Module], nn.Module] | None = None, length: int | None = None, options: Sequence[str] = (),
    ) -> dict[str, Any]:  # fmt: skip
        """The task's measurements of the model.

        Args:
            data: as --data of the training; None: the training's own, of which the held-out part is measured.
            whole: measure all of the data, not its held-out part.
            limit: samples to measure at most.
            batch: samples at once; None: as in the training.
            layout: of `data`; None: recognised by its files.
            prepare: changes the model before it is measured, or returns another.
            length: of a sequence, where the recipe has an option for it; None: as in the training.
            options: others of the model's use or of the data, such as ["annotations=other.json", "images=other"].
        Returns:
            "metrics", numbers by name, and what else the task's `details` returns.
        """
        recipe = self.recipe
        usable = (*recipe.sources, *recipe.fits_source, *recipe.of_default, *recipe.reading, *recipe.after_training)
        changes = self._options(options, usable, data=data, layout=layout)
        changes |= {} if batch is None else {"batch_size": batch, "accumulate": 1}
        if length is not None and self.recipe.sequence_option is None:
            allowed = f"none: {self.task.name} has no length to choose"
            raise OptionError("--tokens", length, allowed, "Leave it out.")
        changes |= {} if length is None else {str(self.recipe.sequence_option): length}
        task = check_recipe(recipe.after(changes), say) if changes else self.task
        task.say, task.folder = say, self.folder
        process = Process(torch.device(device))
        known = self._known()
        model = None if known is None else self._filled(known)  # first: reading the data may take long
        chosen = task.for_evaluation(self.summary, whole, limit)
        if chosen is None and (whole or limit is not None):
            option = "--split" if whole else "--limit"
            got, allowed = "all" if whole else limit, f"none: {task.name} is measured on its whole held-out part alone"
            raise OptionError(option, got, allowed, "Leave it out.")
        with TemporaryDirectory() as scratch:
            if chosen is None:
                chosen = task.load(Path(scratch))
                task.check_like_training(chosen, self.summary)
            model = (self._filled(chosen) if model is None else model).to(device)
            model = model if prepare is None else prepare(model)
            with evaluating(model):
                return task.details(model, chosen, process)

    def _filled(self, data: Any) -> nn.Module:
        try:
            return self.task.restore(data, self.folder).eval()
        except PolymixError:
            raise
        except Exception as error:  # whatever a damaged file raises
            got = f"{self.folder / WEIGHTS}, which cannot be read ({reason_of(error)[:200]})"
            raise ResultsError("folder", got, "the weights of this run", "Train it again.") from error


def is_run(folder: Path) -> bool:
    """Whether `polymix train` wrote this folder, by the schema in its results.json."""
    try:
        content = json.loads((folder / RESULTS).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.get("schema") == SCHEMA
