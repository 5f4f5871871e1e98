"""Loggers of a training, which get every row of metrics.jsonl: Lightning's for CSV, TensorBoard and wandb."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from polymix._io import write_whole
from polymix.errors import MissingExtraError
from polymix.tasks.recipe import TaskRecipe

FOLDER = "logs"  # in the run's folder
_ID = "wandb-run"
_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}


def check_logger(recipe: TaskRecipe) -> None:
    """MissingExtraError if the package of the recipe's logger is not installed."""
    package = _PACKAGES.get(recipe.logger or "")
    if package is not None and find_spec(package) is None:
        cure = f"Install it with pip install 'polymix[{package}]', or use --logger csv."
        got = f"{recipe.logger!r}, whose package is not installed"
        raise MissingExtraError("logger", got, "a logger that is installed", cure)


def make_logger(recipe: TaskRecipe, out: Path, done: int, rows: Sequence[Mapping[str, Any]]) -> Any:
    """The logger that a recipe names, or None. It writes to `logs` in the folder `out`.

    Args:
        done: the step from which a run continues; what TensorBoard has of later steps is hidden.
        rows: of the journal so far. A CSV file begins anew with them; a run of wandb goes on.
    """
    if recipe.logger is None:
        return None
    from lightning.pytorch import loggers

    if recipe.logger == "csv":
        (out / FOLDER / "metrics.csv").unlink(missing_ok=True)  # the rows follow
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logger: Any = loggers.CSVLogger(out, name="", version=FOLDER, flush_logs_every_n_steps=1)
            for row in rows:
                log(logger, row)
    elif recipe.logger == "tensorboard":
        logger = loggers.TensorBoardLogger(
            out, name="", version=FOLDER, default_hp_metric=False, purge_step=done + 1 if done else None
        )
    else:
        logger = loggers.WandbLogger(name=out.name, save_dir=_made(out / FOLDER), id=_run_id(out / FOLDER / _ID, done))
    logger.log_hyperparams(recipe.to_dict())
    return logger


def log(logger: Any, row: Mapping[str, Any]) -> None:
    """Give the numbers of a row to a logger."""
    numbers = {name: value for name, value in row.items() if isinstance(value, (int, float)) and name != "step"}
    if logger is not None and numbers:
        logger.log_metrics(numbers, step=row["step"])


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _run_id(path: Path, done: int) -> str:
    """The id of this folder's run of wandb: a new one, or where a run continues the one that it began with."""
    if not done or not path.is_file():
        write_whole(path, uuid.uuid4().hex[:8])
    return path.read_text("utf-8")
