"""Loggers of a training, which get every row of metrics.jsonl: a CSV file, TensorBoard's writer, wandb."""

from __future__ import annotations

import csv
import io
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from polymix.errors import OptionError, reason_of
from polymix.extras import check_installed
from polymix.files import check_room, write_whole, writing
from polymix.train.recipe import Recipe

FOLDER = "logs"  # in the run's folder
_ID = "wandb-run"


class Logger(Protocol):
    """Takes the numbers of a row."""

    def __call__(self, step: int, numbers: Mapping[str, float]) -> None: ...


def check_logger(recipe: Recipe) -> None:
    """MissingExtraError if the package of the recipe's logger is not installed."""
    package = recipe.logger if recipe.logger in ("tensorboard", "wandb") else None
    if package is not None:
        check_installed(package, extra=package, why="--logger csv does without.")


@contextmanager
def logging_to(recipe: Recipe, out: Path, done: int, rows: Sequence[Mapping[str, Any]]) -> Iterator[Logger | None]:
    """The logger that a recipe names, or None, for a `with` statement, at whose end it is whole.

    It writes to `logs` in the folder `out`.

    Args:
        done: the step from which a run continues; what TensorBoard has of later steps is hidden.
        rows: of the journal so far. A CSV file begins anew with them; a run of wandb goes on.
    Raises:
        OSError: of the folder or the file, where it cannot be written, also from the logger.
        OptionError: wandb refuses to log, as without a key.
    """
    if recipe.logger is None:
        yield None
        return
    folder = out / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    if recipe.logger == "csv":
        logger = _Csv(folder / "metrics.csv")
        for row in rows:
            log(logger, row)
        yield logger
        return
    options = {name: str(value) for name, value in recipe.to_dict().items()}
    library = _tensorboard(folder, done, options) if recipe.logger == "tensorboard" else _wandb(
        folder, out.name, done, options)  # fmt: skip
    with library as ready:
        yield ready


def log(logger: Logger | None, row: Mapping[str, Any]) -> None:
    """Give the numbers of a row to a logger."""
    numbers = {name: value for name, value in row.items() if isinstance(value, (int, float)) and name != "step"}
    if logger is not None and numbers:
        logger(row["step"], numbers)


class _Csv:
    """A CSV file, written whole after every row, because later rows may have columns of their own."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, list[dict[str, Any]]()

    def __call__(self, step: int, numbers: Mapping[str, float]) -> None:
        self.rows.append({"step": step, **numbers})
        columns = list(dict.fromkeys(name for row in self.rows for name in row))
        text = io.StringIO()
        writer = csv.DictWriter(text, columns)
        writer.writeheader()
        writer.writerows(self.rows)
        write_whole(self.path, text.getvalue())


@contextmanager
def _tensorboard(folder: Path, done: int, options: Mapping[str, str]) -> Iterator[Logger]:
    from torch.utils.tensorboard import SummaryWriter

    with _raised_once():
        with writing(folder):
            writer: Any = SummaryWriter(str(folder), purge_step=done + 1 if done else None)

        def logger(step: int, numbers: Mapping[str, float]) -> None:
            with writing(folder):
                for name, value in numbers.items():
                    writer.add_scalar(name, value, step)
                writer.flush()

        try:
            with writing(folder):
                writer.add_text("options", "\n".join(f"    {name}: {value}" for name, value in options.items()), done)
            yield logger
        except BaseException:
            with suppress(OSError):  # perhaps the one that is on its way
                writer.close()
            raise
        with writing(folder):
            writer.close()


@contextmanager
def _raised_once() -> Iterator[None]:
    """Print no traceback of TensorBoard's thread, whose errors its next call raises."""
    before = threading.excepthook

    def report(failure: threading.ExceptHookArgs) -> None:
        if not type(failure.thread).__module__.startswith("tensorboard."):
            before(failure)

    threading.excepthook = report
    try:
        yield
    finally:
        threading.excepthook = before


@contextmanager
def _wandb(folder: Path, name: str, done: int, options: Mapping[str, str]) -> Iterator[Logger]:
    """A run of wandb: a new one, or where a training continues the one that it began with.

    Its own process writes, and on a full disk leaves rows out without a word to this one; so the disk is asked.
    """
    import wandb

    path = folder / _ID
    if not done or not path.is_file():
        write_whole(path, uuid.uuid4().hex[:8])

    @contextmanager
    def refusal() -> Iterator[None]:
        try:
            yield
        except wandb.Error as error:
            got, allowed = (
                f"'wandb', which says: {reason_of(error).rstrip('.')}",
                "csv, tensorboard, or wandb where it can log",
            )
            raise OptionError("logger", got, allowed, "See `wandb login`, or set WANDB_MODE=offline.") from error

    with refusal():
        run = wandb.init(name=name, dir=str(folder), id=path.read_text("utf-8"), resume="allow", config=dict(options))

    def logger(step: int, numbers: Mapping[str, float]) -> None:
        with refusal():
            run.log({**numbers, "step": step}, step=step)
        check_room(folder)

    status = 1
    try:
        yield logger
        status = 0
    finally:  # or the next run of this process, such as the control's, would go on with this one
        with refusal():
            run.finish(exit_code=status)
    check_room(folder)
