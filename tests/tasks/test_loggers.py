"""Loggers of `polymix train`: every row of metrics.jsonl, once, also where a run is continued."""

import csv
import importlib.util
import json

import pytest

from polymix.errors import MissingExtraError, OptionError
from polymix.tasks import loggers
from polymix.tasks.classify import ImageRecipe
from polymix.tasks.runner import train

TINY = {"steps": 6, "log_every": 2, "evaluate_every": 3, "checkpoint_every": 3, "dim": 8, "depth": 1,
        "image_size": 8, "batch_size": 32}  # fmt: skip


def numbers(row):
    return {key: value for key, value in row.items() if key != "step" and not isinstance(value, (str, list))}


def rows(out):
    """(step, name, value) of every number in metrics.jsonl."""
    kept = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], name, value) for row in kept for name, value in numbers(row).items()]


def test_csv(tmp_path):
    train(ImageRecipe(logger="csv", **TINY), tmp_path)
    with (tmp_path / "logs" / "metrics.csv").open() as file:
        found = [(int(row["step"]), name, float(value)) for row in csv.DictReader(file)
                 for name, value in row.items() if value and name != "step"]  # fmt: skip
    assert sorted(found) == sorted(rows(tmp_path)) and found
    assert "mixer: pom" in (tmp_path / "logs" / "hparams.yaml").read_text()


def test_without_a_logger_there_is_no_folder(tmp_path):
    train(ImageRecipe(**TINY), tmp_path)
    assert not (tmp_path / "logs").exists()


class Killed(Exception):
    pass


def interrupted(out, monkeypatch, logger):
    """A run that dies at step 5, after a checkpoint at 3 and rows for 4, and is continued."""
    recipe, log = ImageRecipe(logger=logger, **TINY), loggers.log

    def dies(target, row):
        log(target, row)
        if row["step"] > 3:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("polymix.tasks.runner.log", dies)
        with pytest.raises(Killed):
            train(recipe, out)
    train(recipe, out, resume=True)


def test_csv_of_a_continued_run_has_every_row_once(tmp_path, monkeypatch):
    interrupted(tmp_path, monkeypatch, "csv")
    with (tmp_path / "logs" / "metrics.csv").open() as file:
        steps = [int(row["step"]) for row in csv.DictReader(file)]
    assert steps == [2, 3, 4, 6, 6]


def test_tensorboard_has_the_rows_and_hides_those_of_the_killed_run(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard", reason="untested: TensorBoard (the tensorboard extra)")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    interrupted(tmp_path, monkeypatch, "tensorboard")
    events = EventAccumulator(str(tmp_path / "logs"))
    events.Reload()
    found = [(event.step, tag, event.value) for tag in events.Tags()["scalars"] for event in events.Scalars(tag)]
    wanted = rows(tmp_path)
    assert sorted((step, tag) for step, tag, _ in found) == sorted((step, tag) for step, tag, _ in wanted)
    values = {(step, tag): value for step, tag, value in wanted}
    assert all(value == pytest.approx(values[step, tag], rel=1e-6) for step, tag, value in found)


class Wandb:
    """Stands in for Lightning's WandbLogger."""

    def __init__(self, **options):
        self.options, self.rows, self.settings = options, [], None

    def log_hyperparams(self, settings):
        self.settings = settings

    def log_metrics(self, metrics, step):
        self.rows.append((step, metrics))


def test_wandb_goes_on_with_the_run_that_it_began(tmp_path, monkeypatch):
    from lightning.pytorch import loggers as theirs

    monkeypatch.setattr(theirs, "WandbLogger", Wandb)
    recipe = ImageRecipe(logger="wandb", **TINY)
    first = loggers.make_logger(recipe, tmp_path, 0, ())
    loggers.log(first, {"step": 2, "loss": 1.5, "samples": ["a"]})
    again = loggers.make_logger(recipe, tmp_path, 3, ())
    anew = loggers.make_logger(recipe, tmp_path, 0, ())
    assert first.rows == [(2, {"loss": 1.5})] and first.settings["mixer"] == "pom"
    assert first.options["id"] == again.options["id"] != anew.options["id"]
    assert first.options["save_dir"] == tmp_path / "logs" and (tmp_path / "logs").is_dir()


@pytest.mark.parametrize("logger", ["tensorboard", "wandb"])
def test_a_logger_that_is_not_installed_is_an_error_before_anything(tmp_path, monkeypatch, logger):
    found = importlib.util.find_spec
    monkeypatch.setattr(loggers, "find_spec", lambda name: None if name == logger else found(name))
    with pytest.raises(MissingExtraError, match=rf"pip install 'polymix\[{logger}\]'"):
        train(ImageRecipe(logger=logger, **TINY), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_unknown_loggers_are_errors():
    with pytest.raises(OptionError, match="'csv', 'tensorboard', 'wandb'"):
        ImageRecipe(logger="mlflow")
