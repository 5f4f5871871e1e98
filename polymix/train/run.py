"""One training run of any domain, from its recipe to the folder with the model, the measurements and the report."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import nn

from polymix.devices import processes
from polymix.errors import OptionError, PolymixError
from polymix.files import check_folder, output_folder, remove_unfinished
from polymix.train.data.sampling import isolated_random_state, number, seed_all
from polymix.train.evaluation import evaluating
from polymix.train.initial import load_weights
from polymix.train.loggers import check_logger, log, logging_to
from polymix.train.loop import Trained, Watch, fit
from polymix.train.place import Place, check_batch, check_place, first_of_all
from polymix.train.recipe import CONTROL, Recipe
from polymix.train.registry import task_class
from polymix.train.report import (
    Journal,
    add_control,
    finished_rows,
    finite,
    measured,
    metric_of,
    write_report,
    write_results,
)
from polymix.train.resume import LAST_CHECKPOINT, check_same_run, checkpoint_to_resume
from polymix.train.rows import make_row, measure_speed
from polymix.train.task import Data, Say, Task, silent

CONTROL_FOLDER = "control"


def train(
    recipe: Recipe, out: str | Path, *, resume: bool = False, say: Say = silent,
    data_folder: str | Path | None = None, data: Data | None = None,
    on_step: Callable[[int], None] = lambda step: None,
) -> dict[str, Any]:  # fmt: skip
    """Train a model by its recipe and leave it in the folder `out`. Returns the last value of every measurement.

    The folder also gets results.json, report.html and report.md with pictures, metrics.jsonl, and
    checkpoint/last.ckpt, from which `resume` continues to the same result, also on another number of processes. Where
    `recipe.wants_control`, linear_floor is then trained by the same recipe in out/control, and becomes the second row
    of results.json. Under torchrun every process calls this.

    Args:
        data_folder: where prepared and synthetic data are kept; None: out/data.
        data: what the recipe's task loaded before, also for another mixer; None: they are loaded now.
        on_step: called with the number of steps that are done.

    Raises:
        OptionError, DataError, ResultsError: before anything is trained. OptionError later if the loss becomes NaN or
            infinite; the last checkpoint is from before.
    """
    task = check_recipe(recipe, say)
    with output_folder(out, "out") as folder:
        data_place = None if data_folder is None else Path(data_folder)
        return _with_control(task, folder, resume, data_place, data, on_step)


def _with_control(
    task: Task[Any, Any], out: Path, resume: bool, data_folder: Path | None, data: Data | None,
    on_step: Callable[[int], None],
) -> dict[str, Any]:  # fmt: skip
    """The model, and where the recipe wants it the control."""
    recipe, say = task.recipe, task.say
    if not recipe.wants_control:
        return _train(task, out, resume, data_folder, data, on_step)[0].latest()
    below = out / CONTROL_FOLDER
    control_task = _control_of(recipe, say)
    if control_task is None:
        alone = check_recipe(recipe.changed(control=False), say)
        return _train(alone, out, resume, data_folder, data, on_step)[0].latest()
    # What is wrong with its folder is said before the first of the two trainings.
    checkpoint_to_resume(check_folder(below, "out"), resume, _decisive(control_task.recipe), mmap=True)
    journal, data = _train(task, out, resume, data_folder, data, on_step)
    say = say if processes()[0] == 0 else silent
    say(f"The control: {CONTROL}, which mixes nothing between tokens")
    _train(control_task, below, resume, data_folder, data, on_step)
    if processes()[0] == 0:
        say(add_control(out, below))
    return journal.latest()


def _decisive(recipe: Recipe) -> dict[str, Any]:
    """The options that a resumed run must not change, before its data are known."""
    settings = recipe.decisive()
    if recipe.epochs is not None:
        del settings["steps"]  # which the data decide
    return settings


def _control_of(recipe: Recipe, say: Say) -> Task[Any, Any] | None:
    """The control's task; None, with a line that says so, where the host cannot have an unasked one."""
    try:
        return check_recipe(recipe.for_control(), say)
    except PolymixError as error:
        if recipe.control:
            got = f"True, where linear_floor cannot be trained ({error})"
            raise OptionError("control", got, "False", "Leave it out.") from error
        say(f"No control is trained: {error}")
        return None


def check_recipe(recipe: Recipe, say: Say = silent, *, batches: bool = True) -> Task[Any, Any]:
    """The recipe's task. Raises what is wrong with the recipe, its processes or its logger, before any work.

    batches: whether the processes share batches, which they must divide then.
    """
    kind: type[Task[Any, Any]] = task_class(recipe)
    task = kind(recipe, say)
    check_place(recipe)
    if batches:
        check_batch(recipe)
    if recipe.sequence_parallel > 1 and kind.splits is None:
        got, cure = f"{recipe.sequence_parallel} for the domain {task.name}", "Let the processes share the batch."
        raise OptionError("sequence_parallel", got, "1: its model has no sequence that processes can share", cure)
    check_logger(recipe)
    if recipe.layout is not None:
        if recipe.source is None:
            raise OptionError("layout", repr(recipe.layout), "a folder in --data", "The default data has one layout.")
        if recipe.layout not in task.layouts:
            allowed = ", ".join(task.layouts) or "None: this domain has one layout"
            raise OptionError("layout", repr(recipe.layout), allowed, "Choose one of these.")
    for name in recipe.of_default if recipe.source is not None else ():
        if getattr(recipe, name) != type(recipe).model_fields[name].default:
            raise OptionError(name, f"{getattr(recipe, name)!r} with data", "it without data", "Leave it out.")
    if recipe.init is not None:
        task.check_weights(Path(recipe.init))
    if recipe.keep == "best" and kind.validation is Task.validation:
        raise OptionError("keep", "'best'", f"'last': {task.name} has no validation part", "Leave it out.")
    task.check()
    return task


def check_data(recipe: Recipe, say: Say = silent) -> list[str]:
    """All problems of the data `recipe.source`, in sentences. Raises OptionError where there is nothing to check.

    say: is told of what is no problem, but could be meant otherwise.
    """
    task = check_recipe(recipe, say)
    if recipe.source is None:
        raise OptionError("data", None, "a folder or file", "Name the data to check.")
    return list(task.problems(recipe.source))


def _train(
    task: Task[Any, Any], out: Path, resume: bool, data_folder: Path | None, data: Data | None,
    on_step: Callable[[int], None],
) -> tuple[Journal, Data]:  # fmt: skip
    """One model, trained, measured and saved in `out`; and the data, which its control gets too."""
    rank, _ = processes()
    recipe, last = task.recipe, out / LAST_CHECKPOINT
    task.say = say = task.say if rank == 0 else silent
    settings = _decisive(recipe)
    before = checkpoint_to_resume(out, resume, settings)  # first: loading may overwrite its data
    data = first_of_all(lambda: task.load(data_folder or out / "data")) if data is None else data
    with isolated_random_state():
        seed_all(number(recipe.seed, "weights"))
        model = task.build(data)
        _save_memory(recipe, model)
        settings |= {f"model.{name}": value for name, value in task.settings(model).items()}
        done = 0 if before is None else int(before["step"])
        if recipe.init is not None and not done:
            load_weights(model, recipe.init, task.fresh, say, task.read_weights(Path(recipe.init)))
        task.recipe = recipe = recipe.for_data(task.epoch(data, 1))
        settings |= {"data": data.fingerprint(), "steps": recipe.steps}
        settings = json.loads(json.dumps(settings, default=str))
        if before is not None:
            check_same_run(last, before["settings"], settings)
        elif resume:
            say(f"No checkpoint in {out}: starting a new run")
        if resume and rank == 0:
            remove_unfinished(out)
        path, writes = out / "metrics.jsonl", rank == 0
        journal = first_of_all(lambda: Journal(path, done, say, writes, task.metrics))
        results = {"task": task.name, "settings": recipe.to_dict(), "parameters": count(model), "data": data.summary()}
        say(f"{count(model):,} parameters, {recipe.steps:,} steps from {done:,}")
        earlier = finished_rows(out) if done >= recipe.steps else []
        place = Place(recipe)
        with logging_to(recipe, out, done, journal.rows()) if rank == 0 else nullcontext() as logger:

            def note(row: Mapping[str, Any]) -> None:
                journal(row)
                log(logger, row)
                if rank == 0 and "loss" not in row:
                    write_results(out, {**results, "rows": []}, journal.rows(), finished=False)

            watch = Watch(note, lambda step, numbers: on_step(step))
            trained = fit(task, data, model, place, watch, settings=settings, checkpoint=last, before=before)
        if rank == 0:
            final = task.build(data)
            _save_memory(recipe, final)  # a step of it is measured
            final.load_state_dict(trained.weights)
            _finish(task, data, final, place, trained, out, results, journal, earlier)
    return journal, data


def _finish(
    task: Task[Any, Any], data: Any, final: nn.Module, place: Place, trained: Trained, out: Path,
    results: dict[str, Any], journal: Journal, earlier: Sequence[Mapping[str, Any]],
) -> None:  # fmt: skip
    """Save the model, draw, and write the row, the results and the report."""
    task.save(final, data, out)
    with evaluating(final):
        pictures = task.draw(final, data, out)
    results["about"] = {"describe": task.describe(data), "usage": task.usage(data, out),
                        "next": task.next_commands(data, out)}  # fmt: skip
    results["pictures"] = [picture.name for picture in pictures]
    results["rows"] = list(earlier[:1]) or [_row(task, final.to(place.device), place, trained, journal)]
    write_results(out, results, journal.rows(), finished=not task.recipe.wants_control)
    task.say(f"Model: {out}   Report: {write_report(out, results, journal.rows())}")


def _row(task: Task[Any, Any], final: nn.Module, place: Place, trained: Trained, journal: Journal) -> dict[str, Any]:
    """The row of results.json about a trained model."""
    names, rows = measured(journal.rows())
    metrics = {name: finite(rows[-1].get(name)) for name in names} if rows else {}
    kinds = {name: metric_of(task, name) for name in metrics}
    speeds = [row[key] for row in journal.rows() for key in row if key == f"{task.unit}_per_second"]
    speed = {"training_per_second": statistics.median(speeds) if speeds else None}
    speed |= measure_speed(task, final, place, trained.last_batch)
    return make_row(task, final, metrics, kinds, speed)


def count(model: nn.Module) -> int:
    """The parameters of a model."""
    return sum(parameter.numel() for parameter in model.parameters())


def _save_memory(recipe: Recipe, model: Any) -> None:
    """Make a model compute its blocks again in the backward pass. Raises OptionError where it cannot."""
    if not recipe.checkpointing:
        return
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")  # ours; transformers'
    enable: Callable[..., None] | None = next((getattr(model, name) for name in names if hasattr(model, name)), None)
    if enable is None:
        got = f"True for a {type(model).__name__}"
        raise OptionError("checkpointing", got, "False", "This model cannot compute its blocks again.")
    enable({"use_reentrant": False})
