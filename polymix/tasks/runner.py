"""One training run of any task, from its recipe to the folder with the model, the measurements and the report.

A task is a package of five files, found beside the class of its recipe:

- recipe.py   a frozen dataclass that extends `TaskRecipe`, with an option `mixer`, and `presets` ("tiny", "paper").
- data.py     load(recipe, folder, say) -> data. `data.train` is a data set with a length; `folder` is for what is worth
              keeping, such as tokens and made data. Optional: LAYOUTS, the names of the arrangements of files that it
              reads, the usual one first; check(folder, layout, **recipe.check_options()) -> list of problems, each a
              sentence that names file and entry, from the code that `load` reads by; made(folder, seed=0, …), which
              writes the default data in one of the layouts, where `load` then reads it. data.collate, which joins
              samples to a batch, and data.fingerprint(), which tells contents apart where a checksum of some samples
              does not. For `polymix evaluate` and `polymix predict`: data.summary(), which results.json keeps;
              for_evaluation(recipe, summary, whole, limit, say) -> data with what to measure; and from_summary(recipe,
              summary) -> data with what `build` and `predict` need. For keep="best": validation(recipe, data) -> data
              whose held-out part is the one to choose by.
- model.py    build(recipe, data) -> nn.Module. Optional: check(recipe), settings(model), save(model, data, folder),
              host_name(recipe), HEADS, prefixes of the weights that --init may leave fresh, usage(recipe, data,
              folder), Python lines for the report, and next_commands(recipe, data, folder), pairs of a reason and a
              command.
- learner.py  Learner, a subclass of `polymix.tasks.learner.Learner` with loss(batch). Optional: its methods
              infer(batch), the forward pass that is timed, size(batch), and optimizers_and_schedule(), for another
              optimizer than AdamW.
- metrics.py  measure(model, data, recipe, process) -> {name: number} on held-out data; the first name is the headline.
              Optional: DIRECTIONS, {name: "up" or "down"}; paper(recipe), the paper's metrics for this mixer and their
              "source", or None; samples(model, data, recipe, process) -> texts, draw(model, data, recipe, folder) ->
              pictures, the predictions beside the truth first; describe(recipe, data), a sentence for the report;
              details(model, data, recipe, process) -> more measurements for `polymix evaluate`; and predict(model,
              data, recipe, files, folder, process) -> a dict for each file, which has its "file" and its "picture" in
              `folder`, for `polymix predict`.
"""

from __future__ import annotations

import copy
import json
import math
import statistics
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from polymix._io import check_folder, remove_unfinished, write_whole
from polymix.errors import OptionError, ResultsError
from polymix.tasks.initial import check_weights, load_weights
from polymix.tasks.learner import Learner, resting
from polymix.tasks.loggers import check_logger, log, make_logger
from polymix.tasks.order import Seeded, number, seed_all
from polymix.tasks.processes import Process, check_processes, first_of_all, processes, spread
from polymix.tasks.recipe import CONTROL, TaskRecipe, load_recipe
from polymix.tasks.report import (
    VALIDATION,
    Journal,
    add_control,
    finished_rows,
    finite,
    measured,
    write_report,
    write_results,
)
from polymix.tasks.rows import UP, direction, make_row, measure_speed
from polymix.tasks.trainer import ModelCheckpoint, fit, isolate_rng, quiet, read_checkpoint

REQUIRED = {"data": "load", "model": "build", "learner": "Learner", "metrics": "measure"}
CONTROL_FOLDER = "control"
Say = Callable[[str], None]


def silent(text: str) -> None:
    """Says nothing."""


@dataclass(frozen=True)
class Task:
    """The files of a task."""

    name: str
    data: ModuleType
    model: ModuleType
    learner: ModuleType
    metrics: ModuleType

    @staticmethod
    def of(recipe: TaskRecipe) -> Task:
        """The task whose recipe.py has the recipe's class. Raises OptionError if a file or its function is missing."""
        package, _, file = type(recipe).__module__.rpartition(".")
        if file != "recipe" or not package:
            got = f"a {type(recipe).__qualname__} of {type(recipe).__module__}"
            raise OptionError("recipe", got, "one whose class is in a task's recipe.py", "See CONTRIBUTING.md.")
        found: dict[str, ModuleType] = {}
        for name, function in REQUIRED.items():
            try:
                found[name] = import_module(f"{package}.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"{package}.{name}":
                    raise
                got = f"a task without {name}.py"
                raise OptionError("recipe", got, f"{package} with {', '.join(REQUIRED)}", "Add the file.") from error
            if not hasattr(found[name], function):
                got = f"{package}.{name} without {function}"
                raise OptionError("recipe", got, f"a {name}.py that has it", "See polymix/tasks/runner.py.")
        return Task(package.rpartition(".")[2], **found)

    def value(self, file: str, name: str, default: Any) -> Any:
        """What a file calls `name`; the default where it has no such thing."""
        return getattr(getattr(self, file), name, default)

    def call(self, file: str, function: str, *arguments: Any) -> Any:
        """What an optional function of a file returns; None where the file has none."""
        optional = getattr(getattr(self, file), function, None)
        return None if optional is None else optional(*arguments)


def train_file(
    path: str | Path, out: str | Path, *, data: str | None = None, options: Sequence[str] = (), resume: bool = False,
    threads: int | None = None, say: Say = silent, preset: str | None = None, mixer: str | None = None,
    **others: str | None,
) -> dict[str, Any]:  # fmt: skip
    """Train by the recipe of a domain or file, with options such as ["steps=200"]. See `train`, and `chosen_recipe`."""
    recipe = chosen_recipe(path, data=data, options=options, preset=preset, mixer=mixer, **others)
    if threads:
        torch.set_num_threads(threads)
    return train(recipe, out, resume=resume, say=say)


def chosen_recipe(
    path: str | Path, *, options: Sequence[str] = (), preset: str | None = None, mixer: str | None = None,
    **others: str | None,
) -> TaskRecipe:  # fmt: skip
    """The recipe of a domain or file as the command line changes it: the preset, then `options`, then the rest.

    Args:
        others: data, layout, plan and init; None: as the recipe has it.
    Raises:
        OptionError: the recipe, the preset or an option is unknown or out of range, or one is given twice.
    """
    given = {name: value for name, value in {**others, "mixer": mixer}.items() if value is not None}
    for word in options:
        name = word.partition("=")[0]
        if name in given:
            raise OptionError(name, f"both --{name} and --set {name}=", "one of the two", f"Leave --set {name}= out.")
    recipe = load_recipe(path)
    own: dict[str, Any] = {name: value for name, value in given.items() if name not in ("mixer", "plan")}
    recipe = recipe if preset is None else recipe.preset(preset)
    recipe = recipe.changed(options, own)  # all at once, because some need each other
    recipe = recipe if mixer is None else recipe.with_mixer(mixer)
    return recipe if given.get("plan") is None else recipe.with_options({"plan": given["plan"]})


def train(
    recipe: TaskRecipe, out: str | Path, *, resume: bool = False, say: Say = silent, data_folder: Path | None = None
) -> dict[str, Any]:
    """Train a model by its recipe and leave it in the folder `out`. Returns the last value of every measurement.

    The folder also gets results.json, report.html and report.md with pictures, metrics.jsonl, and
    checkpoint/last.ckpt, from which `resume` continues to the same result. Where `recipe.wants_control`, linear_floor
    is then trained by the same recipe in out/control, and becomes the second row of results.json. Under torchrun every
    process calls this. data_folder: where prepared and made data are kept; None: out/data.

    Raises:
        OptionError, DataError, ResultsError: before anything is trained. OptionError later if the loss becomes NaN or
            infinite; the last checkpoint is from before.
    """
    task, out = check_recipe(recipe), check_folder(out, "out")
    if not recipe.wants_control:
        return _train(task, recipe, out, resume, say, data_folder).latest()
    below = out / CONTROL_FOLDER
    if (below / "checkpoint" / "last.ckpt").exists() and not resume:
        raise ResultsError(
            "out", f"{below}, which has a checkpoint", "a folder without one", "Pass resume to continue."
        )
    control = replace(recipe.with_mixer(CONTROL), control=False, plan=None, init=None)
    check_recipe(control)
    latest = _train(task, recipe, out, resume, say, data_folder).latest()
    if processes()[0] == 0:
        say(f"The control: {CONTROL}, which mixes nothing between tokens")
    _train(task, control, below, resume, say, data_folder or out / "data")
    if processes()[0] == 0:
        say(add_control(out, below))
    return latest


def check_recipe(recipe: TaskRecipe) -> Task:
    """The recipe's task. Raises what is wrong with the recipe, its processes or its logger, before any work."""
    task = Task.of(recipe)
    check_processes(recipe)
    check_logger(recipe)
    layouts = task.value("data", "LAYOUTS", ())
    if recipe.layout is not None:
        if recipe.data is None:
            raise OptionError("layout", repr(recipe.layout), "a folder in --data", "The default data has one layout.")
        if recipe.layout not in layouts:
            allowed = ", ".join(layouts) or "None: this task has one layout"
            raise OptionError("layout", repr(recipe.layout), allowed, "Choose one of these.")
    if recipe.init is not None:
        check_weights(Path(recipe.init))
    if recipe.keep == "best" and task.value("data", "validation", None) is None:
        raise OptionError("keep", "'best'", f"'last': {task.name} has no validation part", "Leave it out.")
    task.call("model", "check", recipe)
    return task


def check_data(recipe: TaskRecipe) -> list[str]:
    """All problems of the data `recipe.source`, in sentences. Raises OptionError where there is nothing to check."""
    task = check_recipe(recipe)
    if recipe.source is None:
        raise OptionError("data", None, "a folder or file", "Name the data to check.")
    if task.value("data", "check", None) is None:
        raise OptionError(
            "check", f"the task {task.name}", "a task that can check data", "Training checks what it reads."
        )
    return list(task.data.check(recipe.source, recipe.layout, **recipe.check_options()))


def _train(
    task: Task, recipe: TaskRecipe, out: Path, resume: bool, say: Say, data_folder: Path | None = None
) -> Journal:
    """One model, trained, measured and saved in `out`."""
    rank, world = processes()
    say = say if rank == 0 else silent
    last = out / "checkpoint" / "last.ckpt"
    if last.exists() and not resume:
        raise ResultsError("out", f"{out}, which has a checkpoint", "a folder without one", "Pass resume to continue.")
    settings: dict[str, Any] = {**recipe.decisive(), "processes": world}
    if recipe.epochs is not None:
        del settings["steps"]  # which the data tells
    before: dict[str, Any] = {"polymix": settings, "global_step": 0}
    if last.exists():
        before = read_checkpoint(last, "polymix train", ("global_step",), mmap=True)
    _check(last, before["polymix"], settings)  # before its data can be overwritten
    data = first_of_all(lambda: task.data.load(recipe, data_folder or out / "data", say))
    with isolate_rng():
        seed_all(number(recipe.seed, "weights"))
        model: nn.Module = task.model.build(recipe, data)
        settings |= {f"model.{name}": value for name, value in (task.call("model", "settings", model) or {}).items()}
        done = int(before["global_step"])
        if recipe.init is not None and not done:
            load_weights(model, recipe.init, task.value("model", "HEADS", ()), say)
        learner: Learner = task.learner.Learner(model, recipe, data)
        recipe = learner.recipe = recipe.for_data(learner.epoch(1))
        settings |= {"data": fingerprint(data), "steps": recipe.steps}
        settings = json.loads(json.dumps(settings, default=str))
        if done:
            _check(last, before["polymix"], settings)
        elif resume:
            say(f"No checkpoint in {out}: starting a new run")
        if resume and rank == 0:
            remove_unfinished(out)
        journal = first_of_all(lambda: Journal(out / "metrics.jsonl", done, say, writes=rank == 0))
        learner.settings = settings
        learner.measure = lambda weights, process: _measure(task, weights, data, recipe, process, say)
        if recipe.keep == "best":
            part = task.data.validation(recipe, data)
            learner.validate = lambda weights, process: _validate(task, weights, part, recipe, process)
        results = {"task": task.name, "settings": recipe.to_dict(), "parameters": count(model)}
        if hasattr(data, "summary"):
            results["data"] = data.summary()
        logger = make_logger(recipe, out, done, journal.rows()) if rank == 0 else None

        def note(row: Mapping[str, Any]) -> None:
            journal(row)
            log(logger, row)
            if rank == 0 and "loss" not in row:
                write_results(out, {**results, "rows": []}, journal.rows(), finished=False)

        learner.note = note
        say(f"{count(model):,} parameters, {recipe.steps:,} steps from {done:,}")
        earlier = finished_rows(out) if done >= recipe.steps else []
        state = _fit(learner, last, done, logger)
        if rank == 0:
            best = "model." if learner.average is None else "average."
            final: nn.Module = task.model.build(recipe, data)
            final.load_state_dict({k.removeprefix(best): v for k, v in state.items() if k.startswith(best)})
            _save(task, final, data, out)
            with resting(final):
                pictures = task.call("metrics", "draw", final, data, recipe, out) or []
            about = {"describe": task.call("metrics", "describe", recipe, data),
                     "usage": task.call("model", "usage", recipe, data, out),
                     "next": task.call("model", "next_commands", recipe, data, out)}  # fmt: skip
            results["about"], results["pictures"] = about, [picture.name for picture in pictures]
            results["rows"] = earlier[:1] or [_row(task, learner, final, journal)]
            write_results(out, results, journal.rows(), finished=True)
            report = write_report(out, results, journal.rows())
            say(f"Model: {out}   Report: {report}")
    return journal


def _row(task: Task, learner: Learner, final: nn.Module, journal: Journal) -> dict[str, Any]:
    """The row of results.json about a trained model."""
    probe: Learner = task.learner.Learner(copy.deepcopy(final), replace(learner.recipe, ema=0.0), learner.data)
    probe.trainer = learner.trainer
    probe.to(learner.device)
    names, kept = measured(journal.rows())
    metrics = {name: finite(kept[-1].get(name)) for name in names} if kept else {}
    declared = task.value("metrics", "DIRECTIONS", {})
    directions = {name: direction(name.removeprefix(VALIDATION), declared) for name in metrics}
    speeds = [row[key] for row in journal.rows() for key in row if key == f"{learner.unit}_per_second"]
    speed = {"training_per_second": statistics.median(speeds) if speeds else None}
    speed |= measure_speed(probe, learner.last_batch)
    return make_row(task, learner.recipe, final, metrics, directions, speed)


def count(model: nn.Module) -> int:
    """The parameters of a model."""
    return sum(parameter.numel() for parameter in model.parameters())


def fingerprint(data: Any) -> Any:
    """Tells data of different content apart: what the data says of itself, or a checksum of 64 samples."""
    if hasattr(data, "fingerprint"):
        return data.fingerprint()
    length, crc = len(data.train), 0
    samples = Seeded(data.train, 0)
    for place in range(64):
        for part in tree_leaves(samples[place, length * place // 64]):
            crc = zlib.crc32(_as_bytes(part), crc)
    return [length, crc]


def _as_bytes(part: Any) -> bytes:
    """What a checksum sees of a part of a sample."""
    if isinstance(part, torch.Tensor):
        return repr(tuple(part.shape)).encode() + part.flatten().view(torch.uint8).numpy().tobytes()
    return repr(part).encode()


def _measure(task: Task, model: Any, data: Any, recipe: Any, process: Process, say: Say) -> dict[str, Any]:
    figures = task.metrics.measure(model, data, recipe, process)
    texts = task.call("metrics", "samples", model, data, recipe, process)
    if texts is None:
        return figures
    for text in texts if process.rank == 0 else ():
        say(f"  {text!r}")
    return {**figures, "samples": texts}


def _validate(task: Task, model: Any, part: Any, recipe: Any, process: Process) -> tuple[dict[str, Any], float]:
    """The measurements on the validation part, and the headline as a score, of which more is better."""
    figures = task.metrics.measure(model, part, recipe, process)
    name, value = next(iter(figures.items()))
    sign = 1 if direction(name, task.value("metrics", "DIRECTIONS", {})) == UP else -1
    score = sign * value if value is not None and math.isfinite(value) else -math.inf
    return {f"{VALIDATION}{name}": value for name, value in figures.items()}, score


def _fit(learner: Learner, last: Path, done: int, logger: Any) -> dict[str, Any]:
    """Train from the start or from the last checkpoint; in the first process, the whole state of the learner."""
    recipe = learner.recipe
    saving = ModelCheckpoint(
        last.parent, filename=last.stem, every_n_train_steps=recipe.checkpoint_every, enable_version_counter=False
    )
    trainer = fit(
        learner, steps=recipe.steps, where=spread(recipe), precision=recipe.precision, accumulate=recipe.accumulate,
        saving=saving, resume=last if done else None, logger=logger,
    )  # fmt: skip
    with quiet():
        if done < recipe.steps and recipe.steps % recipe.checkpoint_every:
            trainer.save_checkpoint(last)
        return trainer.strategy.lightning_module_state_dict()


def _save(task: Task, model: nn.Module, data: Any, out: Path) -> None:
    """As the task saves its models, or else as model.pt, a state dict."""
    if hasattr(task.model, "save"):
        task.model.save(model, data, out)
    else:
        write_whole(out / "model.pt", lambda path: torch.save(model.state_dict(), path))


def _check(path: Path, theirs: dict[str, Any], settings: dict[str, Any]) -> None:
    """ResultsError unless a checkpoint is of a run with the same settings."""
    for key, value in settings.items():
        if theirs.get(key) != value:
            cure = "Continue with the settings that it began with, or choose another out."
            if key == "data":
                raise ResultsError("resume", f"{path}, of a run on other data", "the same data", cure)
            raise ResultsError("resume", f"{path}, of a run with {key}={theirs.get(key)}", f"{key}={value}", cure)
