"""polymix train."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from polymix.cli.shared import Resume, Threads, bars, thread_count


def command(
    recipe: Annotated[
        str,
        typer.Argument(
            help="text, images, recall, or a file: JSON or YAML, or Python that sets `recipe`, which is run."
        ),
    ],
    data: Annotated[str | None, typer.Option(help="The data, a file or a folder. Default: the task's own.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Change an option of the recipe: --set steps=200. Repeatable.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the model, the measurements and the report.")] = Path(
        "polymix-train"
    ),
    logger: Annotated[
        str | None, typer.Option(help="csv, tensorboard or wandb: also log to the folder logs in --out.")
    ] = None,
    threads: Threads = None,
    resume: Resume = False,
) -> None:
    """Train a model by a recipe: text, images, or a task of your own.

    The folder gets the model, results.json, report.html with its pictures, metrics.jsonl and a checkpoint.

    Several processes: torchrun --nproc-per-node 2 -m polymix.cli train …

    Example: polymix train text --data books --set steps=2000 --set mixers=pom,local --out books-model
    """
    from functools import partial

    from polymix.tasks.runner import train_file

    console = Console()
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    options = [*(set_ or ()), *([] if logger is None else [f"logger={logger}"])]
    with bars(console, out, saved="checkpoint/last.ckpt"):
        train_file(recipe, out, data=data, options=options, resume=resume, threads=thread_count(threads), say=say)
