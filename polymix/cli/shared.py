"""What the commands share: options, parsing of lists, progress bars and tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table
from typer.core import TyperCommand

from polymix.errors import DataError, OptionError, PolymixError
from polymix.extras import check_installed
from polymix.files import is_there
from polymix.numbers import stacked
from polymix.results import RESULTS
from polymix.threads import busy_warning, free, stated

Threads = Annotated[int | None, typer.Option(help="CPU threads (default: OMP_NUM_THREADS, or one per core).")]
MaxSeconds = Annotated[float, typer.Option(help="Stop a mixer when one call takes longer.")]
MaxGib = Annotated[float, typer.Option(help="Stop a mixer when one call holds more memory.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the interrupted run in --out.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


MAX_THREADS = 4096
DATA_NAMES = ("digits", "fashion-mnist")  # as --data, beside paths
STATUS_COLUMNS = 66  # columns of a terminal that the name, the figures and the time left of a task need

_NAMES = 20  # characters that a column of names has at the least


class Command(TyperCommand):
    """A command whose errors know its flags by the names that arguments have in Python."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PolymixError as error:
            flags = {option for parameter in self.params for option in parameter.opts if option.startswith("--")}
            known = getattr(error, "flags", {})
            error.__dict__["flags"] = {**{flag.strip("-").replace("-", "_"): flag for flag in flags}, **known}
            raise


def check_report() -> None:
    """Raise MissingExtraError unless reports can be written: at once, not when the numbers are there."""
    check_installed("jinja2", "matplotlib", extra="train", why="The report is written with them.")


def thread_count(threads: int | None) -> int:
    """The threads that were asked for; by default what OMP_NUM_THREADS says, which torchrun sets, else the free cores.

    Where a busy machine decides it, a line on standard error says so.
    """
    if threads is not None and not 1 <= threads <= MAX_THREADS:
        allowed = f"a number from 1 to {MAX_THREADS}"
        raise OptionError("--threads", threads, allowed, "Leave it out for the environment's, or one per core.")
    if threads is not None:
        return threads
    by_environment = stated()
    if by_environment is not None:
        return min(by_environment, MAX_THREADS)
    share = free()
    if warning := busy_warning(share):
        print(f"polymix: {warning}", file=sys.stderr)
    return share


def check_paths(argument: str, *paths: str | Path | None, names: Container[str] = ()) -> None:
    """Raise DataError for a path that does not exist: before PyTorch is imported, which takes seconds.

    names: what is no path, such as those of DATA_NAMES.
    """
    for path in paths:
        if path is not None and path not in names and not is_there(Path(path)):
            raise DataError(argument, f"{path}, which does not exist", "a file or folder", "Check the path.")


def counts(text: str, option: str = "--tokens", example: str = "64,256,1024") -> tuple[int, ...]:
    """(64, 256) from "64,256". Errors name the option and give the example."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 20 for part in parts):
        raise OptionError(option, repr(text), "whole numbers separated by commas", f"Try {example}.")
    return tuple(map(int, parts))


def words(text: str) -> tuple[str, ...]:
    """("forward", "training") from "forward, training"."""
    return tuple(part.strip() for part in text.split(","))


class Bars:
    """Progress of a long run as rich bars; see `polymix.results.Progress`."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def start(self, what: str, total: int) -> Callable[..., None]:
        self.progress.start()  # not earlier, so that a run with a mistake in its options shows no bar
        task = self.progress.add_task(what, total=total, note="")
        return lambda done, note="": self.progress.update(task, completed=done, note=note)


@contextmanager
def bars(console: Console, out: Path, saved: str = RESULTS) -> Iterator[Bars]:
    """Bars for a run that saves its results in `out`. Ctrl-C prints how to continue.

    saved: the file in `out` that --resume continues from. Before it is there, the run starts anew.
    """
    left, note = TimeRemainingColumn(compact=True), TextColumn("{task.fields[note]}")
    spare = console.width - STATUS_COLUMNS
    bar = (BarColumn(bar_width=min(24, spare)), MofNCompleteColumn()) if spare >= 10 else ()
    elapsed = (TimeElapsedColumn(),) if spare >= 32 else ()
    progress = Progress(TextColumn("{task.description}"), *bar, *elapsed, left, note, console=console)
    try:
        yield Bars(progress)
    except KeyboardInterrupt:
        if (out / saved).exists():
            how = f"{out} keeps the completed results; continue with the same command and --resume."
        else:
            how = "Nothing was completed yet; run the same command again."
        console.print(f"Interrupted. {how}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(130) from None
    finally:
        if progress.live.is_started:
            progress.stop()


def print_json(content: Any) -> None:
    print(json.dumps(content, indent=2, ensure_ascii=False))


def print_table(console: Console, title: str | None, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: a first column of names, which may wrap, and columns of figures, which may not.

    Where the columns do not fit the terminal, each row is printed as a name and, below it, its figures with headings.
    """
    widths = [
        max(len(line) for text in column for line in text.split("\n")) for column in zip(*rows, headings, strict=True)
    ]
    if title:  # by itself: over a narrow table rich would break it into many lines
        console.print(title, style="italic", markup=False, highlight=False, soft_wrap=not console.is_terminal)
    if min(widths[0], _NAMES) + sum(widths[1:]) + 2 * len(widths) > console.width:
        for row in rows:
            for line in stacked(headings, row, console.width):
                console.print(line, markup=False, highlight=False)
        return
    figures = [Column(heading, justify="right", no_wrap=True) for heading in headings[1:]]
    table = Table(Column(headings[0], overflow="fold"), *figures, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in rows:
        table.add_row(*row)
    console.print(table)


def exclude(folder: Path, what: str, options: Mapping[str, object]) -> None:
    """OptionError for the first option that was given to a model that has no use for it."""
    for name, value in options.items():
        if value not in (None, False, [], ()):
            got = f"{value} for {folder}, whose model {what}"
            raise OptionError(name, got, "no such option for this model", "Leave it out.")
