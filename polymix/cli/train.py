"""polymix train."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from polymix.cli.shared import Resume, Threads, bars, cores


def command(
    recipe: Annotated[str, typer.Argument(help="A Python file that sets `recipe`; it is run, as any code.")],
    data: Annotated[
        str | None, typer.Option(help="Text, parquet or .bin shards, or a folder. Default: Python's own prose.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="steps=200: an option of the recipe (polymix.tasks.text.TextRecipe) or its model."),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for the model, metrics.jsonl, report.md and the checkpoint.")
    ] = Path("polymix-train"),
    threads: Threads = None,
    resume: Resume = False,
) -> None:
    """Train a language model on text, and leave it as transformers loads it.

    Several processes: torchrun --nproc-per-node 2 -m polymix.cli train …

    Example: polymix train recipes/text.py --data books --set steps=2000 --set mixers=pom,local --out books-model
    """
    from dataclasses import replace
    from functools import partial

    import torch

    from polymix.tasks.text import train_text
    from polymix.tasks.text.load import changed, load_recipe

    asked = changed(load_recipe(recipe), set_ or ())
    asked = asked if data is None else replace(asked, data=data)
    torch.set_num_threads(threads or cores())
    console = Console()
    with bars(console, out):
        train_text(asked, out, resume=resume, say=partial(console.print, markup=False, highlight=False, soft_wrap=True))
