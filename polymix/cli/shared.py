"""What the verbs share: options, the parsing of their words, progress bars and tables."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from polymix.errors import OptionError

Threads = Annotated[int | None, typer.Option(help="CPU threads; default: one for each core.")]
MaxSeconds = Annotated[float, typer.Option(help="Stop a mixer at a length where one call takes longer.")]
MaxGib = Annotated[float, typer.Option(help="Stop a mixer at a length where one call holds more.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on where an interrupted run in --out stopped.")]


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def counts(text: str, option: str = "--tokens", example: str = "64,256,1024") -> tuple[int, ...]:
    """`64,256` is (64, 256); anything else is an error that names the option and gives the example."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise OptionError(option, repr(text), "whole numbers separated by commas", f"Try {example}.") from error


def words(text: str) -> tuple[str, ...]:
    """`forward, training` is (`forward`, `training`)."""
    return tuple(part.strip() for part in text.split(","))


class Bars:
    """The progress of a comparison as rich bars."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def start(self, what: str, total: int) -> Callable[[int], None]:
        self.progress.start()  # only now: a run that ends in an error before it begins shows none
        task = self.progress.add_task(what, total=total)
        return lambda done: self.progress.update(task, completed=done)


@contextmanager
def bars(console: Console, out: Path) -> Iterator[Bars]:
    """Bars for a run that leaves its results in `out`; Ctrl-C says how to go on."""
    shown = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*shown, console=console)
    try:
        yield Bars(progress)
    except KeyboardInterrupt:
        console.print(
            f"Stopped. What had finished is kept in {out}: the same command with --resume goes on from there."
        )
        raise typer.Exit(130) from None
    finally:
        if progress.live.is_started:
            progress.stop()


def print_table(console: Console, title: str | None, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A first column of names, which may wrap, and columns of figures, which may not."""
    figures = [Column(heading, justify="right", no_wrap=True) for heading in headings[1:]]
    table = Table(
        Column(headings[0], overflow="fold"), *figures, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title,
        title_justify="left",
    )  # fmt: skip
    for row in rows:
        table.add_row(*row)
    console.print(table)
