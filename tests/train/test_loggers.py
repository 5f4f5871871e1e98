"""Loggers of `polymix train`: every row of metrics.jsonl, once, also where a run is continued."""

import csv
import errno
import json
import sys
from types import SimpleNamespace

import pytest

from polymix.domains.classify.recipe import ClassifyRecipe
from polymix.errors import MissingExtraError, OptionError
from polymix.train import loggers
from polymix.train.run import train
from tests.attacks.test_full_disk import REASON, limited

TINY = {"steps": 6, "log_every": 2, "evaluate_every": 3, "checkpoint_every": 3, "dim": 8, "depth": 1,
        "image_size": 8, "batch_size": 32}  # fmt: skip


def numbers(row):
    return {key: value for key, value in row.items() if key != "step" and not isinstance(value, (str, list))}


def rows(out):
    """(step, name, value) of every number in metrics.jsonl."""
    journal = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], name, value) for row in journal for name, value in numbers(row).items()]


def test_csv(tmp_path):
    train(ClassifyRecipe(logger="csv", **TINY), tmp_path)
    with (tmp_path / "logs" / "metrics.csv").open() as file:
        values = [(int(row["step"]), name, float(value)) for row in csv.DictReader(file)
                 for name, value in row.items() if value and name != "step"]  # fmt: skip
    assert sorted(values) == sorted(rows(tmp_path)) and values


def test_without_a_logger_there_is_no_folder(tmp_path):
    train(ClassifyRecipe(**TINY), tmp_path)
    assert not (tmp_path / "logs").exists()


class Killed(Exception):
    pass


def interrupted(out, monkeypatch, logger):
    """A run that dies at step 5, after a checkpoint at 3 and rows for 4, and is continued."""
    recipe, log = ClassifyRecipe(logger=logger, **TINY), loggers.log

    def dies(target, row):
        log(target, row)
        if row["step"] > 3:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("polymix.train.run.log", dies)
        with pytest.raises(Killed):
            train(recipe, out)
    train(recipe, out, resume=True)


def test_csv_of_a_continued_run_has_every_row_once(tmp_path, monkeypatch):
    interrupted(tmp_path, monkeypatch, "csv")
    with (tmp_path / "logs" / "metrics.csv").open() as file:
        steps = [int(row["step"]) for row in csv.DictReader(file)]
    assert steps == [1, 2, 3, 3, 4, 5, 6, 6]


def test_tensorboard_has_the_rows_and_hides_those_of_the_killed_run(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard", reason="untested: TensorBoard (the tensorboard extra)")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    interrupted(tmp_path, monkeypatch, "tensorboard")
    events = EventAccumulator(str(tmp_path / "logs"))
    events.Reload()
    scalars = [(event.step, tag, event.value) for tag in events.Tags()["scalars"] for event in events.Scalars(tag)]
    expected = rows(tmp_path)
    assert sorted((step, tag) for step, tag, _ in scalars) == sorted((step, tag) for step, tag, _ in expected)
    values = {(step, tag): value for step, tag, value in expected}
    assert all(value == pytest.approx(values[step, tag], rel=1e-6) for step, tag, value in scalars)


def log_for_long(folder):
    recipe = ClassifyRecipe(logger="tensorboard", **TINY)
    with pytest.raises(OSError, match=REASON) as info, loggers.logging_to(recipe, folder, 0, ()) as logger:
        any(loggers.log(logger, {"step": step, "loss": 1.0}) for step in range(100))
    assert info.value.filename == str(folder / "logs")


def test_a_full_disk_ends_tensorboard_with_one_error_of_its_folder(tmp_path):
    """Its thread used to print a traceback of its own, and the error named no path."""
    pytest.importorskip("tensorboard", reason="untested: TensorBoard (the tensorboard extra)")
    assert limited(3000, log_for_long, tmp_path) == (0, "")


@pytest.mark.parametrize("name", ["csv", "tensorboard"])
def test_a_folder_that_cannot_be_is_named(tmp_path, name):
    (tmp_path / "logs").write_text("a file")
    with pytest.raises(OSError) as info, loggers.logging_to(ClassifyRecipe(logger=name, **TINY), tmp_path, 0, ()):
        pass
    assert info.value.filename == str(tmp_path / "logs")


class Run:
    """Stands in for a run of wandb."""

    def __init__(self, **options):
        self.options, self.rows, self.ends = options, [], []

    def log(self, numbers, step):
        if self.ends:
            raise Refused("the run has finished")
        self.rows.append((step, numbers))

    def finish(self, exit_code):
        self.ends.append(exit_code)


class Refused(Exception):
    pass


@pytest.fixture
def runs(monkeypatch):
    """The runs of a stand-in for wandb, which has one at a time."""
    begun = []

    def init(**options):
        if begun and not begun[-1].ends:
            return begun[-1]
        begun.append(Run(**options))
        return begun[-1]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Error=Refused))
    monkeypatch.setattr("polymix.train.run.check_logger", lambda recipe: None)
    return begun


def test_wandb_goes_on_with_the_run_that_it_began(tmp_path, runs):
    recipe = ClassifyRecipe(logger="wandb", **TINY)
    with loggers.logging_to(recipe, tmp_path, 0, ()) as first:
        loggers.log(first, {"step": 2, "loss": 1.5, "samples": ["a"]})
    for done in (3, 0):
        with loggers.logging_to(recipe, tmp_path, done, ()):
            pass
    began, went_on, anew = runs
    assert began.rows == [(2, {"loss": 1.5, "step": 2})] and began.options["config"]["mixer"] == "pom"
    assert began.options["id"] == went_on.options["id"] != anew.options["id"] and went_on.options["resume"] == "allow"
    assert began.options["dir"] == str(tmp_path / "logs") and (tmp_path / "logs").is_dir()


def test_the_control_has_a_run_of_its_own(tmp_path, runs):
    """Its rows used to go to the first run, which wandb returns as long as it is not finished."""
    train(ClassifyRecipe(logger="wandb", control=True, **TINY), tmp_path)
    assert [run.options["config"]["mixer"] for run in runs] == ["pom", "linear_floor"]
    assert [[step for step, _ in run.rows] for run in runs] == [[1, 2, 3, 3, 4, 5, 6, 6]] * 2
    assert [run.ends for run in runs] == [[0], [0]]


def test_what_wandb_refuses_is_one_line_and_a_run_that_fails_says_so(tmp_path, runs, monkeypatch):
    recipe = ClassifyRecipe(logger="wandb", **TINY)
    with pytest.raises(Killed), loggers.logging_to(recipe, tmp_path, 0, ()):
        raise Killed
    assert runs[0].ends == [1]
    with (
        pytest.raises(OptionError, match="the run has finished"),
        loggers.logging_to(recipe, tmp_path, 0, ()) as logger,
    ):
        loggers.log(logger, {"step": runs[-1].finish(0) or 1, "loss": 2.0})
    monkeypatch.setattr(sys.modules["wandb"], "init", lambda **options: runs[-1].log({}, 0))
    with pytest.raises(OptionError, match=r"`logger`.*the run has finished.*wandb login"):
        train(recipe, tmp_path / "out")


@pytest.mark.parametrize("when", ["a row", "the end"])
def test_a_disk_that_is_full_for_wandb_is_one_line_and_the_journal_is_whole(tmp_path, runs, monkeypatch, when):
    """wandb's `log` and `finish` return as ever: its own process writes, and tells its log file alone."""
    recipe = ClassifyRecipe(logger="wandb", **TINY)
    asked, refused = [], 3 if when == "a row" else 9

    def probe(folder):
        asked.append(folder)
        return errno.ENOSPC if len(asked) == refused else None

    monkeypatch.setattr("polymix.files._probe", probe)
    with pytest.raises(OSError, match="No space left") as info:
        train(recipe, tmp_path)
    assert info.value.filename == str(tmp_path / "logs") and set(asked) == {tmp_path / "logs"}
    journal = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert journal == [1, 2, 3, 3, 4, 5, 6, 6][: refused if when == "a row" else None]
    assert runs[0].ends == [1 if when == "a row" else 0]


@pytest.mark.parametrize("logger", ["tensorboard", "wandb"])
def test_a_logger_that_is_not_installed_is_an_error_before_anything(tmp_path, monkeypatch, logger):
    monkeypatch.setitem(sys.modules, logger, None)  # what Python takes for a package that is missing
    with pytest.raises(MissingExtraError, match=rf"pip install {logger};.*\.\[{logger}\]"):
        train(ClassifyRecipe(logger=logger, **TINY), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_unknown_loggers_are_errors():
    with pytest.raises(OptionError, match="csv, tensorboard, wandb"):
        ClassifyRecipe(logger="mlflow")
